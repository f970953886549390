"""The position among the ranks: what torchrun sets is read as it is, and what cannot be is refused by name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.world import World

TWO_HOSTS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_without_torchrun_this_is_a_world_of_one() -> None:
    assert World.from_torchrun({}) == World()
    assert World().is_main
    assert World().num_hosts == 1


def test_reads_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO_HOSTS.items():
        monkeypatch.setenv(name, value)
    world = World.from_torchrun()
    assert world == World(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert (world.host, world.num_hosts, world.is_main) == (1, 2, False)


@pytest.mark.parametrize("missing", TWO_HOSTS)
def test_half_an_environment_is_refused_by_name(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"not {missing}"):
        World.from_torchrun({name: value for name, value in TWO_HOSTS.items() if name != missing})


@pytest.mark.parametrize("name", TWO_HOSTS)
@pytest.mark.parametrize("value", ["", "two", "1.0", "0x1"])
def test_values_that_are_no_numbers_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")):
        World.from_torchrun({**TWO_HOSTS, name: value})


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank", "local_world_size"),
    [
        (4, 4, 0, 2),
        (-1, 4, 0, 2),
        (0, 0, 0, 1),
        (0, 4, 2, 2),
        (0, 4, 0, 0),
        (0, 3, 0, 2),  # hosts of unequal size
        (0, 2, 0, 4),  # a host larger than the world
        (1, 4, 0, 2),  # rank and local rank disagree
    ],
)
def test_positions_that_cannot_exist_are_refused(rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"rank|hosts"):
        World(rank, world_size, local_rank, local_world_size)


@given(st.integers(1, 16), st.integers(1, 16))
def test_ranks_are_counted_host_by_host(num_hosts: int, local_world_size: int) -> None:
    world_size = num_hosts * local_world_size
    worlds = [World(rank, world_size, rank % local_world_size, local_world_size) for rank in range(world_size)]
    assert [world.host for world in worlds] == [host for host in range(num_hosts) for _ in range(local_world_size)]
    assert all(world.num_hosts == num_hosts for world in worlds)
    assert sum(world.is_main for world in worlds) == 1
