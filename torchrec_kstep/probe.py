"""`python -m torchrec_kstep.probe --out FILE`: measures this machine and writes a topology file for the planner.

    python -m torchrec_kstep.probe --out machine.yaml --ssd-path /nvme0/run1 --ssd-path /nvme1/run1
    torchrun --nproc-per-node 2 -m torchrec_kstep.probe --out machine.yaml      also the exchange between ranks

Under torchrun local rank 0 of the first host measures memory and drives, then all ranks measure the exchange together; hosts are taken
to be alike. What was not measured is assumed, and the file says so.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_kstep._version import __version__
from torchrec_kstep.errors import KStepError
from torchrec_kstep.probing import measure_burst, measure_drive, measure_exchange, measure_memory
from torchrec_kstep.topology import ClusterTopology, Exchange, NumaNode, this_machine, topology_text
from torchrec_kstep.topology.local import cores_of
from torchrec_kstep.units import MIB, format_bandwidth, parse_bytes
from torchrec_kstep.world import World

EXIT_FAILURE = 1
_TIMEOUT = timedelta(minutes=10)  # of collectives; the first rank measures memory and drives before them


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the file, and returns 0, or 1 where a drive or a rank failed."""
    args = _parser().parse_args(argv)
    world = World.from_torchrun()
    try:
        return _probe(args, world)
    except (KStepError, OSError) as error:
        print(f"torchrec_kstep.probe: {error}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _probe(args: argparse.Namespace, world: World) -> int:
    begin = time.perf_counter()

    def tell(text: str) -> None:
        if world.is_main:
            print(f"[{time.perf_counter() - begin:5.1f} s] {text}", flush=True)

    num_parts = 1 + len(args.ssd_path) + (world.world_size > 1)
    share_s = args.seconds / num_parts
    topology = this_machine(args.ssd_path, world.num_hosts)
    assumed = [text for text in topology.assumed if not text.startswith(("memory:", "drives:", "exchange"))]
    host = topology.hosts[0]
    if world.is_main:
        nodes = []
        for node in host.numa_nodes:
            tell(f"{node.name}: memory, {args.memory_bytes // MIB} MiB")
            nodes.append(_measured_node(node, share_s / len(host.numa_nodes), args.memory_bytes))
        drives = []
        for drive in host.drives:
            found, notes = measure_drive(drive.name, Path(drive.path), share_s, tell, args.file_bytes)
            drives.append(found)
            assumed += notes
        host = replace(host, numa_nodes=tuple(nodes), drives=tuple(drives))
    if world.world_size > 1:
        exchange, nic_bytes_per_s, burst_bytes = _exchange(world, share_s, tell)
        host = replace(host, exchange=exchange)
        if nic_bytes_per_s:
            num = len(host.nics)
            nics = tuple(replace(nic, bandwidth_bytes_per_s=nic_bytes_per_s / num, burst_bytes=burst_bytes / num) for nic in host.nics)
            host = replace(host, nics=nics)
            assumed = [text for text in assumed if "Gbit/s" not in text]
    else:
        assumed.append("exchange between ranks: bandwidth and latency, because the probe ran without torchrun")
    if not host.drives:
        assumed.append("drives: none, because no --ssd-path was given")
    if torch.cuda.is_available():
        assumed.append("devices: not described; add them by hand, as conf/topology/a10_pcie_8.yaml does")
    if world.is_main:
        when = time.strftime("%Y-%m-%d %H:%M")
        made = ClusterTopology("this machine", (host,), topology.network, f"probe of {when}", is_measured=True, assumed=tuple(assumed))
        made = made.with_hosts(world.num_hosts)
        args.out.write_text(topology_text(made, _comment(when)), encoding="utf-8")
        _tell_result(made, tell)
        print(f"topology: {args.out}")
    return 0


def _measured_node(node: NumaNode, seconds: float, memory_bytes: int) -> NumaNode:
    speed = measure_memory(cores_of(node.name), seconds, memory_bytes)
    return replace(node, bandwidth_bytes_per_s=speed.stream_bytes_per_s, gather_bytes_per_s=speed.gather_bytes_per_s)


def _exchange(world: World, seconds: float, tell: Callable[[str], None]) -> tuple[Exchange, float, float]:
    """Exchange among the ranks of the first host; bytes per second and of a burst between hosts (0 for one host). Collective."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    size = world.local_world_size
    own = [dist.new_group(list(range(first, first + size)), timeout=_TIMEOUT) for first in range(0, world.world_size, size)]
    firsts = list(range(0, world.world_size, size))
    between = dist.new_group(firsts, timeout=_TIMEOUT) if world.num_hosts > 1 else None
    dist.barrier()  # the first rank comes late
    exchange = this_machine().hosts[0].exchange
    if size > 1:
        tell(f"exchange among {size} ranks of a host")
        exchange = measure_exchange(own[world.host], range(size), seconds / 2)
    nic_bytes_per_s = burst_bytes = 0.0
    if between is not None and world.local_rank == 0:
        tell(f"exchange among {world.num_hosts} hosts")
        steady = measure_exchange(between, firsts, seconds / 4)
        nic_bytes_per_s, burst_bytes = steady.bandwidth_bytes_per_s, measure_burst(between, firsts, steady, seconds / 4)
    dist.barrier()
    return exchange, nic_bytes_per_s, burst_bytes


def _comment(when: str) -> str:
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    return (
        f"Measured {when} on {platform.node()}: {model}, {os.cpu_count()} cores, Linux {platform.release()}.\n"
        f"torchrec_kstep {__version__}, torch {torch.__version__}, Python {platform.python_version()}."
    )


def _tell_result(topology: ClusterTopology, tell: Callable[[str], None]) -> None:
    host = topology.hosts[0]
    for node in host.numa_nodes:
        stream, gather = format_bandwidth(node.bandwidth_bytes_per_s), format_bandwidth(node.gather_bytes_per_s)
        tell(f"{node.name}: {stream} streams, {gather} random rows with one core")
    for drive in host.drives:
        most = max(point.operations_per_s for point in drive.reads)
        tell(f"{drive.name}: {most:,.0f} reads/s, {format_bandwidth(drive.write_bytes_per_s)} writes")
    tell(f"exchange: {format_bandwidth(host.exchange.bandwidth_bytes_per_s)} per rank, {host.exchange.latency_us:.0f} us")
    for text in topology.assumed:
        tell(f"assumed: {text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_kstep.probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="topology file to write")
    parser.add_argument("--ssd-path", action="append", default=[], metavar="FOLDER", help="a folder on each drive; may be repeated")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="about how long to measure; default 30")
    parser.add_argument("--memory", dest="memory_bytes", type=parse_bytes, default="1GiB", metavar="SIZE", help="memory used; default 1GiB")
    parser.add_argument("--file", dest="file_bytes", type=parse_bytes, default="512MiB", metavar="SIZE", help="file on each drive")
    return parser


if __name__ == "__main__":
    sys.exit(main())
