"""CowClip over tables whose columns are on several ranks: the same clips as for whole tables, and what they cost.

Layer: multiprocess. That training equals an unsharded collection is in `test_tiered_equality`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.multiprocess.test_tiered_sequences import DIM, FEATURES, ROWS, loss_of, make
from tests.multiprocess.test_tiered_sequences import share as sequence_share
from tests.multiprocess.tiered_cases import CLIPPED, NUM_STEPS, Case, gathered, shard, share, train
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import OptimConfig, PlannerConfig
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.sharding.tiered import tier_scalars
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

WHOLE = Case(("tw0", "tw_last", "tw0"), optimizer=CLIPPED, deferred=True, uneven=True)
CUT = replace(WHOLE, places=("cw", "tw_last", "cw"))


def _scalars(world: World, case: Case) -> dict[str, float]:
    dmp = shard(case, world)
    train(case, dmp, world, range(NUM_STEPS))
    return tier_scalars(dmp)


def _rows_of_a(step: int, world_size: int) -> int:
    """Rows of table `a` that a step touches, over all ranks."""
    ids = [share(CUT, step, rank).features[feature].values() for rank in range(world_size) for feature in ("f0", "f1")]
    return int(torch.cat(ids).unique().numel())


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_rows_are_clipped_and_the_cost_is_told(spawn_ranks: SpawnRanks, world_size: int) -> None:
    """A part of a row has a smaller norm than the row: clipped by itself, other rows would be."""
    whole, cut = (spawn_ranks(_scalars, world_size, args=(case,)) for case in (WHOLE, CUT))
    share_of_a = whole[0]["clipped_share.a"]  # rank 0 has all of it
    assert 0.05 < share_of_a < 0.95, "the case should clip some rows and not others"
    for scalars in cut:
        assert scalars["clipped_share.a"] == share_of_a
        num_bytes = sum(8 + 2 * 4 * _rows_of_a(step, world_size) for step in range(NUM_STEPS)) if world_size > 1 else 0
        assert scalars["clip_exchange_bytes"] == num_bytes
        assert scalars["clip_exchange_s"] > 0
    assert not any("clip_exchange" in name for name in whole[0])


def _sequences(world: World, places: tuple[str, str]) -> dict[str, torch.Tensor]:
    dmp = make(places, world, {}, optimizer=CLIPPED, deferred=True)
    starts = {"a": torch.linspace(-1, 1, DIM).repeat(ROWS["a"], 1), "b": torch.zeros(ROWS["b"], DIM)}  # where zeta is the bound
    dmp.load_state_dict({f"ec.embeddings.{table}.weight": weight for table, weight in starts.items()})
    for step in range(NUM_STEPS):
        dmp.fused_optimizer.zero_grad()
        features, factor = sequence_share(step, world.rank)
        assert features.keys() == list(FEATURES)
        loss_of(dmp(features), factor).backward()
        dmp.fused_optimizer.step()
    return gathered(dmp.state_dict())


def test_rows_that_are_read_without_pooling_are_clipped_alike(spawn_ranks: SpawnRanks) -> None:
    whole, cut = (spawn_ranks(_sequences, 2, args=(places,))[0] for places in (("tw0", "tw_last"), ("cw", "cw_same")))
    for name, weight in whole.items():
        torch.testing.assert_close(cut[name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("planner", [{"sharding": "column_wise"}, {"tables": {"user": "column_wise"}}])
def test_a_plan_with_column_shards_keeps_row_gradients_for_the_clip(planner: dict[str, Any]) -> None:
    """Otherwise `optim.clip=cowclip` would be refused when tables are sharded, after ranks have met."""
    for clip, is_deferred in (("cowclip", True), ("none", False)):
        config = PlannerConfig(kernel="tiered", **planner)
        (sharder,) = build_sharders(config, OptimConfig(clip=clip), world=World())
        assert sharder._is_deferred is is_deferred  # type: ignore[attr-defined]
