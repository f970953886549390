"""This machine, as the operating system describes it; bandwidths that it does not tell are taken from a table and said to be."""

import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchrec_kstep.topology.drive import Drive, DrivePoint
from torchrec_kstep.topology.files import find_topology, load_topology
from torchrec_kstep.topology.graph import ClusterTopology, Exchange, Host, Link, Nic, NumaNode

ASSUMED_MEMORY_BYTES_PER_S = 19e9  # of one or two cores; more cores add less and less
ASSUMED_GATHER_BYTES_PER_S = 6e9
ASSUMED_EXCHANGE = Exchange(bandwidth_bytes_per_s=1e9, latency_us=150.0)
ASSUMED_NIC_BYTES_PER_S = 1.25e9
ASSUMED_READS = (DrivePoint(4096, 1, 1.2e4), DrivePoint(4096, 128, 1.4e5), DrivePoint(16384, 128, 7e4))
ASSUMED_WRITE_BYTES_PER_S = 1e9
_NUMA_LINK_BYTES_PER_S, _IO_LINK_BYTES_PER_S = 4e10, 1.2e10
_MEGABIT_BYTES = 125_000


def machines(name_or_file: str, num_hosts: int, ssd_paths: Sequence[str] = ()) -> ClusterTopology:
    """Returns the hosts of a run: those of a topology file or example, or with "" this machine as often as there are hosts.

    Raises:
        TopologyError: there is no such file, or it is faulty.
    """
    if not name_or_file:
        return this_machine(ssd_paths, num_hosts)
    return load_topology(find_topology(name_or_file)).with_hosts(num_hosts)


def this_machine(ssd_paths: Sequence[str] = (), num_hosts: int = 1, system: Path = Path("/sys")) -> ClusterTopology:
    """Describes this machine from sysfs, without measuring anything.

    Args:
        ssd_paths: folders, one per drive; paths on one drive count once.
        num_hosts: as many machines like this one.
        system: where sysfs is mounted.
    """
    assumed = ["memory: bandwidth of streams and of random rows", "exchange between ranks: bandwidth and latency"]
    nodes = _numa_nodes(system)
    nics, nic_numa = _nics(system, assumed)
    drives = _drives(ssd_paths, assumed)
    first = nodes[0].name
    links = [Link((first, node.name), _NUMA_LINK_BYTES_PER_S, 0.2) for node in nodes[1:]]
    names = {node.name for node in nodes}
    links += [Link((nic_numa[nic.name] if nic_numa[nic.name] in names else first, nic.name), _IO_LINK_BYTES_PER_S, 1.0) for nic in nics]
    links += [Link((first, drive.name), _IO_LINK_BYTES_PER_S, 1.0) for drive in drives]
    host = Host("host", tuple(nodes), ASSUMED_EXCHANGE, nics=tuple(nics), drives=tuple(drives), links=tuple(links))
    source = f"sysfs of {socket.gethostname()}"
    if num_hosts > 1 and not nics:
        assumed.append("a network card of 10 Gbit/s")
        host = _with_nic(host)
    return ClusterTopology("this machine", (host,), source=source, assumed=tuple(assumed)).with_hosts(num_hosts)


def _with_nic(host: Host) -> Host:
    link = Link((host.numa_nodes[0].name, "nic0"), _IO_LINK_BYTES_PER_S, 1.0)
    return replace(host, nics=(Nic("nic0", ASSUMED_NIC_BYTES_PER_S),), links=(*host.links, link))


def _numa_nodes(system: Path) -> list[NumaNode]:
    """NUMA nodes with memory; one, from /proc, where sysfs shows none."""
    found: list[NumaNode] = []
    for folder in sorted(system.glob("devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        memory_bytes, num_cores = _memory_of(folder / "meminfo"), len(numbers_in(folder / "cpulist"))
        if memory_bytes and num_cores:
            found.append(_numa_node(f"numa{folder.name[4:]}", memory_bytes, num_cores))
    if found:
        return found
    return [_numa_node("numa0", _memory_of(Path("/proc/meminfo")), max(1, len(list(system.glob("devices/system/cpu/cpu[0-9]*")))))]


def _numa_node(name: str, memory_bytes: int, num_cores: int) -> NumaNode:
    return NumaNode(name, memory_bytes, ASSUMED_MEMORY_BYTES_PER_S, ASSUMED_GATHER_BYTES_PER_S, num_cores)


def _memory_of(file: Path) -> int:
    """Bytes in the line `MemTotal: n kB`; 0 without one."""
    for line in _read(file).splitlines():
        if "MemTotal" in line:
            return int(line.split()[-2]) * 1024
    return 0


def cores_of(numa_node: str, system: Path = Path("/sys")) -> list[int]:
    """Returns the cores of a NUMA node such as `numa0`; none where sysfs does not tell."""
    return numbers_in(system / "devices" / "system" / "node" / f"node{numa_node.removeprefix('numa')}" / "cpulist")


def numbers_in(file: Path) -> list[int]:
    """Reads a list such as `0-3,8-11` from a file of sysfs; empty where there is none."""
    numbers: list[int] = []
    for part in filter(None, _read(file).strip().split(",")):
        low, _, high = part.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return numbers


def _nics(system: Path, assumed: list[str]) -> tuple[list[Nic], dict[str, str]]:
    """Cards with hardware behind them, and the NUMA node of each."""
    found: list[Nic] = []
    numa: dict[str, str] = {}
    for folder in sorted(system.glob("class/net/*")):
        if not (folder / "device").exists():
            continue  # loopback, bridges, tunnels
        speed = _read(folder / "speed").strip()
        bandwidth = float(speed) * _MEGABIT_BYTES if speed.isdigit() and speed != "0" else 0.0
        if not bandwidth:
            assumed.append(f"{folder.name}: 10 Gbit/s, because the system tells no speed")
            bandwidth = ASSUMED_NIC_BYTES_PER_S
        name = f"nic{len(found)}"
        found.append(Nic(name, bandwidth, folder.name))
        numa[name] = f"numa{_read(folder / 'device' / 'numa_node').strip() or '0'}"
    return found, numa


def _drives(ssd_paths: Sequence[str], assumed: list[str]) -> list[Drive]:
    """One drive per file system that the paths lie on."""
    found: dict[int, Drive] = {}
    for path in ssd_paths:
        folder = next(place for place in (Path(path).absolute(), *Path(path).absolute().parents) if place.is_dir())
        device = folder.stat().st_dev
        if device not in found:
            free = shutil.disk_usage(folder).free
            found[device] = Drive(f"drive{len(found)}", free, ASSUMED_READS, ASSUMED_WRITE_BYTES_PER_S, str(path))
    if found:
        assumed.append("drives: reads by size and depth, writes")
    return list(found.values())


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # files of sysfs that a driver does not fill
        return ""
