"""The five models: shapes, formulas by hand, seeds, and refusals. Layer: unit, no processes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.batches import Rows, make_kjt, make_schema
from torchrec_kstep.config.schema import ModelConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.models import MODELS, build_model
from torchrec_kstep.models.blocks import FirstOrder
from torchrec_kstep.models.deepfm import pairwise_sum
from torchrec_kstep.models.dlrm import PairwiseDots
from torchrec_kstep.models.tables import WIDE_DIM, wide_tables
from torchrec_kstep.types import FeatureSchema, SparseFeature

CPU = torch.device("cpu")


def small(name: str, **changes: object) -> ModelConfig:
    return ModelConfig(**({"name": name, "embedding_dim": 4, "mlp": [8, 4], "bottom_mlp": [6], "embedding_init_std": 0.5} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_row_scores_the_same_alone_and_in_any_batch(name: str, num_dense: int, pooling: str) -> None:
    """Otherwise a `squeeze` somewhere eats the batch axis of a single row, or rows leak into each other (C17)."""
    schema = make_schema([10, 3, 50], num_dense)
    model = build_model(small(name, pooling=pooling, dropout=0.5), schema).eval()
    rows = Rows.random(schema, 3, seed=1)
    batch = rows.batch()
    together = model(batch.dense, batch.sparse)
    assert together.shape == (3,)
    pair = rows.share(0, 2)
    torch.testing.assert_close(model(pair.dense, pair.sparse), together[:2], rtol=1e-6, atol=1e-6)
    for index in range(3):
        alone = rows.share(index, 3)
        logit = model(alone.dense, alone.sparse)
        assert logit.shape == (1,)
        torch.testing.assert_close(logit[0], together[index], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_large_counts_do_not_decide_the_first_logits(name: str) -> None:
    """Otherwise training starts by unlearning a loss of several nats: dense columns are logs of counts, and some are large."""
    schema = make_schema([100] * 26, num_dense=13)
    batch = Rows.random(schema, 256, seed=1).batch()
    counts = 10 ** (4 * torch.rand(256, 13, generator=torch.Generator().manual_seed(1)))
    logits = build_model(ModelConfig(name=name), schema)(counts.log1p(), batch.sparse)
    labels = (torch.arange(256) % 2).float()
    assert nn.functional.binary_cross_entropy_with_logits(logits, labels) < 1.5


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_empty_bags_scores_and_trains_without_nan(name: str) -> None:
    """Otherwise one padding row would poison every weight (C09)."""
    schema = make_schema([10, 3], num_dense=0)
    model = build_model(small(name, pooling="mean"), schema)
    model(torch.zeros(2, 0), make_kjt(schema.sparse_names, [[[], []], [[], []]])).sum().backward()
    assert all(param.grad is None or torch.isfinite(param.grad).all() for param in model.parameters())


class _Reversed(nn.Module):
    """A collection that returns its features in another order, as a sharded one may."""

    def __init__(self, inner: EmbeddingBagCollection) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        pooled = self.inner(sparse)
        keys = list(reversed(pooled.keys()))
        lengths = dict(zip(pooled.keys(), pooled.length_per_key(), strict=True))
        return KeyedTensor(keys, [lengths[key] for key in keys], torch.cat([pooled[key] for key in keys], dim=1))


@pytest.mark.parametrize("name", MODELS)
def test_the_order_in_which_a_collection_returns_features_does_not_matter(name: str) -> None:
    """Otherwise a sharded model would mix up its features without an error."""
    schema = make_schema([10, 3, 50], num_dense=2)
    model = build_model(small(name), schema)
    batch = Rows.random(schema, 4, seed=2).batch()
    expected = model(batch.dense, batch.sparse)
    model.embeddings = _Reversed(model.embeddings)  # type: ignore[arg-type]
    if hasattr(model, "first_order"):
        model.first_order.wide = _Reversed(model.first_order.wide)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(model(batch.dense, batch.sparse), expected, rtol=0, atol=0)


# --- formulas ---


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_pairs_of_a_factorization_machine_are_summed_over_fields_not_over_columns(rows: int, fields: int, dim: int, seed: int) -> None:
    """Otherwise, as in TorchRec's module, columns of different index would be multiplied too."""
    x = torch.randn(rows, fields, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.zeros(rows, dtype=torch.float64)
    for a, b in itertools.combinations(range(fields), 2):
        expected += (x[:, a] * x[:, b]).sum(dim=1)
    torch.testing.assert_close(pairwise_sum(x), expected)


@given(st.integers(1, 4), st.integers(2, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_dlrm_takes_each_pair_of_different_fields_once(rows: int, fields: int, dim: int, seed: int) -> None:
    """Otherwise squares or repeated pairs would enter the top network."""
    x = torch.randn(rows, fields, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.stack([(x[:, a] * x[:, b]).sum(dim=1) for a, b in itertools.combinations(range(fields), 2)], dim=1)
    interact = PairwiseDots(fields)
    assert interact.out_features == expected.shape[1]
    torch.testing.assert_close(interact(x), expected)


def test_the_first_order_part_adds_bias_id_weights_and_dense_weights() -> None:
    """Otherwise an unused column of a wide row would leak into the logit."""
    schema = FeatureSchema(("d",), (SparseFeature("a", 3), SparseFeature("b", 2)))
    first_order = FirstOrder(wide_tables(schema, "sum", CPU), schema.sparse_names, 1)
    with torch.no_grad():
        first_order.bias.fill_(0.5)
        first_order.dense_weight.fill_(2.0)
        first_order.wide.embedding_bags["wide_a"].weight.copy_(torch.arange(12.0).reshape(3, WIDE_DIM))
        first_order.wide.embedding_bags["wide_b"].weight.fill_(100.0)
    logit = first_order(torch.tensor([[1.0], [0.0]]), make_kjt(["a", "b"], [[[1, 2], []], [[], [1]]]))
    torch.testing.assert_close(logit, torch.tensor([0.5 + 2.0 + 4.0 + 8.0, 0.5 + 100.0]))
    logit.sum().backward()
    grad = first_order.wide.embedding_bags["wide_a"].weight.grad
    assert grad is not None
    assert grad[:, 0].tolist() == [0.0, 1.0, 1.0]
    assert not grad[:, 1:].any(), "unused columns must never move"


@pytest.mark.parametrize(("name", "cross_rank"), [("dcn", 0), ("dcnv2", 0), ("dcnv2", 2)])
def test_cross_layers_follow_the_papers(name: str, cross_rank: int) -> None:
    """Otherwise an upgrade of TorchRec could change a model's formula unseen."""
    schema = make_schema([10, 5], num_dense=2)
    model = build_model(small(name, cross_rank=cross_rank, num_cross_layers=2), schema)
    x0 = torch.randn(3, 2 + 2 * 4)
    with torch.no_grad():
        for param in model.cross.parameters():
            param.copy_(torch.randn(param.shape) * 0.3)
    cross = model.cross
    x = x0
    for layer in range(2):
        if name == "dcn":
            x = x0 * (x @ cross.kernels[layer]) + cross.bias[layer].squeeze(1) + x
        else:
            weight = cross.W_kernels[layer] @ cross.V_kernels[layer] if cross_rank else cross.kernels[layer]
            x = x0 * (x @ weight.T + cross.bias[layer].flatten()) + x
    torch.testing.assert_close(cross(x0), x)


# --- seeds ---


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_depend_on_the_seed_alone(name: str) -> None:
    """Otherwise ranks would start from different models, or building one would disturb the caller's random numbers."""
    schema = make_schema([10, 3], num_dense=1)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model(small(name), schema, seed=7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model(small(name), schema, seed=7).state_dict()
    other = build_model(small(name), schema, seed=8).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    table = "embeddings.embedding_bags.f0.weight"
    assert not torch.equal(first[table], other[table])


def test_a_table_starts_the_same_whatever_other_tables_there_are() -> None:
    """Otherwise adding a feature would change all others, and runs could not be compared."""
    key = "embeddings.embedding_bags.f0.weight"
    alone = build_model(small("wide_deep"), make_schema([1000])).state_dict()[key]
    beside = build_model(small("dcn"), make_schema([1000, 1000])).state_dict()
    assert torch.equal(alone, beside[key])
    assert not torch.equal(beside[key], beside["embeddings.embedding_bags.f1.weight"])
    assert float(alone.std()) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_takes_no_memory(name: str) -> None:
    """Otherwise planning for tables larger than this machine would need that machine."""
    model = build_model(small(name), make_schema([10**12, 5], num_dense=1), torch.device("meta"))
    assert all(param.is_meta for param in model.parameters())


# --- refusals ---


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (FeatureSchema((), ()), "no sparse feature"),
        (FeatureSchema((), (SparseFeature("C1", 5), SparseFeature("C1", 6))), "feature 'C1' appears 2 times"),
        (FeatureSchema(("I1", "I1"), (SparseFeature("C1", 5),)), "dense column 'I1' appears more than once"),
        (FeatureSchema((), (SparseFeature("item.id", 5),)), "may be neither empty nor hold a dot"),
        (FeatureSchema((), (SparseFeature("a", 5), SparseFeature("wide_a", 5))), "would share the name of the first-order table of 'a'"),
        (FeatureSchema((), (SparseFeature("a", 0),)), "its table has 0 rows, expected at least 1"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_features_that_make_no_model_are_refused_by_name(name: str, schema: FeatureSchema, expected: str) -> None:
    """Otherwise a later table would overwrite an earlier one without a word (C07)."""
    with pytest.raises(ConfigError, match=expected):
        build_model(small(name), schema)


def test_every_finding_is_told_at_once() -> None:
    """Otherwise users would mend one fault per run."""
    schema = FeatureSchema(("d", "d"), (SparseFeature("a", 0), SparseFeature("a.b", 3)))
    with pytest.raises(ConfigError) as error:
        build_model(small("dcn"), schema)
    assert str(error.value).count("\n") == 3


def test_an_unknown_model_and_one_without_anything_to_interact_are_refused() -> None:
    """Otherwise the error would come from deep inside a layer."""
    with pytest.raises(ConfigError, match="expected one of dlrm, deepfm"):
        build_model(small("transformer"), make_schema([5]))
    with pytest.raises(ConfigError, match="needs at least 2 sparse features"):
        build_model(small("dlrm"), make_schema([5]))
