"""The base that is trained in plain PyTorch computes the product's model. Layer: unit."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.unsharded_base import StackedDeepFM, clip_table
from torchrec_kstep.config.schema import ModelConfig, OptimConfig
from torchrec_kstep.models import build_model
from torchrec_kstep.models.deepfm import DeepFM
from torchrec_kstep.types import FeatureSchema, SparseFeature

SIZES = {"a": 11, "b": 5, "c": 3}
B = 16


def model() -> DeepFM:
    built = build_model(
        ModelConfig(name="deepfm", embedding_dim=4, mlp=[8, 6]),
        FeatureSchema(dense_names=(), sparse=tuple(SparseFeature(name, rows, 1) for name, rows in SIZES.items())),
    )
    assert isinstance(built, DeepFM)
    with torch.no_grad():
        for param in built.parameters():
            param.add_(0.3 * torch.randn(param.shape))
        for name in SIZES:
            built.first_order.wide.embedding_bags[f"wide_{name}"].weight[:, 1:] = 0.0
    return built


def test_logits_and_gradients_are_those_of_the_model() -> None:
    built = model()
    stacked = StackedDeepFM(built)
    ids = torch.stack([torch.randint(0, rows, (B,)) for rows in SIZES.values()])
    label = (torch.rand(B) < 0.4).float()
    logit = built(torch.empty(B, 0), KeyedJaggedTensor(list(SIZES), ids.flatten(), lengths=torch.ones(3 * B, dtype=torch.int64)))
    binary_cross_entropy_with_logits(logit, label).backward()
    rows = (ids + stacked.first_row[:, None]).t()
    torch.testing.assert_close(stacked.logits(rows), logit.detach(), rtol=1e-6, atol=1e-6)
    stacked.backward(rows, label)
    bags, wide = built.embeddings.embedding_bags, built.first_order.wide.embedding_bags
    table = torch.cat([torch.cat([wide[f"wide_{name}"].weight.grad[:, :1], bags[name].weight.grad], dim=1) for name in SIZES])
    torch.testing.assert_close(stacked.table.grad, table, rtol=1e-5, atol=1e-7)
    dense = [param.grad.flatten() for param in (*built.deep.parameters(), built.first_order.bias)]
    torch.testing.assert_close(stacked.dense.grad, torch.cat(dense), rtol=1e-5, atol=1e-7)


def test_the_clip_leaves_first_order_weights_alone_and_counts_occurrences() -> None:
    stacked = StackedDeepFM(model())
    rows = torch.tensor([[0, 11, 16], [0, 12, 16]])
    stacked.table.grad.fill_(100.0)
    clip_table(stacked, rows, OptimConfig(clip="cowclip", embedding_l2=0.0))
    assert bool((stacked.table.grad[:, 0] == 100.0).all())
    norms = stacked.table[:, 1:].detach().norm(dim=1)
    torch.testing.assert_close(stacked.table.grad[[0, 11, 1], 1:].norm(dim=1), torch.tensor([2.0, 1.0, 1.0]) * norms[[0, 11, 1]])
