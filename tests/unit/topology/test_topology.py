"""Descriptions of machines: what files may say, what is refused and how, and which way transfers go. Layer: unit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchrec_kstep.errors import TopologyError
from torchrec_kstep.topology import (
    ClusterTopology,
    Device,
    Drive,
    DrivePoint,
    Exchange,
    Host,
    Link,
    Network,
    Nic,
    NumaNode,
    Routes,
    find_topology,
    load_topology,
    packaged_topologies,
    topology_text,
)
from torchrec_kstep.units import GIB

GOOD = """
name: one
hosts:
  - name: host
    numa_nodes:
      - {name: numa0, memory: 16GiB, bandwidth: 20GB/s, gather_bandwidth: 6GB/s, cores: 2}
    exchange: {bandwidth: 1GB/s, latency: 100us}
    nics:
      - {name: nic0, bandwidth: 10Gbit/s, burst: 256KiB}
    links:
      - {from: numa0, to: nic0, bandwidth: 4GB/s, latency: 2us}
"""


def read(tmp_path: Path, text: str) -> ClusterTopology:
    file = tmp_path / "topology.yaml"
    file.write_text(text)
    return load_topology(file)


@pytest.mark.parametrize("name", sorted(packaged_topologies()))
def test_an_example_is_written_and_read_back_without_loss(name: str, tmp_path: Path) -> None:
    """Otherwise a probe's file would describe another machine than the one it measured."""
    topology = load_topology(find_topology(name))
    assert read(tmp_path, topology_text(topology, "a comment\nof two lines")).fingerprint == topology.fingerprint


def test_the_four_examples_are_there() -> None:
    assert set(packaged_topologies()) >= {"dgx_h100", "a10_pcie_8", "two_socket_cpu", "small_cpu"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("memory:", "memori:"), r"topology.yaml:6: .*unknown key 'memori'; did you mean 'memory'"),
        (lambda text: text.replace("16GiB", "16"), r"numa_nodes.0.memory: 16 has no unit: write e.g. '64GiB'"),
        (lambda text: text.replace("20GB/s", "20GB"), r"cannot read '20GB' as a bandwidth"),
        (lambda text: text.replace("20GB/s", "-20GB/s"), r"'-20GB/s' is negative"),
        (lambda text: text.replace("20GB/s", "0GB/s"), r"'0GB/s' is zero"),
        (lambda text: text.replace("latency: 2us", "latency: 2"), r"links.0.latency: 2 has no unit: write e.g. '3us'"),
        (lambda text: text.replace("cores: 2", "cores: 0.5"), r"cores: expected a whole number of at least 1, got 0.5"),
        (lambda text: text.replace("to: nic0", "to: nic1"), r"links.0: there is no part 'nic1'; did you mean 'nic0'"),
        (lambda text: text[: text.index("    links")], r"no links lead from 'numa0' to network card 'nic0': add a link"),
        (lambda text: text[: text.index("hosts")], r"hosts is missing"),
        (lambda text: text + "    name: again\n", r"topology.yaml:\d+: no valid YAML|duplicate"),
        (lambda text: text.replace("exchange: {bandwidth: 1GB/s, latency: 100us}", ""), r"hosts.0: exchange is missing"),
        (lambda text: text.replace("name: host\n", "name: host\n    count: 0\n"), r"count: expected a whole number of at least 1"),
        (lambda text: text.replace("nic0", "numa0"), r"the name 'numa0' is given 2 times"),
        (lambda text: text[:0] + "[]", r"expected keys and values"),
        (lambda text: text.replace("256KiB", "256"), r"nics.0.burst: 256 has no unit: write e.g. '64GiB'"),
        (lambda text: text.replace("256KiB", "-1KiB"), r"'-1KiB' is negative"),
        (lambda text: text.replace("10Gbit/s", ".inf"), r"nics.0.bandwidth: inf has no unit"),
        (lambda text: text.replace("10Gbit/s", "infGbit/s"), r"cannot read 'infGbit/s' as a bandwidth"),
        (lambda text: text + "\0", r"topology.yaml: no valid YAML"),
        (lambda text: text + "x: " + "[" * 3000, r"topology.yaml: no valid YAML"),
        (lambda text: text + "network: {oversubscription: 1.0e+300}\n", r"oversubscription: expected a number from 1 to 1,000,000"),
        (lambda text: text.replace("10Gbit/s", "fast"), r"cannot read 'fast' as a bandwidth"),
        (lambda text: text.replace(", latency: 2us", ""), r"links.0: latency is missing"),
        (lambda text: text.replace("to: nic0", "to: numa0"), r"a link joins 'numa0' with itself"),
        (
            lambda text: text.replace("links:", "switches: [sw]\n    links:").replace("from: numa0", "from: sw"),
            r"no links lead from 'numa0' to switch 'sw': add a link[^$]*no links lead from 'numa0' to network card 'nic0'",
        ),
    ],
)
def test_a_faulty_file_is_refused_with_place_and_remedy(change: Callable[[str], str], said: str, tmp_path: Path) -> None:
    """Otherwise a mistyped number would quietly make every plan wrong."""
    with pytest.raises(TopologyError, match=said):
        read(tmp_path, change(GOOD))


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="4 faults") as error:
        read(tmp_path, GOOD.replace("16GiB", "16").replace("cores", "coars").replace("nic0, bandwidth: 10Gbit/s", "nic0, bandwidth: 10"))
    assert str(error.value).count("topology.yaml:") >= 3


