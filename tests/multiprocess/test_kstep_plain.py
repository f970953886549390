"""KStepAdam over tables that keep TorchRec's kernels: dense ones equal tiered tables, fused ones are merged; what is refused by name.

Layer: multiprocess.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, data_parallel, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from tests.multiprocess.kstep_cases import ROWS, SPEC, Trained, batch, env_of, outcome_of
from tests.multiprocess.test_kstep_train import kstep_config
from tests.multiprocess.test_tiered_sequences import Sequences, share, tables
from tests.multiprocess.tiny import TinyDataset, assert_equal_bits, fingerprints, finish
from tests.spawn import SpawnRanks
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.optim.kstep import KStepAdam
from torchrec_kstep.torchrec_seam.sharding import EmbeddingCollectionSharder, EmbOptimType
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

CASES: dict[str, dict[str, Any]] = {
    "rounds": {"k": 3},
    "synchronous": {"k": 1},
    "paper": {"k": 3, "recipe": "paper", "spec": replace(SPEC, bias_correction="global")},
    "late": {"k": 3, "merge": MergeSpec(overlap_steps=1)},
    "frozen": {"k": {0: 1, 2: 3}, "variant": "frozen", "spec": replace(SPEC, frozen=True)},
    "clipped": {"k": 3, "clip_norm": 0.05, "clip_covers": "all"},
    "columns": {"k": 3, "places": {"a": column_wise(ranks=[0, 1], compute_kernel="fused")}},
}


def shards_of(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Local shards of tables, connected to the model."""
    return {
        f"{name}@{list(shard.metadata.shard_offsets)}": shard.tensor
        for name, value in dmp.state_dict().items()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    }


