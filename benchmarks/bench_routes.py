"""Routes that are carried out, beside the same training by ranks that know nothing of the machine (`route_blind`).

- network: 2 hosts x 2 ranks, network namespaces with two links each; DLRM, a replica per host, merged every 2 steps. Links of
  1 Gbit/s and 100 Mbit/s: the blind run uses the slow one, over which the hosts happened to meet, or both in turn, as gloo does
  when it is told of both. Two links of 100 Mbit/s: the blind run uses the one over which the hosts met.
- drives: 1 host x 2 ranks, rows on two paths, of which one is bounded in the store's environment to a fraction of the other; the
  blind run spreads its rows evenly. The topology states the bound of the slow path and what a probe measured of the other.

Steps are means between log lines, the first third of which is left out. Counters are those of the interfaces (both directions
of a link count once, as sent) and of rank 0's row stores. All hosts share this machine's cores: ratios say what a route
brings beside that much computing, not what machines of their own would show.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._harness import Harness, Spread
from benchmarks.hosts import HostsResult, hosts, why_unavailable
from benchmarks.train_runs import QUIET, last_tiers, on_one_host, step_seconds, synthetic
from torchrec_kstep.probing.drives import measure_drive
from torchrec_kstep.topology import Drive, DrivePoint, Link, Nic, this_machine, topology_text
from torchrec_kstep.units import GIB, MIB, parse_bandwidth

RANKS_PER_HOST = 2
BYTES_PER_S = {"1gbit": 1.25e8, "100mbit": 1.25e7}
# How the hosts of the blind run met, by the rates of both links: what gloo is told, and how a table calls it.
BLIND_INTERFACES = {
    ("1gbit", "100mbit"): {"eth1": "slow_link", "eth0,eth1": "both_in_turn"},
    ("100mbit", "100mbit"): {"eth0": "one_link"},
}
K = 2
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        num_tables: of the model.
        num_rows: of each table.
        dim: columns.
        batch: rows of data per rank.
        num_steps: optimizer steps.
        limits: bounds of both paths for each rank's row store; "": none, the path is measured.
        probe_s: seconds for measuring a path.
    """

    num_tables: int
    num_rows: int
    dim: int
    batch: int
    num_steps: int
    limits: tuple[str, str] = ("", "8MB/s")
    probe_s: float = 6.0

    def overrides(self, zipf_exponent: float) -> list[str]:
        """Of a run of this size."""
        return [
            *QUIET,
            *synthetic([self.num_rows] * self.num_tables, self.batch * 4 * (self.num_steps + 1), zipf_exponent),
            "data.synthetic.num_eval_rows=1024",
            "model=dlrm",
            f"model.embedding_dim={self.dim}",
            "model.mlp=[32]",
            "model.bottom_mlp=[32]",
            f"train.batch_size={self.batch}",
            f"train.max_steps={self.num_steps}",
            f"train.log_every_steps={max(K, self.num_steps // 12 // K * K)}",  # whole merge periods
            "planner.sharding=row_wise",
        ]


