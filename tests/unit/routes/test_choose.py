"""Routes of ranks as values: what is chosen for given machines, why, and what configurations may ask for. Layer: unit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from torchrec_kstep.config.schema import KStepConfig, PlannerConfig, RoutesConfig, RunConfig, TiersConfig, TrainConfig
from torchrec_kstep.errors import ConfigError, TopologyError
from torchrec_kstep.routes import JobRoutes, RouteWishes, choose_routes, routes_of_run
from torchrec_kstep.routes.of_run import drive_here, route_wishes
from torchrec_kstep.topology import (
    ClusterTopology,
    Drive,
    DrivePoint,
    Exchange,
    Host,
    Link,
    Nic,
    NumaNode,
    find_topology,
    load_topology,
    topology_text,
)
from torchrec_kstep.units import GIB
from torchrec_kstep.world import World


def drive(name: str, speed: float, path: str) -> Drive:
    return Drive(name, 100 * GIB, (DrivePoint(4096, 128, 1e5 * speed),), 4096e5 * speed, path)


def cluster(num_hosts: int = 2, num_numa: int = 1, folder: str = "/data", **speeds: float) -> ClusterTopology:
    """Hosts of two cards and two drives on the first NUMA node; `fast`, `slow`, `quick`, `tardy` are relative speeds."""
    speed = {"fast": 10.0, "slow": 1.0, "quick": 9.0, "tardy": 1.0} | speeds
    nodes = tuple(NumaNode(f"numa{index}", 16 * GIB, 2e10, 6e9, 4) for index in range(num_numa))
    host = Host(
        "host0",
        nodes,
        Exchange(1e9, 100.0),
        nics=(Nic("nic0", 1.25e7 * speed["fast"], "eth0"), Nic("nic1", 1.25e7 * speed["slow"], "eth1")),
        drives=(drive("quick", speed["quick"], f"{folder}/quick"), drive("tardy", speed["tardy"], f"{folder}/tardy")),
        links=tuple(Link(("numa0", end), 2e10, 1.0) for end in ("nic0", "nic1", "quick", "tardy"))
        + tuple(Link(("numa0", node.name), 4e10, 0.2) for node in nodes[1:]),
    )
    return ClusterTopology("test", (host,)).with_hosts(num_hosts)


PATHS = ("/data/quick/run", "/data/tardy/run")


def test_merge_lanes_take_the_cards_and_a_replica_within_a_host_stays_off_them() -> None:
    """Otherwise lookups of a replica would queue behind merge rounds, or rounds go over the slow card."""
    chosen = choose_routes(cluster(), 2, ranks_per_replica=2, ssd_paths=PATHS)
    assert [(rank.merge_interface, rank.replica_interface, rank.interface) for rank in chosen.ranks] == [("eth0", "lo", "eth0")] * 4
    even = choose_routes(cluster(fast=1.0), 2, ranks_per_replica=2)
    assert [rank.merge_interface for rank in even.ranks] == ["eth0", "eth1", "eth0", "eth1"]
    assert even.ranks[1].interfaces == ("eth1", "lo")


def test_a_replica_over_hosts_uses_the_card_of_its_rank() -> None:
    chosen = choose_routes(cluster(4, fast=1.0), 2, ranks_per_replica=4)
    assert [rank.replica_interface for rank in chosen.ranks] == ["eth0", "eth1"] * 4


def test_without_replicas_there_is_no_lane() -> None:
    rank = choose_routes(cluster(), 2).ranks[0]
    assert (rank.interface, rank.merge_interface, rank.replica_interface) == ("eth0", "", "")


def test_one_host_needs_no_interface() -> None:
    assert not any(rank.interfaces for rank in choose_routes(cluster(1), 2, ranks_per_replica=1).ranks)


def test_rows_follow_the_speed_of_drives() -> None:
    assert {rank.drive_shares for rank in choose_routes(cluster(), 2, ssd_paths=PATHS).ranks} == {(0.9, 0.1)}
    assert choose_routes(cluster(), 2, ssd_paths=PATHS[::-1]).ranks[0].drive_shares == (0.1, 0.9)
    twice = choose_routes(cluster(), 2, ssd_paths=(*PATHS, "/data/quick/other")).ranks[0].drive_shares
    assert twice == (0.45, 0.1, 0.45)


def test_a_path_on_no_known_drive_leaves_rows_spread_evenly() -> None:
    chosen = choose_routes(cluster(), 2, ssd_paths=("/data/quick/run", "/elsewhere"))
    assert chosen.ranks[0].drive_shares == ()
    assert "- /elsewhere lies on no drive of topology 'test', so rows are spread evenly over paths" in chosen.lines()


def test_ranks_keep_to_the_cores_of_their_numa_node() -> None:
    ranks = choose_routes(cluster(1, num_numa=2), 4, wishes=RouteWishes(cores="own")).ranks
    assert [(rank.numa, rank.cores, rank.core_part) for rank in ranks] == [
        ("numa0", "own", (0, 2)),
        ("numa0", "own", (1, 2)),
        ("numa1", "own", (0, 2)),
        ("numa1", "own", (1, 2)),
    ]
    assert choose_routes(cluster(1), 2).ranks[0].cores == "any"  # one NUMA node: nothing to be gained
    assert choose_routes(cluster(1), 8, wishes=RouteWishes(cores="own")).ranks[0].cores == "node"  # too few for parts


def test_wishes_overrule_the_choice() -> None:
    wishes = RouteWishes(cpus=((0, 1), (2,)), interfaces=("ib0",), drive_shares=(1.0, 3.0))
    ranks = choose_routes(cluster(), 2, ranks_per_replica=2, ssd_paths=PATHS, wishes=wishes).ranks
    assert [rank.cpus for rank in ranks] == [(0, 1), (2,)] * 2
    assert {rank.merge_interface for rank in ranks} == {"ib0"}
    assert ranks[0].drive_shares == (1.0, 3.0)
    assert ranks[0].is_ordered


@pytest.mark.parametrize("ranks_per_replica", [0, 1, 2, 4])
def test_routes_survive_json(ranks_per_replica: int) -> None:
    """They travel from rank 0 to the others that way."""
    wishes = RouteWishes(cpus=((0, 1),))
    chosen = choose_routes(cluster(), 2, ranks_per_replica=ranks_per_replica, ssd_paths=PATHS, wishes=wishes)
    assert JobRoutes.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen


def test_routes_are_told_with_their_reasons() -> None:
    assert choose_routes(cluster(), 2, ranks_per_replica=2, ssd_paths=PATHS).lines() == [
        "rank 0: any core; rows 90% on /data/quick/run, 10% on /data/tardy/run; merge lane over eth0; replica over lo",
        "rank 1: any core; rows 90% on /data/quick/run, 10% on /data/tardy/run; merge lane over eth0; replica over lo",
        "1 other host alike",
        "- host0 has one NUMA node, so ranks gain nothing from being bound to it",
        "- rows go to the drives of host0 by their speed, so that all are done together: quick 450,000 rows/s, tardy 50,000 rows/s",
        "- eth0 (nic0, 125 MB/s) carries 2 of 2 ranks of host0, 62.5 MB/s each: more than eth1 with 12.5 MB/s would give one alone",
    ]


def test_devices_decide_where_ranks_sit() -> None:
    chosen = choose_routes(load_topology(find_topology("dgx_h100")), 8)
    assert len({rank.card for rank in chosen.ranks if rank.host == 0}) == 8  # each device its own card
    assert {rank.numa for rank in chosen.ranks} == {"numa0", "numa1"}


# --- of a run ---


def run(tmp_path: Path, **routes: object) -> RunConfig:
    file = tmp_path / "machines.yaml"
    file.write_text(topology_text(cluster(folder=str(tmp_path))))
    tiers = TiersConfig(name="dram_ssd", ssd_paths=[str(tmp_path / "quick/a"), str(tmp_path / "tardy/a")])
    return RunConfig(
        planner=PlannerConfig(topology=str(file)),
        tiers=tiers,
        kstep=KStepConfig(k=5),
        routes=RoutesConfig(**routes),  # type: ignore[arg-type]
    )


def test_a_run_takes_the_machines_of_its_topology(tmp_path: Path) -> None:
    chosen = routes_of_run(run(tmp_path), World(0, 4, 0, 2))
    assert [rank.merge_interface for rank in chosen.ranks] == ["eth0"] * 4
    assert chosen.ranks[0].drive_shares == (0.9, 0.1)


def test_without_a_topology_file_interfaces_stay(tmp_path: Path) -> None:
    """The one over which the hosts met is known to work; a name found in sysfs of one host is not."""
    config = replace(run(tmp_path), planner=PlannerConfig())
    assert not any(rank.interfaces for rank in routes_of_run(config, World(0, 4, 0, 2)).ranks)


@pytest.mark.parametrize(("device", "cores"), [("cpu", "node"), ("cuda", "any")])
def test_ranks_on_devices_that_nobody_described_are_bound_to_no_cores(device: str, cores: str, tmp_path: Path) -> None:
    """Otherwise a rank could be kept on the other socket than its device."""
    file = tmp_path / "machines.yaml"
    file.write_text(topology_text(cluster(num_numa=2)))
    config = RunConfig(planner=PlannerConfig(topology=str(file)), train=TrainConfig(device=device))
    assert {rank.cores for rank in routes_of_run(config, World(0, 4, 0, 2)).ranks} == {cores}


def test_lists_by_local_rank_have_an_entry_for_each() -> None:
    assert route_wishes(RoutesConfig(interfaces=["a"]), 4).interface_of(3) == "a"
    assert route_wishes(RoutesConfig(cpus=["0", "2-3"]), 2).cpus_of(1) == (2, 3)
    with pytest.raises(ConfigError, match=r"routes.cpus has 2 entries for 4 ranks per host"):
        route_wishes(RoutesConfig(cpus=["0", "1"]), 4)


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"no topology file 'nowhere\.yaml'"):
        routes_of_run(RunConfig(planner=PlannerConfig(topology="nowhere.yaml")), World())


def test_a_drive_is_found_by_its_file_system_where_folders_do_not_tell(tmp_path: Path) -> None:
    one = drive("one", 1.0, str(tmp_path / "a"))
    assert drive_here(str(tmp_path / "b" / "c"), [one]) is one
    assert drive_here(str(tmp_path / "b"), [one, drive("two", 1.0, str(tmp_path / "d"))]) is None  # both are possible
