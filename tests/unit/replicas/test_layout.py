"""Which ranks share a replica and which merge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.replicas import ReplicaLayout
from torchrec_kstep.world import World


def layout(rank: int, world_size: int, per_host: int, per_replica: int) -> ReplicaLayout:
    return ReplicaLayout(World(rank, world_size, rank % per_host, per_host), per_replica)


def test_two_replicas_on_one_host() -> None:
    third = layout(2, 4, per_host=4, per_replica=2)
    assert (third.num_replicas, third.replica, third.position, third.ranks_per_host) == (2, 1, 0, 2)
    assert third.sharding_ranks(1) == [2, 3]
    assert third.merge_ranks(0) == [0, 2]
    assert third.replica_world() == World(0, 2, 0, 2)


def test_one_replica_over_two_hosts() -> None:
    sixth = layout(5, 8, per_host=2, per_replica=4)
    assert (sixth.num_replicas, sixth.replica, sixth.position, sixth.ranks_per_host) == (2, 1, 1, 2)
    assert sixth.replica_world() == World(1, 4, 1, 2)


@pytest.mark.parametrize(
    ("world_size", "per_host", "per_replica", "what"),
    [(4, 4, 3, "do not divide"), (4, 4, 0, "do not divide"), (12, 4, 6, "whole hosts"), (12, 6, 4, "whole hosts")],
)
def test_replicas_that_do_not_fit_are_refused_with_what_would(world_size: int, per_host: int, per_replica: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        layout(0, world_size, per_host, per_replica)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_rank_has_one_place(per_host: int, hosts: int, data: st.DataObject) -> None:
    """Otherwise a shard would be merged with another shard, or with itself twice."""
    world_size = per_host * hosts
    sizes = [n for n in range(1, world_size + 1) if not world_size % n and (not n % per_host or not per_host % n)]
    per_replica = data.draw(st.sampled_from(sizes))
    layouts = [layout(rank, world_size, per_host, per_replica) for rank in range(world_size)]
    assert sorted((one.replica, one.position) for one in layouts) == [
        (replica, position) for replica in range(world_size // per_replica) for position in range(per_replica)
    ]
    for rank, one in enumerate(layouts):
        assert rank in one.sharding_ranks(one.replica)
        assert one.merge_ranks(one.position).index(rank) == one.replica
        assert one.replica_of(rank) == one.replica
