"""Which card and which drives a rank uses: the faster one gets more, nearness decides between equals. Layer: unit."""

from dataclasses import replace

import pytest

from torchrec_kstep.topology import ClusterTopology, Drive, DrivePoint, Exchange, Host, Link, Nic, NumaNode, Routes
from torchrec_kstep.units import GIB


def drive(name: str, speed: float) -> Drive:
    return Drive(name, 100 * GIB, (DrivePoint(4096, 128, 1e5 * speed),), 4096e5 * speed, f"/{name}")


def two_sockets(nics: dict[str, float], drives: dict[str, float], num_hosts: int = 2) -> ClusterTopology:
    """Two NUMA nodes; parts whose name ends in 1 hang on the second, the others on the first. Speeds are relative."""
    nodes = tuple(NumaNode(f"numa{index}", 16 * GIB, 2e10, 6e9, 4) for index in range(2))
    names = [*nics, *drives]
    links = [Link(("numa0", "numa1"), 4e10, 0.2)] + [Link(("numa1" if name.endswith("1") else "numa0", name), 2e10, 1.0) for name in names]
    host = Host(
        "a",
        nodes,
        Exchange(1e9, 100.0),
        nics=tuple(Nic(name, speed * 1e8) for name, speed in nics.items()),
        drives=tuple(drive(name, speed) for name, speed in drives.items()),
        links=tuple(links),
    )
    return ClusterTopology("two sockets", tuple(replace(host, name="abcdef"[index]) for index in range(num_hosts)))


def cards(nics: dict[str, float], ranks_per_host: int) -> list[str]:
    routes = Routes(two_sockets(nics, {}), ranks_per_host)
    return [routes.nic_of[site.node].partition("/")[2] for site in routes.sites[:ranks_per_host]]


@pytest.mark.parametrize(
    ("nics", "expected"),
    [
        ({"eth0": 10.0, "eth1": 1.0}, ["eth0", "eth0"]),  # both together on the fast one are done before one on the slow one
        ({"eth1": 1.0, "eth0": 10.0}, ["eth0", "eth0"]),
        ({"eth0": 1.0, "eth1": 1.0}, ["eth0", "eth1"]),
        ({"eth1": 1.0, "eth0": 1.0}, ["eth0", "eth1"]),  # the nearer of equals
        ({"eth0": 1.0, "eth2": 0.7}, ["eth0", "eth2"]),
    ],
)
def test_ranks_take_the_card_over_which_they_are_done_first(nics: dict[str, float], expected: list[str]) -> None:
    """Otherwise half of the ranks would wait for a management network."""
    assert cards(nics, 2) == expected


def test_a_slow_card_gets_its_part_of_many_ranks() -> None:
    assert sorted(cards({"eth0": 3.0, "eth2": 1.0}, 8)) == ["eth0"] * 6 + ["eth2"] * 2


def test_rows_follow_the_speed_of_drives() -> None:
    routes = Routes(two_sockets({}, {"quick0": 9.0, "slow0": 1.0}, num_hosts=1), 2)
    assert routes.drive_shares(0) == pytest.approx({"quick0": 0.9, "slow0": 0.1})
    assert routes.drive_shares(1) == routes.drive_shares(0)


def test_ranks_keep_to_drives_beside_them_where_that_costs_nothing() -> None:
    routes = Routes(two_sockets({}, {"nvme0": 1.0, "nvme1": 1.0}, num_hosts=1), 2)
    assert [routes.drive_shares(rank) for rank in (0, 1)] == [{"nvme0": 1.0, "nvme1": 0.0}, {"nvme0": 0.0, "nvme1": 1.0}]
    lopsided = Routes(two_sockets({}, {"nvme0": 3.0, "nvme1": 1.0}, num_hosts=1), 2)
    assert lopsided.drive_shares(1) == pytest.approx({"nvme0": 0.75, "nvme1": 0.25})


def test_a_host_without_drives_has_no_shares() -> None:
    assert Routes(two_sockets({}, {}, num_hosts=1), 2).drive_shares(1) == {}
