"""What every benchmark shares: the command line, fair timing against peers, and one JSON format.

A benchmark is a module `bench_<name>.py` whose `main` builds a `Harness`, calls `compare` or `record` for each case and ends
with `finish`. Contenders are warmed up and then take turns, each round beginning with another one, so that a slow spell of
the machine meets all of them. Medians with the 10th and 90th percentile are reported, never a mean alone.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONED = ("torchrec_kstep", "torch", "torchrec", "fbgemm_gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow")
SECONDS_IN = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Contender:
    """One side of a comparison.

    Attributes:
        call: the work that is timed.
        before: run untimed ahead of each call, e.g. to drop a cache or to zero gradients.
    """

    call: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Spread:
    """Samples in short: the median, and where the middle 80 % lie."""

    median: float
    p10: float
    p90: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Summarises at least one sample; percentiles are those of the nearest rank."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


@dataclass(frozen=True)
class Row:
    """One result: our value against one peer's, in the same unit; `ratio` > 1 means we are better."""

    case: str
    metric: str
    unit: str
    value: float
    p10: float
    p90: float
    peer: str | None
    peer_value: float | None
    peer_p10: float | None
    peer_p90: float | None
    ratio: float | None
    num_samples: int


def measure(contenders: Mapping[str, Contender], num_rounds: int, num_warmup_rounds: int = 2) -> dict[str, list[float]]:
    """Times all contenders in turns and returns their samples in seconds, in the order of the rounds.

    Raises:
        ValueError: there is no contender, or no round to time.
    """
    if not contenders or num_rounds < 1:
        raise ValueError(f"expected at least one contender and one round, got {len(contenders)} and {num_rounds}")
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(num_warmup_rounds + num_rounds):
        start = round_index % len(names)
        for name in names[start:] + names[:start]:
            contender = contenders[name]
            if contender.before is not None:
                contender.before()
            begin = time.perf_counter()
            contender.call()
            elapsed = time.perf_counter() - begin
            if round_index >= num_warmup_rounds:
                samples[name].append(elapsed)
    return samples


def case_text(case: Mapping[str, object]) -> str:
    """Writes all parameters of a case as `key=value`, e.g. `op=backward dim=64 ids=zipf`."""
    return " ".join(f"{key}={value}" for key, value in case.items())