def test_a_missing_file_names_the_examples() -> None:
    with pytest.raises(TopologyError, match="did you mean 'dgx_h100'"):
        find_topology("dgx_h10")


def test_hosts_that_no_card_joins_are_refused(tmp_path: Path) -> None:
    """Otherwise traffic between them would have no route, and planning would fail late."""
    without = GOOD.replace("    nics:\n      - {name: nic0, bandwidth: 10Gbit/s, burst: 256KiB}\n", "").replace("to: nic0", "to: sw")
    without = without.replace("    links:", "    switches: [sw]\n    links:").replace("name: host\n", "name: host\n    count: 2\n")
    with pytest.raises(TopologyError, match="host 'host0' has no network card, so nothing leads to the 1 other hosts"):
        read(tmp_path, without)


def test_the_fingerprint_knows_every_number_and_no_comment(tmp_path: Path) -> None:
    """Otherwise a stale plan would be taken for this machine's, or a good one thrown away."""
    good = read(tmp_path, GOOD).fingerprint
    assert read(tmp_path, GOOD.replace("name: one", "name: two\nsource: elsewhere")).fingerprint == good
    for change in (
        ("16GiB", "17GiB"),
        ("10Gbit", "11Gbit"),
        ("2us", "3us"),
        ("256KiB", "1KiB"),
        ("cores: 2", "cores: 3"),
        ("100us", "101us"),
    ):
        assert read(tmp_path, GOOD.replace(*change)).fingerprint != good


def devices_host(name: str = "host") -> Host:
    """Two devices and two cards on one switch, one device on another NUMA node."""
    return Host(
        name=name,
        numa_nodes=(NumaNode("numa0", 64 * GIB, 1e11, 1e10, 8), NumaNode("numa1", 64 * GIB, 1e11, 1e10, 8)),
        exchange=Exchange(1e9, 50.0),
        switches=("pcie0",),
        devices=tuple(Device(f"gpu{index}", 16 * GIB, 1e12, 5e11) for index in range(3)),
        nics=(Nic("nic0", 1e10), Nic("nic1", 1e10)),
        links=(
            Link(("numa0", "numa1"), 4e10, 0.1),
            Link(("numa0", "pcie0"), 2e10, 0.5),
            Link(("pcie0", "gpu0"), 2e10, 0.5),
            Link(("pcie0", "gpu1"), 2e10, 0.5),
            Link(("numa1", "gpu2"), 2e10, 0.5),
            Link(("pcie0", "nic0"), 2e10, 0.5),
            Link(("pcie0", "nic1"), 2e10, 0.5),
        ),
    )


