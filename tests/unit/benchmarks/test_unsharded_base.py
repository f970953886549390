"""The base that is trained in plain PyTorch computes the product's model. Layer: unit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.unsharded_base import clip_table
from benchmarks.unsharded_model import stacked
from torchrec_kstep.config.schema import ModelConfig, OptimConfig
from torchrec_kstep.models import build_model
from torchrec_kstep.types import FeatureSchema, SparseFeature

SIZES = {"a": 11, "b": 5, "c": 3}
B = 16


def model(name: str) -> nn.Module:
    built = build_model(
        ModelConfig(name=name, embedding_dim=4, mlp=[8, 6]),
        FeatureSchema(dense_names=(), sparse=tuple(SparseFeature(table, rows, 1) for table, rows in SIZES.items())),
    )
    with torch.no_grad():
        for param in built.parameters():
            param.add_(0.3 * torch.randn(param.shape))
    return built


def tables_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, param) for name, param in module.named_parameters() if ".embedding_bags." in name]


@pytest.mark.parametrize("name", ["deepfm", "wide_deep", "dcn", "dcnv2"])
def test_logits_and_gradients_are_those_of_the_model(name: str) -> None:
    built = model(name)
    flat = stacked(copy.deepcopy(built))  # which may keep the module and change its weights
    ids = torch.stack([torch.randint(0, rows, (B,)) for rows in SIZES.values()])
    label = (torch.rand(B) < 0.4).float()
    rows = (ids + flat.first_row[:, None]).t()
    for _ in range(2):  # the second time there are gradients from before
        built.zero_grad()
        logit = built(torch.empty(B, 0), KeyedJaggedTensor(list(SIZES), ids.flatten(), lengths=torch.ones(3 * B, dtype=torch.int64)))
        binary_cross_entropy_with_logits(logit, label).backward()
        torch.testing.assert_close(flat.logits(rows), logit.detach(), rtol=1e-6, atol=1e-6)
        with torch.no_grad():  # as training does
            flat.backward(rows, label)
        assert flat.table.grad is not None
        assert flat.dense.grad is not None
        begin = 0
        for table, size in SIZES.items():
            grads = {key.split(".embedding_bags.")[1]: param.grad for key, param in tables_of(built)}
            own = flat.table.grad[begin : begin + size]
            torch.testing.assert_close(own[:, flat.num_wide :], grads[f"{table}.weight"], rtol=1e-5, atol=1e-7)
            if flat.num_wide:
                torch.testing.assert_close(own[:, 0], grads[f"wide_{table}.weight"][:, 0], rtol=1e-5, atol=1e-7)
            begin += size
        dense = [param.grad.flatten() for key, param in built.named_parameters() if ".embedding_bags." not in key]
        torch.testing.assert_close(flat.dense.grad.sort()[0], torch.cat(dense).sort()[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["deepfm", "dcn"])
def test_bags_are_summed_and_what_fills_them_up_stays_zero(name: str) -> None:
    built = model(name)
    flat = stacked(copy.deepcopy(built))
    flat.feature_of_column = torch.tensor([0, 1, 1, 2])
    none = len(flat.table) - 1
    a, b, c = flat.first_row.tolist()
    rows = torch.tensor([[a + 1, b, b + 2, c], [a, b + 1, none, c + 2]])
    features = KeyedJaggedTensor(list(SIZES), torch.tensor([1, 0, 0, 2, 1, 0, 2]), lengths=torch.tensor([1, 1, 2, 1, 1, 1]))
    label = torch.tensor([1.0, 0.0])
    logit = built(torch.empty(2, 0), features)
    binary_cross_entropy_with_logits(logit, label).backward()
    torch.testing.assert_close(flat.logits(rows), logit.detach(), rtol=1e-6, atol=1e-6)
    flat.backward(rows, label)
    assert flat.table.grad is not None
    grads = {key.split(".embedding_bags.")[1]: param.grad for key, param in tables_of(built)}
    torch.testing.assert_close(flat.table.grad[b:c, flat.num_wide :], grads["b.weight"], rtol=1e-5, atol=1e-7)
    assert not flat.table.grad[none].any()


def test_an_optimizer_of_the_flat_weights_moves_the_module() -> None:
    """DCN keeps its module: its weights must be views of what the optimizer steps."""
    flat = stacked(model("dcn"))
    rows = torch.zeros(B, len(SIZES), dtype=torch.int64) + flat.first_row
    before = flat.logits(rows)
    flat.dense.data.add_(0.1)
    assert not torch.equal(flat.logits(rows), before)


def test_the_clip_leaves_first_order_weights_alone_and_counts_occurrences() -> None:
    flat = stacked(model("deepfm"))
    rows = torch.tensor([[0, 11, 16], [0, 12, 16]])
    flat.table.grad.fill_(100.0)
    clip_table(flat, rows, OptimConfig(clip="cowclip", embedding_l2=0.0))
    assert bool((flat.table.grad[:, 0] == 100.0).all())
    norms = flat.table[:, 1:].detach().norm(dim=1)
    torch.testing.assert_close(flat.table.grad[[0, 11, 1], 1:].norm(dim=1), torch.tensor([2.0, 1.0, 1.0]) * norms[[0, 11, 1]])