def describe_environment() -> dict[str, object]:
    """Collects what a number depends on: hardware, kernel, versions, commit, thread settings and the command."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "cpu": _first_field("/proc/cpuinfo", "model name"),
        "num_cores": len(os.sched_getaffinity(0)),
        "last_level_cache": _last_level_cache(),
        "memory_total": _first_field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "threads": {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ},
        "versions": versions,
    }


class Harness:
    """Collects the rows of one benchmark, then prints them for people and writes them as JSON.

    Args:
        name: the benchmark's name, without `bench_`.
        quick: whether the sizes are the small ones, for a laptop or a test; results then say so.
        json_path: where the JSON goes; `None` prints only.
        num_rounds: rounds timed in each comparison.
    """

    def __init__(self, name: str, quick: bool = False, json_path: Path | None = None, num_rounds: int = 20) -> None:
        """See the class."""
        self.name = name
        self.quick = quick
        self.json_path = json_path
        self.num_rounds = num_rounds
        self.rows: list[Row] = []
        self.environment = {**describe_environment(), "quick": quick}

    @classmethod
    def from_command_line(cls, name: str, description: str | None, argv: Sequence[str] | None = None) -> "Harness":
        """Reads `--quick`, `--json PATH` and `--rounds N`; `description` is shown by `--help`."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.bench_{name}", description=description)
        parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it run, not how fast it is")
        parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
        parser.add_argument("--rounds", type=int, help="rounds timed in each comparison (default 20, with --quick 3)")
        options = parser.parse_args(argv)
        if options.rounds is not None and options.rounds < 1:
            parser.error(f"--rounds: expected at least 1, got {options.rounds}")
        return cls(name, options.quick, options.json, options.rounds or (3 if options.quick else 20))

    def compare(
        self,
        case: Mapping[str, object],
        ours: Contender | Callable[[], object],
        peers: Mapping[str, Contender | Callable[[], object]],
        unit: str = "ms",
        num_items: int | None = None,
    ) -> None:
        """Times `ours` and all `peers` in turns and adds a row for each peer.

        Args:
            case: all parameters, as they are to be read in a table.
            ours: our side; a bare function is a contender without `before`.
            peers: the others by name; without any, one row with our value alone is added.
            unit: `s`, `ms`, `us` or `ns` for times; with `num_items`, what is counted, e.g. `rows`.
            num_items: if given, throughput in `<unit>/s` is reported in place of time.
        """
        if num_items is None and unit not in SECONDS_IN:
            raise ValueError(f"unit of a time: expected one of {', '.join(SECONDS_IN)}, got {unit!r}")
        sides = {"": ours, **peers}
        contenders = {name: side if isinstance(side, Contender) else Contender(side) for name, side in sides.items()}
        spreads = {name: self._spread(samples, unit, num_items) for name, samples in measure(contenders, self.num_rounds).items()}
        metric, row_unit, higher_is_better = ("time", unit, False) if num_items is None else ("throughput", f"{unit}/s", True)
        for peer in peers or (None,):
            self.record(case, metric, row_unit, spreads[""], peer, None if peer is None else spreads[peer], higher_is_better)

    def record(
        self,
        case: Mapping[str, object],
        metric: str,
        unit: str,
        value: Spread | float,
        peer: str | None = None,
        peer_value: Spread | float | None = None,
        higher_is_better: bool = False,
    ) -> None:
        """Adds a row measured elsewhere, such as bytes sent or a hit rate, and says so at once: a run of an hour may be ended early."""
        ours = value if isinstance(value, Spread) else Spread.of([value])
        theirs = peer_value if peer_value is None or isinstance(peer_value, Spread) else Spread.of([peer_value])
        ratio = None
        if theirs is not None:
            better, worse = (ours.median, theirs.median) if higher_is_better else (theirs.median, ours.median)
            ratio = better / worse if worse else None
        self.rows.append(
            Row(
                case=case_text(case),
                metric=metric,
                unit=unit,
                value=ours.median,
                p10=ours.p10,
                p90=ours.p90,
                peer=peer,
                peer_value=None if theirs is None else theirs.median,
                peer_p10=None if theirs is None else theirs.p10,
                peer_p90=None if theirs is None else theirs.p90,
                ratio=ratio,
                num_samples=ours.num_samples,
            )
        )
        print("  ".join(_cells(self.rows[-1])), file=sys.stderr, flush=True)

    def finish(self) -> int:
        """Prints the table, writes the JSON, and returns the exit status.

        Raises:
            RuntimeError: no row was added; a benchmark that measured nothing must not look like a success.
        """
        if not self.rows:
            raise RuntimeError(f"benchmark {self.name} measured nothing")
        print(self.table())
        if self.json_path is not None:
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            result = {"benchmark": self.name, "environment": self.environment, "rows": [asdict(row) for row in self.rows]}
            unfinished = self.json_path.with_name(self.json_path.name + ".tmp")
            unfinished.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
            unfinished.replace(self.json_path)
            print(f"results: {self.json_path}")
        return 0

    def table(self) -> str:
        """Lays the rows out for people."""
        header = ("case", "metric", "ours (p10..p90)", "peer", "peer (p10..p90)", "ratio")
        lines = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        title = f"{self.name}{' (quick sizes: not a measurement)' if self.quick else ''}: ratio > 1 means we are better"
        return "\n".join(
            [title, *("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)]
        )

    @staticmethod
    def _spread(samples_s: Sequence[float], unit: str, num_items: int | None) -> Spread:
        if num_items is None:
            return Spread.of([sample / SECONDS_IN[unit] for sample in samples_s])
        return Spread.of([num_items / sample for sample in samples_s])


def _cells(row: Row) -> tuple[str, ...]:
    ours = f"{row.value:.4g} ({row.p10:.4g}..{row.p90:.4g}) {row.unit}"
    theirs = "-" if row.peer_value is None else f"{row.peer_value:.4g} ({row.peer_p10:.4g}..{row.peer_p90:.4g}) {row.unit}"
    return (row.case, row.metric, ours, row.peer or "-", theirs, "-" if row.ratio is None else f"{row.ratio:.2f}")


def _commit() -> str | None:
    """The checkout's commit, with `+changes` if files differ from it; `None` outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changes.strip() else head


def _first_field(path: str, key: str) -> str | None:
    """The value of the first `key: value` line of a /proc file; `None` where there is no such file or line."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def _last_level_cache() -> str | None:
    """Size of the largest cache of the first core, as the kernel writes it, e.g. `32768K`."""
    indexes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return indexes[-1].read_text().strip() if indexes else None