def values_of(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Copies of the local shards."""
    return {key: (shard + 0).as_subclass(torch.Tensor).detach().clone() for key, shard in shards_of(dmp).items()}


def start_alike(source: DistributedModelParallel, target: DistributedModelParallel) -> None:
    """Gives the tables of one model the weights of another of the same plan."""
    start = values_of(source)
    for key, shard in shards_of(target).items():
        shard.copy_(start[key])


def _both(_world: World, ranks_per_replica: int, names: list[str]) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Weights of tables after 7 steps and a last merge, with tiered and with dense kernels, from equal weights."""
    found: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name in names:
        case = {"has_batch_norm": False, **CASES[name]}
        if ranks_per_replica == 1:
            case.pop("places", None)
        tiered = Trained.make(env_of(ranks_per_replica), **case)
        dense = Trained.make(env_of(ranks_per_replica), kernel="dense", **case)
        start_alike(tiered.dmp, dense.dmp)
        found[name] = []
        for trained in (tiered, dense):
            trained.train(range(7))
            trained.optimizer.merge()
            found[name].append(values_of(trained.dmp))
    return found


SIZES = [(1, [name for name in CASES if name != "columns"]), pytest.param(2, ["rounds", "columns"], marks=pytest.mark.slow)]


@pytest.mark.parametrize(("ranks_per_replica", "names"), SIZES)
def test_dense_tables_equal_tiered_tables(spawn_ranks: SpawnRanks, ranks_per_replica: int, names: list[str]) -> None:
    """FBGEMM sums a row's gradient in another order, hence not the same bits."""
    ranks = spawn_ranks(_both, 2 * ranks_per_replica, args=(ranks_per_replica, names), timeout_s=110)
    for found in ranks:
        for name, (tiered, dense) in found.items():
            assert tiered.keys() == dense.keys()
            for key, value in tiered.items():
                torch.testing.assert_close(dense[key], value, rtol=1e-6, atol=1e-6, msg=lambda text, n=name, k=key: f"{n}: {k}: {text}")
    if ranks_per_replica == 1:
        for name in names:
            assert all(torch.equal(ranks[0][name][1][key], value) for key, value in ranks[1][name][1].items()), f"{name}: replicas differ"


def _unpooled(_world: World) -> tuple[str, str]:
    env = env_of(1)
    model = Sequences(EmbeddingCollection(tables=tables()))
    places = {name: table_wise(rank=0, compute_kernel="fused") for name in model.ec.embeddings}
    module = construct_module_sharding_plan(model.ec, places, local_size=1, world_size=1, device_type="cpu")
    for sharding in module.values():
        sharding.compute_kernel = "dense"
    plan = env.localize(ShardingPlan({"ec": module}))
    dmp = DistributedModelParallel(model, plan=plan, sharders=[EmbeddingCollectionSharder()], **env.dmp_kwargs())
    with pytest.raises(RuntimeError, match="split_sizes"):  # what upstream's kernel does with them: pool
        dmp(share(0, 0)[0])
    return outcome_of(lambda: KStepAdam(dmp, env=env, k=2, table_adam=SPEC))


def test_dense_tables_without_pooling_are_refused_by_name(spawn_ranks: SpawnRanks) -> None:
    for kind, text in spawn_ranks(_unpooled, 2):
        assert kind == "ConfigError"
        assert "tables a, b are read without pooling and have the dense kernel" in text


def _fused(world: World, fused: EmbOptimType, merge: MergeSpec) -> dict[str, Any]:
    """Tables that FBGEMM steps inside backward: what each replica has after three steps alone, and after a round and more training."""
    case = {"kernel": "fused", "fused": fused, "has_batch_norm": False, "merge": merge}
    merged, alone = Trained.make(env_of(1), k=3, **case), Trained.make(env_of(1), k=100, **case)
    start_alike(merged.dmp, alone.dmp)
    start = values_of(merged.dmp)
    alone.train(range(3))
    merged.train(range(3))
    after_round = values_of(merged.dmp)
    merged.train(range(3, 8))
    merged.optimizer.merge()
    ids = {name: torch.cat([batch(step, world.rank)[f"f_{name}"].values() for step in range(3)]) for name in ROWS}
    return {
        "start": start,
        "alone": values_of(alone.dmp),
        "round": after_round,
        "end": values_of(merged.dmp),
        "counts": {name: torch.bincount(own, minlength=ROWS[name]) for name, own in ids.items()},
    }


WAYS = [
    (EmbOptimType.EXACT_SGD, MergeSpec(k=3)),
    pytest.param(EmbOptimType.EXACT_ROWWISE_ADAGRAD, MergeSpec(k=3, row_states="weights"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("fused", "merge"), WAYS)
def test_fused_tables_are_merged_by_the_rows_that_backward_reached(spawn_ranks: SpawnRanks, fused: EmbOptimType, merge: MergeSpec) -> None:
    """The union of touches, from what replicas do without rounds: change = u / C times the sum of their changes."""
    ranks = spawn_ranks(_fused, 2, args=(fused, merge))
    for key, start in ranks[0]["start"].items():
        name = "a" if "bags.a" in key else "b"
        counts = torch.stack([rank["counts"][name].double() for rank in ranks])
        union = torch.where((counts > 0).sum(0) == 1, counts.sum(0), 3 * (1 - (1 - counts / 3).prod(0)))
        weight = torch.where(counts.sum(0) > 0, union / counts.sum(0), 0.0)
        changes = sum((rank["alone"][key] - start).double() for rank in ranks)
        assert float(changes.abs().max()) > 1e-4, "nothing was trained"
        expected = start.double() + weight[:, None] * changes
        for rank in ranks:
            torch.testing.assert_close(rank["round"][key].double(), expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(rank["round"][key], ranks[0]["round"][key])
            assert torch.equal(rank["end"][key], ranks[0]["end"][key])
            assert not torch.equal(rank["end"][key], rank["round"][key])


def _refused(_world: World) -> list[str]:
    adagrad = EmbOptimType.EXACT_ADAGRAD
    cases: list[dict[str, Any]] = [
        {"kernel": "fused", "fused": adagrad},
        {"kernel": "fused", "num_warmup_steps": 2},
        {"kernel": "fused", "clip_norm": 1.0, "clip_covers": "all"},
        {"kernel": "fused", "clip_norm": 1.0, "clip_covers": "all", "ranks_per_replica": 2},
        {"kernel": "dense", "places": {"b": data_parallel()}},
    ]
    outcomes = [outcome_of(lambda case=case: Trained.make(env_of(case.pop("ranks_per_replica", 1)), k=3, **case)) for case in cases]  # type: ignore[misc]
    assert {kind for kind, _ in outcomes} == {"ConfigError"}
    return [text for _, text in outcomes]


def test_tables_that_cannot_be_merged_are_refused_by_name_and_reason(spawn_ranks: SpawnRanks) -> None:
    for adagrad, warm_up, clip, clip_alone, replicated in spawn_ranks(_refused, 2):
        assert "tables a are stepped by EXACT_ADAGRAD inside backward, whose sums no round merges" in adagrad
        assert "row_states='weights'" in adagrad
        assert "before replicas could average gradients, which k = 3, after 2 steps of 1 asks for" in warm_up
        assert "clip_covers='all' with tables a, b that FBGEMM steps inside backward" in clip
        assert "clip_covers='all' with tables a" in clip_alone
        assert "ebc.embedding_bags.b.weight are sharded data_parallel" in replicated


def _resumed(world: World, folder: str) -> tuple[dict[str, bytes], float | None]:
    """`train` with planner.kernel=dense, stopped inside an interval and resumed."""
    root = Path(folder)
    config = kstep_config(planner__kernel="dense", checkpoint__every_steps=3)
    unbroken, state = finish(config, world, TinyDataset(), root / "unbroken")
    finish(replace(config, train=replace(config.train, max_steps=6)), world, TinyDataset(), root / "stopped")
    resumed, _ = finish(config, world, TinyDataset(), root / "stopped")
    assert_equal_bits(fingerprints(resumed), fingerprints(unbroken))
    return fingerprints(unbroken), state.best_auc


@pytest.mark.slow
def test_training_with_dense_tables_learns_and_resumes(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    (first, auc), (second, _) = spawn_ranks(_resumed, 2, args=(str(tmp_path),), timeout_s=110)
    assert_equal_bits(first, second)
    assert auc is not None
    assert auc > 0.6
