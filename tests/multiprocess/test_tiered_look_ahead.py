"""Looking ahead changes no result, loses no batch, and asks for rows before they are needed.

Layer: multiprocess.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.multiprocess.tiered_cases import ADAM, MEAN, SUM, Case, Pooled, gathered, plan_of, shard, share
from tests.spawn import SpawnRanks
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder, look_ahead
from torchrec_kstep.sharding.tiered.state import kernels_of
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.torchrec_seam.pipeline import make_pipeline
from torchrec_kstep.types import Batch, Predictions
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

CASE = Case(("rw", "tw_last", "rw"), (MEAN, SUM, SUM), stock={"b": "fused"})


class Task(nn.Module):
    """A loss and what it was made of, as pipelines want it."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.pooled = Pooled(ebc, CASE.outputs)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Predictions]:
        pooled = self.pooled(batch.sparse)
        return (torch.tanh(2 * pooled) * batch.dense).sum() / 8, Predictions(logit=pooled.detach(), label=batch.label, weight=batch.weight)


def batches(world: World, num_batches: int) -> list[Batch]:
    shares = [share(CASE, step, world.rank) for step in range(num_batches)]
    return [Batch(dense=part.factor, sparse=part.features, label=part.factor, weight=part.factor, num_global_rows=0) for part in shares]


def make(world: World, tiers: TierConfig | None) -> DistributedModelParallel:
    torch.manual_seed(3)  # for the rows of the stock table
    sharder = TieredEmbeddingBagCollectionSharder(ADAM, tiers, world=world, fused_params={"learning_rate": ADAM.lr})
    ebc = EmbeddingBagCollection(tables=CASE.tables(), device=torch.device("meta"))
    plan = plan_of(CASE, ebc, sharder, world)
    plan.plan["pooled.ebc"] = plan.plan.pop("ebc")
    group = dist.group.WORLD
    assert group is not None
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(Task(ebc), env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def _results(world: World, folder: str, num_batches: int) -> list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Every way to look ahead, in DRAM and with a cache of a few rows: outputs of each step and weights at the end."""
    results = []
    for number, (pipeline, depth) in enumerate([("plain", 0), ("sparse_dist", 0), ("base", 0), ("plain", 1), ("plain", 3)]):
        for on_ssd in (False, True):
            tiers = TierConfig("4KiB", [f"{folder}/{world.world_size}_{num_batches}_{number}"], segment_bytes="64KiB") if on_ssd else None
            dmp = make(world, tiers)
            progress = make_pipeline(pipeline, dmp, dmp.fused_optimizer, torch.device("cpu"))
            stream = look_ahead(dmp, batches(world, num_batches), lambda batch: batch.sparse, depth)
            outputs: list[torch.Tensor] = []
            while True:
                try:
                    outputs.append(progress.progress(stream).logit)
                except StopIteration:
                    break
            results.append((outputs, gathered(dmp.state_dict())))
    return results


@pytest.mark.parametrize(("world_size", "num_batches"), [(2, 7), (1, 1), pytest.param(4, 7, marks=pytest.mark.slow)])
def test_no_way_of_looking_ahead_changes_a_bit(spawn_ranks: SpawnRanks, tmp_path: Path, world_size: int, num_batches: int) -> None:
    """Also at the end of the data, where upstream pipelines have lost the batches inside them."""
    for (outputs, weights), *others in spawn_ranks(_results, world_size, args=(str(tmp_path), num_batches)):
        assert len(outputs) == num_batches
        for other_outputs, other_weights in others:
            assert len(other_outputs) == num_batches
            assert all(torch.equal(a, b) for a, b in zip(outputs, other_outputs, strict=True))
            assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())


def _order(world: World) -> list[str]:
    """What a tiered kernel is asked, in order."""
    dmp = make(world, None)
    told: list[str] = []
    for kernel in kernels_of(dmp.module.pooled.ebc._lookups):
        _record(kernel, told)
    progress = make_pipeline("sparse_dist", dmp, dmp.fused_optimizer, torch.device("cpu"))
    stream = iter(batches(world, 3))
    for _ in range(3):
        progress.progress(stream)
    told.append("end")
    progress.progress(iter(batches(world, 3)))
    progress.reset()
    told.append(str(sum(len(kernel._ahead) for kernel in kernels_of(dmp.module.pooled.ebc._lookups))))
    return told


def _record(kernel: Any, told: list[str]) -> None:
    dedup, prefetch, pooled = kernel.dedup, kernel.group.prefetch, kernel.group.pooled_of
    kernel.dedup = lambda *args: (told.append("dedup"), dedup(*args))[1]
    kernel.group.prefetch = lambda *args: (told.append("prefetch"), prefetch(*args))[1]
    kernel.group.pooled_of = lambda *args: (told.append("lookup"), pooled(*args))[1]


def test_rows_are_asked_for_one_batch_ahead_and_sorted_once(spawn_ranks: SpawnRanks) -> None:
    """Otherwise reading would not overlap with computing, or ids would be sorted twice."""
    (told,) = spawn_ranks(_order, 1)
    end = told.index("end")
    assert told[:end].count("dedup") == told[:end].count("prefetch") == told[:end].count("lookup")
    per_batch = told[:end].count("lookup") // 3
    ask, look = ["dedup", "prefetch"] * per_batch, ["lookup"] * per_batch
    assert told[:end] == [*ask, *look, *ask, *look, *ask, *look]
    assert told[-1] == "0"


def _left_early(world: World) -> tuple[int, list[int]]:
    dmp = shard(Case(("tw0", "tw0", "tw0"), optimizer=AdamSpec(lr=0.1)), world)
    seen = []
    for step in look_ahead(dmp, range(10), lambda step: share(CASE, step, world.rank).features, 3):
        seen.append(step)
        if step == 4:
            break
    return len(kernels_of(dmp.module.ebc._lookups)[0]._ahead), seen


def test_a_loop_may_be_left_early(spawn_ranks: SpawnRanks) -> None:
    assert spawn_ranks(_left_early, 1) == [(0, [0, 1, 2, 3, 4])]
