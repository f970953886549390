"""Measuring a machine: what is measured, what is left behind, what the file says. Layer: unit; speeds are not asserted."""

import os
from pathlib import Path

import pytest

from tests.spawn import SpawnRanks
from torchrec_kstep import probe
from torchrec_kstep.errors import StorageIOError
from torchrec_kstep.probing import measure_drive, measure_exchange, measure_memory
from torchrec_kstep.topology import load_topology, this_machine
from torchrec_kstep.units import MIB
from torchrec_kstep.world import World


def test_memory_is_measured_and_the_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    speed = measure_memory(sorted(before)[:1], 0.05, table_bytes=16 * MIB)
    assert speed.stream_bytes_per_s > 1e6
    assert speed.gather_bytes_per_s > 1e6
    assert os.sched_getaffinity(0) == before


def test_a_drive_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    told: list[str] = []
    drive, _ = measure_drive("d", tmp_path / "rows", 0.2, told.append, file_bytes=2 * MIB)
    assert list((tmp_path / "rows").iterdir()) == []
    assert {point.depth for point in drive.reads} == {1, 16, 64}
    assert all(point.operations_per_s > 0 for point in drive.reads)
    assert any("4 KiB" in text for text in told)


def test_a_drive_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageIOError, match="MiB are free, a probe needs"):
        measure_drive("d", tmp_path, 0.1, print, file_bytes=1 << 60)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageIOError, match="cannot be probed"):
        measure_drive("d", tmp_path / "file" / "rows", 0.1, print, file_bytes=MIB)


def test_the_file_is_a_topology_that_says_what_it_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.yaml"
    arguments = ["--out", str(out), "--seconds", "0.3", "--memory", "16MiB", "--file", "2MiB", "--ssd-path", str(tmp_path / "rows")]
    assert probe.main(arguments) == 0, capsys.readouterr()
    topology = load_topology(out)
    assert topology.is_measured
    assert any("exchange between ranks" in text for text in topology.assumed)
    assert [drive.path for drive in topology.hosts[0].drives] == [str(tmp_path / "rows")]
    assert "Measured 20" in out.read_text().splitlines()[0]


def exchanged(world: World) -> float:
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    found = measure_exchange(group, range(world.world_size), 0.2)
    assert found.latency_us > 0
    return found.bandwidth_bytes_per_s


@pytest.mark.multiprocess
def test_all_ranks_measure_the_same_exchange(spawn_ranks: SpawnRanks) -> None:
    """Otherwise ranks would wait for one another in calls of different number."""
    first, second = spawn_ranks(exchanged, 2)
    assert first == second > 0


def numa(system: Path, index: int, cores: str, kilobytes: int) -> None:
    folder = system / "devices" / "system" / "node" / f"node{index}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cores}\n")
    (folder / "meminfo").write_text(f"Node {index} MemTotal:       {kilobytes} kB\n")


def card(system: Path, name: str, speed: str, node: str) -> None:
    folder = system / "class" / "net" / name
    (folder / "device").mkdir(parents=True)
    (folder / "speed").write_text(speed)
    (folder / "device" / "numa_node").write_text(node)


def test_the_system_is_asked_for_memories_and_cards(tmp_path: Path) -> None:
    numa(tmp_path, 0, "0-3,8-11", 1_000_000)
    numa(tmp_path, 1, "4-7", 2_000_000)
    card(tmp_path, "eth0", "100000\n", "1\n")
    card(tmp_path, "eth1", "-1\n", "-1\n")
    (tmp_path / "class" / "net" / "lo").mkdir()
    topology = this_machine([str(tmp_path), str(tmp_path / "sub")], num_hosts=2, system=tmp_path)
    host = topology.hosts[0]
    assert [(node.num_cores, node.memory_bytes) for node in host.numa_nodes] == [(8, 1_024_000_000), (4, 2_048_000_000)]
    assert [(nic.interface, nic.bandwidth_bytes_per_s) for nic in host.nics] == [("eth0", 1.25e10), ("eth1", 1.25e9)]
    assert len(host.drives) == 1, "two folders on one file system are one drive"
    assert any(set(link.ends) == {"numa1", "nic0"} for link in host.links)
    assert any("eth1" in text for text in topology.assumed)
    assert len(topology.hosts) == 2


def test_a_system_that_tells_nothing_still_has_a_host(tmp_path: Path) -> None:
    assert this_machine(system=tmp_path, num_hosts=2).hosts[1].nics
