"""The harness itself: results by rank, every traceback, no process left behind. Layer: multiprocess."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.spawn import RanksFailed, SpawnRanks, run_ranks
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


def _sum_ranks(world: World, offset: int) -> tuple[torch.Tensor, World, str]:
    total = torch.tensor([world.rank + offset])
    dist.all_reduce(total)
    return total, World.from_torchrun(), os.environ["KSTEP_PROBE"]


def _fail_on_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank 1 has a reason")
    time.sleep(60)


def _fail_on_all(world: World) -> None:
    raise ValueError(f"reason of rank {world.rank}")


def _die(world: World) -> None:
    if world.rank == 0:
        os._exit(7)
    dist.barrier()


def _hang(world: World) -> None:  # noqa: ARG001 - called with it
    time.sleep(60)


def test_results_come_back_by_rank_with_the_simulated_hosts(spawn_ranks: SpawnRanks) -> None:
    """Otherwise a two-host test would silently run on one host."""
    results = spawn_ranks(_sum_ranks, 2, local_world_size=1, args=(10,), env={"KSTEP_PROBE": "yes"})
    assert [int(total) for total, _, _ in results] == [21, 21]
    assert [world for _, world, _ in results] == [World(0, 2, 0, 1), World(1, 2, 0, 1)]
    assert [probe for _, _, probe in results] == ["yes", "yes"]


@pytest.mark.parametrize(
    ("fn", "timeout_s", "expected"),
    [
        (_fail_on_one, 60.0, ["rank 1 has a reason", "still running", "_fail_on_one"]),
        (_fail_on_all, 60.0, ["reason of rank 0", "reason of rank 1"]),
        (_die, 60.0, ["exit code 7"]),
        (_hang, 8.0, ["rank 0: still running", "rank 1: still running", "_hang"]),
    ],
)
def test_a_failure_ends_the_others_and_is_told_with_all_tracebacks(
    tmp_path: Path, fn: object, timeout_s: float, expected: list[str]
) -> None:
    """Otherwise a failing rank would leave the rest in a collective until the lane's limit, without a cause."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(fn, 2, tmp_path, timeout_s=timeout_s)  # type: ignore[arg-type]
    assert time.monotonic() - start < 50, "the sleeping rank was waited for"
    for text in expected:
        assert text in str(failure.value)
