"""Goal: a tiered collection on one rank: refusals by name, ids, evaluation, weights' gradients, meta. Layer: unit, one-rank group."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.batches import make_kjt
from tests.multiprocess.tiered_cases import MEAN, Case, Reference, plan_of, shard, share
from tests.multiprocess.tiny import one_rank_group
from torchrec_kstep.errors import CheckpointError, ConfigError, DataError
from torchrec_kstep.ops import kernels
from torchrec_kstep.optim_spec import AdamSpec, CowClip, RowwiseAdagradSpec
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder, clip_warnings, tier_scalars
from torchrec_kstep.sharding.tiered.collection import ShardedTieredEmbeddingBagCollection
from torchrec_kstep.sharding.tiered.initial import table_seed
from torchrec_kstep.sharding.tiered.state import kernels_of
from torchrec_kstep.sharding.tiered.tables import check_collection
from torchrec_kstep.storage.table_ids import hash_of
from torchrec_kstep.world import World

CASE = Case(("tw0", "rw", "cw"))


@pytest.fixture
def world() -> Iterator[World]:
    with one_rank_group() as world:
        yield world


def test_rows_start_as_seed_table_row_and_column_say(world: World) -> None:
    state = shard(CASE, world, seed=11).state_dict()
    for name, number, init in (("a", 0, ("normal", 0.0, 0.3)), ("b", 1, ("uniform", -(23**-0.5), 23**-0.5))):
        rows = CASE.rows[number]
        (part,) = state[f"ebc.embedding_bags.{name}.weight"].local_shards()
        expected = kernels.initial_values(torch.arange(rows), table_seed(11, name), hash_of(name), 0, CASE.dim, *init)
        assert torch.equal(part.tensor + 0, expected)


def test_the_order_of_tables_decides_nothing(world: World) -> None:
    """Otherwise a model whose tables are listed anew would start elsewhere, and refuse its own store."""
    tables = CASE.tables()
    starts = []
    for listed in (tables, tables[::-1]):
        module = EmbeddingBagCollection(tables=listed, device=torch.device("meta"))
        sharder = TieredEmbeddingBagCollectionSharder(CASE.optimizer, seed=11)
        plan = plan_of(CASE, module, sharder, world)
        state = sharder.shard(module, plan.plan["ebc"], ShardingEnv.from_process_group(dist.group.WORLD)).state_dict()
        starts.append({name: weight.local_shards()[0].tensor + 0 for name, weight in state.items()})
    assert len(starts[0]) == 3
    for name, weight in starts[0].items():
        assert torch.equal(weight, starts[1][name]), name


@pytest.mark.parametrize("bad", [41, -1, 2**40])
@pytest.mark.parametrize("place", ["tw0", "rw"])
def test_ids_out_of_range_are_refused_with_their_names(world: World, bad: int, place: str) -> None:
    """Otherwise row-wise sharding would train another row instead."""
    dmp = shard(Case((place, "tw0", "tw0")), world)
    features = make_kjt(["f0", "f1", "f2", "f3"], [[[3]], [[0, bad]], [[1]], [[2]]])
    with pytest.raises(DataError, match=rf"feature 'f1' holds the id {bad}, but table 'a' has 41 rows"):
        dmp(features)


def test_a_missing_feature_is_named(world: World) -> None:
    """TorchRec says `'f1' is not in list`."""
    features = make_kjt(["f0", "user", "f2", "f3"], [[[3]], [[0]], [[1]], [[2]]])
    with pytest.raises(DataError, match=r"lacks 1 of 4 features: 'f1' of table 'a'; it has f0, user, f2, f3\. "):
        shard(CASE, world)(features)


@pytest.mark.parametrize("keys", [["f1", "f0", "f2", "f3"], ["f0", "f1", "f2", "f3", "f4"]])
def test_features_in_other_places_than_in_the_first_batch_are_refused(world: World, keys: list[str]) -> None:
    """TorchRec takes features by place: rows of one table would be trained with ids of another."""
    dmp = shard(CASE, world)
    dmp(make_kjt(["f0", "f1", "f2", "f3"], [[[3]], [[0]], [[1]], [[2]]]))
    with pytest.raises(DataError, match=f"the batch has the features {', '.join(keys)}, the first one had f0, f1, f2, f3"):
        dmp(make_kjt(keys, [[[0]]] * len(keys)))


def test_a_variable_batch_is_refused_by_name(world: World) -> None:
    features = KeyedJaggedTensor(
        keys=["f0", "f1", "f2", "f3"],
        values=torch.zeros(5, dtype=torch.int64),
        lengths=torch.ones(5, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1], [1], [1]],
        inverse_indices=(["f0", "f1", "f2", "f3"], torch.zeros(4, 2, dtype=torch.int64)),
    )
    with pytest.raises(DataError, match="variable batch is not supported for tiered tables"):
        shard(CASE, world)(features)


def test_int32_ids_give_the_same_rows(world: World) -> None:
    dmp = shard(CASE, world)
    features = share(CASE, 0, 0).features
    narrow = KeyedJaggedTensor(keys=features.keys(), values=features.values().int(), lengths=features.lengths().int())
    assert torch.equal(dmp(features), dmp(narrow))


def test_the_share_of_clipped_rows_is_told_by_table_and_a_large_one_is_flagged(world: World) -> None:
    """A loss that sums over rows, or is multiplied by the number of ranks, shows in nothing else (C56)."""
    quiet = Case((*CASE.places[:2], "tw0"), optimizer=AdamSpec(lr=0.01, clip=CowClip(ratio=1.0, zeta=1e6)))
    loud = replace(quiet, optimizer=AdamSpec(lr=0.01, clip=CowClip(ratio=1e-9, exempt=("b",))))
    for case, expected in ((quiet, {"a": 0.0, "b": 0.0, "c": 0.0}), (loud, {"a": 1.0, "c": 1.0})):
        dmp = shard(case, world)
        part = share(case, 0, 0)
        part.loss(dmp(part.features), 1).backward()
        scalars = tier_scalars(dmp)
        assert {name: value for name, value in scalars.items() if "clipped_share" in name} == {
            f"clipped_share.{table}": value for table, value in expected.items()
        }
        assert len(clip_warnings(dmp)) == (len(expected) if case is loud else 0)
    assert "100.0% of the updates of table 'a'" in clip_warnings(dmp)[0]


def test_evaluation_leaves_no_trace(world: World) -> None:
    """Otherwise looking at a model would change it, or fill memory with rows that were never trained."""
    dmp = shard(CASE, world)
    rows = [kernel.group for kernel in kernels_of(dmp.module.ebc._lookups)]
    with torch.no_grad():
        first = dmp(share(CASE, 0, 0).features)
        dmp.eval()
        second = dmp(share(CASE, 0, 0).features)
    assert torch.equal(first, second)
    assert all(counters["materialised_rows"] == 0 for group in rows for counters in group.counters().values())


def test_gradients_of_the_weights_of_ids(world: World) -> None:
    """TorchRec's input distribution cuts the graph, so this is what a feature processor behind it gets."""
    case = Case(("tw0", "tw0", "tw0"), weighted=True)
    dmp, reference = shard(case, world), Reference.make(case)
    dmp.load_state_dict({f"ebc.embedding_bags.{name}.weight": weight.clone() for name, weight in reference.weights().items()})
    (lookup,) = dmp.module.ebc._lookups
    (config,) = lookup.grouped_configs
    features = share(case, 0, 0).features
    features = features.permute([features.keys().index(name) for name in config.feature_names()])
    weights = features.weights().clone().requires_grad_()
    columns = torch.linspace(-1, 1, 5 * case.dim)
    ours = lookup(KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths()))
    (ours.tanh() * columns).sum().backward()
    tables = [table.name for table in config.embedding_tables for _ in table.feature_names]
    expected = weights.detach().clone().requires_grad_()
    pooled, begin = [], 0
    for table, length, lengths in zip(tables, features.length_per_key(), features.lengths().view(5, -1), strict=True):
        part = slice(begin, begin + length)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        weight = reference.weights()[table]
        pooled.append(embedding_bag(features.values()[part], weight, offsets, mode="sum", per_sample_weights=expected[part]))
        begin += length
    (torch.cat(pooled, dim=1).tanh() * columns).sum().backward()
    torch.testing.assert_close(weights.grad, expected.grad, rtol=1e-5, atol=1e-6)