QUICK = Size(num_tables=2, num_rows=20_000, dim=16, batch=256, num_steps=12, probe_s=1.0)
FULL = Size(num_tables=8, num_rows=50_000, dim=64, batch=1024, num_steps=48)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both tables and returns the exit status; without namespaces that of drives alone."""
    harness = Harness.from_command_line("routes", __doc__, argv)
    size = QUICK if harness.quick else FULL
    if reason := why_unavailable():
        print(f"routes: the table of links is skipped: {reason}")
    else:
        for rates, blind in BLIND_INTERFACES.items():
            _compare_links(harness, size, rates, blind)
    _compare_drives(harness, size)
    return harness.finish()


# --- network ---


@dataclass(frozen=True)
class LinkRun:
    """One training over two links.

    Attributes:
        steps_s: seconds per step.
        sent_bytes: by interface, of all hosts.
        log: what rank 0 said.
    """

    steps_s: list[float]
    sent_bytes: dict[str, int]
    log: str


def run_over_links(size: Size, rates: tuple[str, str], met_over: str, scratch: Path, routes: Sequence[str] = ()) -> LinkRun:
    """Trains on 2 hosts x 2 ranks.

    Args:
        size: how much.
        rates: of both links, in `tc`'s words.
        met_over: what gloo was told before routes are set.
        scratch: for the run's files.
        routes: overrides that decide about routes.
    """
    run_dir = scratch / "run"
    command = ["-m", "torchrec_kstep.train", *size.overrides(1.05), "kstep=default", f"kstep.k={K}", f"run_dir={run_dir}", *routes]
    with hosts(2, RANKS_PER_HOST, rates[0], second_link=rates[1]) as cluster:
        result: HostsResult = cluster.run(command, cwd=scratch, deadline_s=DEADLINE_S, env={"GLOO_SOCKET_IFNAME": met_over})
    sent = {link.interface: sum(result.sent_bytes[link.index]) for link in cluster.links}
    return LinkRun(step_seconds(run_dir), sent, result.stdout[0])


def link_topology(rates: tuple[str, str], file: Path) -> Path:
    """Writes the machines of `run_over_links`."""
    host = replace(this_machine().hosts[0], nics=(), links=())
    nics = tuple(Nic(f"nic{index}", BYTES_PER_S[rate], f"eth{index}") for index, rate in enumerate(rates))
    host = replace(host, nics=nics, links=tuple(Link((host.numa_nodes[0].name, nic.name), 1e10, 1.0) for nic in nics))
    file.write_text(topology_text(replace(this_machine(), name="two links", hosts=(host,)).with_hosts(2)), encoding="utf-8")
    return file


def _compare_links(harness: Harness, size: Size, rates: tuple[str, str], blind_interfaces: Mapping[str, str]) -> None:
    links = "+".join(rates)
    print(f"links {links}", flush=True)
    for interfaces, name in blind_interfaces.items():
        with tempfile.TemporaryDirectory() as scratch:
            blind = run_over_links(size, rates, interfaces, Path(scratch), ["routes=off"])
        with tempfile.TemporaryDirectory() as scratch:
            topology = link_topology(rates, Path(scratch) / "machines.yaml")
            ours = run_over_links(size, rates, interfaces, Path(scratch), [f"planner.topology={topology}"])
        case = {"links": links, "blind": name, "k": K, "batch": size.batch, "dim": size.dim}
        _record_steps(harness, case, ours.steps_s, blind.steps_s)
        for interface, sent in ours.sent_bytes.items():
            harness.record(case, f"MB sent over {interface}", "MB", sent / 1e6, "route_blind", blind.sent_bytes[interface] / 1e6)


def _record_steps(harness: Harness, case: Mapping[str, object], ours_s: list[float], blind_s: list[float]) -> None:
    ours, blind = (Spread.of([seconds * 1e3 for seconds in steps]) for steps in (ours_s, blind_s))
    harness.record(case, "step", "ms", ours, "route_blind", blind)


# --- drives ---


@dataclass(frozen=True)
class DriveRun:
    """One training over two paths.

    Attributes:
        steps_s: seconds per step.
        read_bytes: by path, of rank 0.
        written_bytes: by path, of rank 0.
    """

    steps_s: list[float]
    read_bytes: tuple[float, float]
    written_bytes: tuple[float, float]


def run_over_drives(size: Size, scratch: Path, routes: Sequence[str] = ()) -> DriveRun:
    """Trains on one host of 2 ranks, rows on two paths below `scratch`."""
    run_dir = scratch / "run"
    cache_bytes = size.num_tables * size.num_rows * size.dim * 12 // 16
    overrides = [
        *size.overrides(0.6),
        "tiers=dram_ssd",
        f"tiers.dram_bytes={max(cache_bytes, MIB)}B",
        "tiers.segment_bytes=256KiB",
        f"tiers.ssd_paths=[{scratch / 'quick' / 'rows'},{scratch / 'slow' / 'rows'}]",
        f"tiers.ssd_limits=[{','.join(limit or repr('') for limit in size.limits)}]",
        f"run_dir={run_dir}",
        *routes,
    ]
    on_one_host(overrides, RANKS_PER_HOST, scratch, DEADLINE_S)
    counted = last_tiers(run_dir)
    read, written = ((counted[f"path_{kind}_bytes_0"], counted[f"path_{kind}_bytes_1"]) for kind in ("read", "written"))
    return DriveRun(step_seconds(run_dir, 0.5), read, written)


def drive_topology(size: Size, scratch: Path) -> Path:
    """Writes the machine: a path with a bound is as fast as that says, another one is measured."""
    drives = []
    for name, limit in zip(("quick", "slow"), size.limits, strict=True):
        rate = RANKS_PER_HOST * parse_bandwidth(limit) if limit else 0.0
        if rate:
            drives.append(Drive(name, 100 * GIB, (DrivePoint(4096, 128, rate / 4096),), rate, str(scratch / name)))
        else:
            drives.append(measure_drive(name, scratch / name, size.probe_s, lambda _: None, file_bytes=64 * MIB)[0])
    host = this_machine().hosts[0]
    links = (*host.links, *(Link((host.numa_nodes[0].name, drive.name), 1e10, 1.0) for drive in drives))
    machine = replace(this_machine(), name="two drives", hosts=(replace(host, drives=tuple(drives), links=links),))
    file = scratch / "machines.yaml"
    file.write_text(topology_text(machine), encoding="utf-8")
    return file


def _compare_drives(harness: Harness, size: Size) -> None:
    print("drives", flush=True)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:  # not below /tmp, which may be memory
        blind = run_over_drives(size, Path(scratch), ["routes=off"])
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        topology = drive_topology(size, Path(scratch))
        ours = run_over_drives(size, Path(scratch), [f"planner.topology={topology}"])
    limits = "+".join(limit.replace("/", "_per_") or "free" for limit in size.limits)
    case = {"drives": limits, "ranks": RANKS_PER_HOST, "batch": size.batch, "dim": size.dim}
    _record_steps(harness, case, ours.steps_s, blind.steps_s)
    for kind in ("read", "written"):
        for index, path in enumerate(("quick", "slow")):
            values = [getattr(one, f"{kind}_bytes")[index] / 1e6 for one in (ours, blind)]
            harness.record(case, f"MB {kind}, {path} path", "MB", values[0], "route_blind", values[1])


if __name__ == "__main__":
    sys.exit(main())
