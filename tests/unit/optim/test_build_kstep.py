"""What a run with replicas is told at its start."""

import pytest

from torchrec_kstep.config.schema import KStepConfig
from torchrec_kstep.optim.build_kstep import replica_warnings
from torchrec_kstep.world import World


@pytest.mark.parametrize(
    ("k", "ranks_per_replica", "num_ranks", "ranks_per_host", "expected"),
    [
        (20, 0, 1, 1, "one replica, of one rank, so nothing is ever merged; start more ranks or hosts"),
        (20, 0, 2, 2, "one replica, of 2 ranks, so nothing is ever merged; kstep.ranks_per_replica=1"),
        (20, 4, 4, 2, "one replica, of 4 ranks, so nothing is ever merged; kstep.ranks_per_replica=1"),
        (20, 1, 2, 2, ""),
        (20, 0, 4, 2, ""),
        (0, 0, 2, 2, ""),
    ],
)
def test_a_job_of_one_replica_is_told_that_nothing_merges(
    k: int, ranks_per_replica: int, num_ranks: int, ranks_per_host: int, expected: str
) -> None:
    """A host is a replica unless told otherwise, so two ranks of one host with k=20 would quietly train as one model."""
    world = World(rank=0, world_size=num_ranks, local_world_size=ranks_per_host)
    lines = replica_warnings(KStepConfig(k=k, ranks_per_replica=ranks_per_replica), world)
    assert len(lines) == bool(expected)
    assert all(line.startswith(f"warning: kstep.k={k}, ") and expected in line for line in lines)