def bag(**options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"], **options)


@pytest.mark.parametrize(
    ("table", "device", "is_weighted", "message"),
    [
        (bag(data_type=DataType.FP16), "cpu", False, "table 't' is FP16"),
        (bag(pooling=PoolingType.MEAN), "cpu", True, "table 't' has MEAN pooling in a weighted collection"),
        (bag(use_virtual_table=True), "cpu", False, "table 't' has use_virtual_table"),
        (bag(need_pos=True), "cpu", False, "table 't' has need_pos"),
        (bag(), "meta", False, "device 'meta'"),
    ],
)
def test_what_tiers_cannot_do_is_refused_by_name(table: EmbeddingBagConfig, device: str, is_weighted: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_collection([table], {"t": "customized_kernel"}, torch.device(device), is_weighted)
    check_collection([table], {"t": "fused"}, torch.device(device), is_weighted)  # TorchRec's own business


@pytest.mark.parametrize(
    ("optimizer", "deferred", "message"),
    [
        (RowwiseAdagradSpec(lr=0.1), False, "row-wise Adagrad.*shard the table by rows or as a whole, or choose another optimizer"),
        (RowwiseAdagradSpec(lr=0.1), True, "row-wise Adagrad"),
        (AdamSpec(lr=0.1, clip=CowClip()), False, "CowClip.*updated inside backward here: give the sharder deferred=True, or shard"),
    ],
)
def test_rules_over_whole_rows_refuse_column_shards(world: World, optimizer: Any, deferred: bool, message: str) -> None:
    """Otherwise results would depend on the plan."""
    with pytest.raises(ConfigError, match=rf"table 'a' is cut by columns \(over ranks 0\), and its optimizer has {message}"):
        shard(Case(("cw", "tw0", "tw0"), optimizer=optimizer, deferred=deferred), world)
    shard(Case(("rw", "tw0", "tw0"), optimizer=optimizer, deferred=deferred), world)


def test_other_sharding_types_are_refused_by_name(world: World) -> None:
    dmp = shard(Case(("tw0", "tw0", "tw0")), world)
    infos = dmp.module.ebc.sharding_type_to_sharding_infos["table_wise"]
    infos[0].param_sharding.sharding_type = "table_column_wise"
    with pytest.raises(ConfigError, match="tiered table 'a' is table_column_wise: expected one of table_wise, row_wise"):
        ShardedTieredEmbeddingBagCollection.create_embedding_bag_sharding(infos, dmp.module.ebc._env)


def test_a_state_of_another_size_is_refused(world: World) -> None:
    dmp = shard(CASE, world)
    with pytest.raises(CheckpointError, match=r"embedding_bags.b.weight: expected \(23, 8\) rows and columns, got \(22, 8\)"):
        dmp.load_state_dict({"ebc.embedding_bags.b.weight": torch.zeros(22, 8)}, strict=False)


def test_a_collection_without_tiered_tables_averages_right_too(world: World) -> None:
    """The remedy for TorchRec's averages does not depend on whose the kernels are."""
    case = Case(("rw", "tw0", "tw0"), (MEAN, MEAN, MEAN), stock=dict.fromkeys("abc", "fused"))
    dmp, reference = shard(case, world), Reference.make(case)
    dmp.load_state_dict({f"ebc.embedding_bags.{name}.weight": weight.clone() for name, weight in reference.weights().items()})
    part = share(case, 0, 0)
    torch.testing.assert_close(dmp(part.features), reference.model(part.features), rtol=1e-6, atol=1e-6)


def test_tables_keep_nothing_in_parameters(world: World) -> None:
    dmp = shard(CASE, world)
    assert {name: parameter.numel() for name, parameter in dmp.named_parameters()} == {
        f"ebc.embedding_bags.{name}.weight": 0 for name in "abc"
    }
