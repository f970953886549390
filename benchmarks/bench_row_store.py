"""The row store against the drive's own limit, an in-place file, a mapped file and RocksDB with 32 shards.

Workloads: `raw_read` random unique rows without a cache; `raw_write` the same rows written back; `batch` one training batch's
rows through a 10 % cache (find, evict, write back, read, update), with cleaning and compaction running on both sides.
Contenders are processes of `benchmarks/native` that take turns; each has its own folder, rows and equal cache.
`--case raw` does the first two, `--case zipf` and `--case uniform` batches of such ids; without it, raw and zipf.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks._harness import Harness, Spread

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"
RAW = ("row_store", "device_limit", "in_place", "mmap", "rocksdb_32")
CASES = ("raw", "zipf", "uniform")
BATCH = ("tiered", "tiered_lookahead", "row_store", "in_place", "mmap", "rocksdb_32")
LOAD_TIMEOUT_S = 900


@dataclass(frozen=True)
class Workload:
    """Sizes of one run: rows, dim (three fields of it per row), share of rows in the cache, lookups per batch."""

    num_rows: int
    dim: int
    cache_share: float
    num_lookups: int
    num_warmup_batches: int


FULL = Workload(num_rows=4_000_000, dim=64, cache_share=0.10, num_lookups=8192 * 26, num_warmup_batches=100)
QUICK = Workload(num_rows=200_000, dim=64, cache_share=0.25, num_lookups=40_000, num_warmup_batches=3)


class Process:
    """One contender: a child process that answers one line of JSON per command."""

    def __init__(self, program: Path, kind: str, folder: Path, workload: Workload, ids: str) -> None:
        """Starts it and waits until its rows are loaded.

        Raises:
            RuntimeError: it ended instead, e.g. because its library is not built in.
        """
        folder.mkdir()
        arguments = [workload.num_rows, workload.dim, workload.cache_share, workload.num_lookups, ids, 1]
        command = [str(program), kind, str(folder), *map(str, arguments)]
        self._folder = folder
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.load_s = self._read()["load_s"]

    def ask(self, command: str) -> dict[str, float]:
        """Runs one command and returns its numbers."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process and removes its rows."""
        self._process.kill()
        self._process.communicate(timeout=LOAD_TIMEOUT_S)
        shutil.rmtree(self._folder)

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, err = self._process.communicate(timeout=LOAD_TIMEOUT_S)
            raise RuntimeError(f"contender ended with status {self._process.returncode}: {err.strip()}")
        answer: dict[str, float] = json.loads(line)
        return answer


class Contenders:
    """Several contenders with their rows loaded, in folders of one temporary folder."""

    def __init__(self, program: Path, kinds: tuple[str, ...], workload: Workload, ids: str, folder: Path | None) -> None:
        """Those whose library is missing are left out, with a line that says so."""
        self._root = tempfile.TemporaryDirectory(prefix="kstep-bench-", dir=folder)
        self.processes: dict[str, Process] = {}
        for kind in kinds:
            try:
                self.processes[kind] = Process(program, kind, Path(self._root.name) / kind, workload, ids)
            except RuntimeError as error:
                print(f"left out: {kind}: {error}")

    def __enter__(self) -> "Contenders":
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Ends all processes and removes their rows."""
        for process in self.processes.values():
            process.close()
        self._root.cleanup()

    def measure(self, command: str, num_rounds: int, num_warmup_rounds: int) -> dict[str, list[dict[str, float]]]:
        """Asks all contenders in turns, each round beginning with another one; warm-up answers are dropped."""
        names = list(self.processes)
        answers: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for index in range(num_warmup_rounds + num_rounds):
            start = index % len(names)
            for name in names[start:] + names[:start]:
                answer = self.processes[name].ask(command)
                if index >= num_warmup_rounds:
                    answers[name].append(answer)
        return answers


def build(target: str = "row_store_bench") -> Path:
    """Compiles a native driver and returns it."""
    for command in (["cmake", "-S", "benchmarks/native", "-B", str(BUILD), "-G", "Ninja"], ["ninja", "-C", str(BUILD), target]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return BUILD / target


def record_raw(run: Harness, program: Path, workload: Workload, folder: Path | None) -> None:
    """Adds throughput of random reads and of write-back, without a cache."""
    with Contenders(program, RAW, workload, "uniform", folder) as contenders:
        for command in ("raw_read", "raw_write"):
            answers = contenders.measure(command, run.num_rounds, num_warmup_rounds=1)
            rates = {kind: Spread.of([a["rows"] / a["seconds"] / 1e3 for a in samples]) for kind, samples in answers.items()}
            for peer in rates:
                if peer != "row_store":
                    case = {"op": command, "dim": workload.dim, "rows": workload.num_rows}
                    run.record(case, "throughput", "krows/s", rates["row_store"], peer, rates[peer], higher_is_better=True)


def record_batches(run: Harness, program: Path, workload: Workload, ids: str, num_rounds: int, folder: Path | None) -> None:
    """Adds median, p99 and CPU time of a batch, and misses, against each peer."""
    with Contenders(program, BATCH, workload, ids, folder) as contenders:
        answers = contenders.measure("batch", num_rounds, workload.num_warmup_batches)
        for ours in ("tiered", "tiered_lookahead"):
            counters = contenders.processes[ours].ask("describe")
            case = {"op": "batch", "store": ours, "dim": workload.dim, "ids": ids, "cache": workload.cache_share, "rows": workload.num_rows}
            mine = answers[ours]
            for peer in ("row_store", "in_place", "mmap", "rocksdb_32"):
                if peer not in answers:
                    continue
                theirs = answers[peer]
                run.record(case, "time", "ms", _spread(mine, "seconds", 1e3), peer, _spread(theirs, "seconds", 1e3))
                run.record(case, "time_p99", "ms", _p99(mine), peer, _p99(theirs))
                run.record(case, "cpu", "ms", _spread(mine, "cpu_s", 1e3), peer, _spread(theirs, "cpu_s", 1e3))
                run.record(case, "misses", "rows", _spread(mine, "misses", 1), peer, _spread(theirs, "misses", 1))
            for name in ("write_amplification_ratio", "clairvoyant_ratio", "hit_ratio", "cleaner_share_ratio"):
                run.record(case, name, "1", counters[name], higher_is_better=name in ("clairvoyant_ratio", "hit_ratio"))
            run.record(case, "unheld_over_live", "1", counters["unheld_bytes"] / counters["live_unit_bytes"])


def _spread(answers: list[dict[str, float]], key: str, scale: float) -> Spread:
    return Spread.of([answer[key] * scale for answer in answers])


def _p99(answers: list[dict[str, float]]) -> float:
    ordered = sorted(answer["seconds"] * 1e3 for answer in answers)
    return ordered[round(0.99 * (len(ordered) - 1))]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--case", action="append", choices=CASES)
    options, rest = own.parse_known_args(argv)
    run = Harness.from_command_line("row_store", __doc__, rest)
    workload = QUICK if run.quick else FULL
    folder = ROOT / "build"  # a drive, not a memory file system
    program = build()
    for case in options.case or ("raw", "zipf"):
        if case == "raw":
            record_raw(run, program, workload, folder)
        else:
            record_batches(run, program, workload, case, run.num_rounds if run.quick else max(run.num_rounds, 100), folder)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