def names(routes: Routes, source: str, target: str) -> list[str]:
    return [edge.name for edge in routes.between(source, target)]


def test_routes_take_the_fastest_way_and_pass_through_no_device() -> None:
    """Otherwise traffic would be charged to links that it never crosses."""
    routes = Routes(ClusterTopology("c", (devices_host(),)), 3)
    assert names(routes, "host/gpu0", "host/gpu1") == ["host/gpu0>host/pcie0", "host/pcie0>host/gpu1"]
    assert names(routes, "host/gpu0", "host/gpu2") == [
        "host/gpu0>host/pcie0",
        "host/pcie0>host/numa0",
        "host/numa0>host/numa1",
        "host/numa1>host/gpu2",
    ]
    assert names(routes, "host/gpu0", "host/gpu0") == []
    assert [site.numa for site in routes.sites] == ["host/numa0", "host/numa0", "host/numa1"]


def test_ranks_of_a_host_share_out_its_cards() -> None:
    """Otherwise the second card would lie idle."""
    routes = Routes(ClusterTopology("c", (devices_host("a"), devices_host("b")), Network(4.0, 2.0)), 2)
    assert routes.nic_of == {"a/gpu0": "a/nic0", "a/gpu1": "a/nic1", "b/gpu0": "b/nic0", "b/gpu1": "b/nic1"}
    assert names(routes, "a/gpu1", "b/gpu0") == [
        "a/gpu1>a/pcie0",
        "a/pcie0>a/nic1",
        "a/nic1>a/uplink",
        "a/uplink>network",
        "network>b/uplink",
        "b/uplink>b/nic0",
        "b/nic0>b/pcie0",
        "b/pcie0>b/gpu0",
    ]
    assert routes.edges["a/uplink>network"].bandwidth_bytes_per_s == 2e10 / 2


def test_ranks_on_cores_spread_over_the_memories() -> None:
    host = devices_host()
    cores = ClusterTopology("c", (Host(host.name, host.numa_nodes, host.exchange, links=(host.links[0],)),))
    routes = Routes(cores, 4)
    assert [site.numa for site in routes.sites] == ["host/numa0", "host/numa0", "host/numa1", "host/numa1"]
    assert names(routes, "host/rank0", "host/rank3") == ["host/rank0>host/numa0", "host/numa0>host/numa1", "host/numa1>host/rank3"]


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(TopologyError, match="has 3 devices for 4 ranks"):
        Routes(ClusterTopology("c", (devices_host(),)), 4)


@pytest.mark.parametrize("num_hosts", [1, 2, 5])
def test_a_cluster_can_be_imagined_smaller_and_larger(num_hosts: int) -> None:
    cluster = load_topology(find_topology("dgx_h100")).with_hosts(num_hosts)
    assert len({host.name for host in cluster.hosts}) == num_hosts
    Routes(cluster, 8)


def test_a_drive_is_bound_by_operations_then_by_bytes() -> None:
    """Otherwise rows of 200 bytes would look as fast as the data sheet's gigabytes per second."""
    points = [DrivePoint(4096, 1, 1e4), DrivePoint(4096, 128, 8e5), DrivePoint(131072, 128, 5e4)]
    drive = Drive("d", 10**12, tuple(points), 3e9)
    assert drive.read_operations_per_s(512, 128) == 8e5
    assert drive.read_operations_per_s(4096, 1) == 1e4
    assert 1e4 < drive.read_operations_per_s(4096, 16) < 8e5
    assert drive.read_operations_per_s(1 << 20, 128) == pytest.approx(5e4 / 8)
    per_read_s, per_byte_s = drive.read_seconds(128)
    assert per_read_s + 4096 * per_byte_s == pytest.approx(1 / 8e5)
    assert per_read_s + (1 << 20) * per_byte_s == pytest.approx(8 / 5e4)
