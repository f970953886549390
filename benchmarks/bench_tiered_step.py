"""Training steps over tables that do not fit into the cache: `--case step` (default), `soak`, `big`, or several.

    step  a step with a 10 % cache and prefetch against the larger of: the same step with every row cached (compute), and the
          store alone replaying the same batches (I/O); 26 tables, dim 64, Adam, Zipf 1.05, 8192 bags per table.
    soak  many Zipf and then uniform batches with cleaning: how long steps wait for the cleaner, space, memory over time;
          `--ids` runs one of the two.
    big   more rows than memory holds: every row materialised by one sweep, then Zipf batches; disk, memory, estimate.

`step` runs its contenders in turns; a sample is the mean step of a turn, without the steps at its ends, where prefetching has a
head start or runs out of batches.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from benchmarks._harness import Harness, Spread
from torchrec_kstep.ops.batch import Dedup, TableSpec
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.storage.division import RecordLayout, payload_bytes
from torchrec_kstep.storage.estimate import estimate
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import GIB, MIB

ROOT = Path(__file__).resolve().parent.parent
NUM_TABLES = 26
ZIPF = 1.05
OPTIMIZER = AdamSpec(lr=1e-3)
DEPTH, LOOKAHEAD = 2, 8
CASES = ("step", "soak", "big")
SOAK_IDS = ("zipf", "uniform")


@dataclass(frozen=True)
class Setting:
    """Sizes of one case: rows of each table, columns, bags per table, and the threads of an op."""

    num_rows: int
    dim: int
    batch_size: int
    threads: int = 2

    @property
    def tables(self) -> list[TableSpec]:
        """26 equal tables."""
        return [TableSpec(f"t{t}", self.num_rows, self.dim, t, init="uniform", init_a=-0.01, init_b=0.01) for t in range(NUM_TABLES)]

    @property
    def full_cache_bytes(self) -> int:
        """DRAM with which every row has its slot."""
        return NUM_TABLES * self.num_rows * RecordLayout.of(payload_bytes(self.tables[0], OPTIMIZER), 64 * MIB).slot_bytes

    def case(self, name: str, ids: str) -> dict[str, object]:
        """The parameters as a benchmark row shows them."""
        rows = NUM_TABLES * self.num_rows
        return {"op": name, "dim": self.dim, "ids": ids, "rows": rows, "batch": self.batch_size, "threads": self.threads}


class Ids:
    """Draws batches; Zipf ids are scattered over each table by a fixed permutation."""

    def __init__(self, kind: str, setting: Setting, seed: int) -> None:
        """`kind`: zipf or uniform."""
        self._setting = setting
        self._generator = np.random.default_rng(seed)
        self._cumulative = None
        if kind == "zipf":
            weights = np.arange(1, setting.num_rows + 1, dtype=np.float64) ** -ZIPF
            self._cumulative = np.cumsum(weights) / weights.sum()
        # Multiplying by a number without common divisor permutes the ids.
        self._factor = next(
            f for f in range(int(setting.num_rows * 0.618) | 1, 2 * setting.num_rows + 3) if np.gcd(f, setting.num_rows) == 1
        )

    def draw(self) -> torch.Tensor:
        """`[26 * batch_size]` int64, table after table."""
        shape = (NUM_TABLES, self._setting.batch_size)
        if self._cumulative is None:
            ids = self._generator.integers(0, self._setting.num_rows, shape)
        else:
            ranks = np.searchsorted(self._cumulative, self._generator.random(shape)).clip(max=self._setting.num_rows - 1)
            ids = (ranks * self._factor + np.arange(NUM_TABLES)[:, None]) % self._setting.num_rows
        return torch.from_numpy(ids.astype(np.int64).reshape(-1))


class Training:
    """A group of tables and its steps."""

    def __init__(self, folder: Path, setting: Setting, dram_bytes: int) -> None:
        """Opens a store in `folder`."""
        torch.set_num_threads(setting.threads)
        self.setting = setting
        self.config = TierConfig(dram_bytes, [folder], prefetch_depth=DEPTH, lookahead=LOOKAHEAD)
        self.group = TieredTables.open(setting.tables, OPTIMIZER, self.config)
        self.group.set_step(1e-3, 1)
        self._offsets = torch.arange(NUM_TABLES * setting.batch_size + 1)
        self._features = list(range(NUM_TABLES))
        self._grad = torch.full((setting.batch_size, NUM_TABLES * setting.dim), 1e-3)

    def materialise(self) -> None:
        """Gives every row a record, in batches that fit into the cache."""
        num_slots = self.config.num_dram_bytes // RecordLayout.of(payload_bytes(self.setting.tables[0], OPTIMIZER), 64 * MIB).slot_bytes
        rows_per_call = max(64, min(1 << 16, num_slots // (4 * NUM_TABLES)))
        for begin in range(0, self.setting.num_rows, rows_per_call):
            rows = torch.arange(begin, min(begin + rows_per_call, self.setting.num_rows))
            bounds = torch.arange(NUM_TABLES + 1) * rows.numel()
            empty = torch.empty(0)
            self.group.replay(Dedup(rows.repeat(NUM_TABLES), bounds, empty, empty, empty, empty))
        self.group.flush()

    def batches(self, ids: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Dedup]]:
        """Batches with their unique rows, the next ones told ahead."""
        return self.group.lookahead(ids, lambda batch: self.group.dedup(batch, self._offsets, self._features))

    def step(self, dedup: Dedup) -> None:
        """Forward, backward, Adam."""
        self.group.pooled_of(dedup, self._offsets, self._features).backward(self._grad)

    def turn(self, ids: list[torch.Tensor], num_untimed: int, replay: bool) -> list[float]:
        """Runs all batches; seconds of each but those at both ends. Dedup is part of a step, but not of the store.

        The first `num_untimed` profit from what was prefetched between turns, and during the last ones there is less to prefetch.
        """
        seconds = []
        begin = time.perf_counter()
        for index, (_, dedup) in enumerate(self.batches(ids)):
            if replay:
                begin = time.perf_counter()
                self.group.replay(dedup)
            else:
                self.step(dedup)
            end = time.perf_counter()
            if num_untimed <= index < len(ids) - DEPTH:
                seconds.append(end - begin)
            begin = end
        return seconds


def record_step(run: Harness, folder: Path) -> None:
    """Adds the step against compute and I/O, with what the cache did."""
    setting = Setting(4000, 64, 256) if run.quick else Setting(160_000, 64, 8192)
    full = setting.full_cache_bytes
    sides = {"step": full // 10, "compute": full + 4096 * NUM_TABLES, "io": full // 10}
    trainings = {name: Training(folder / name, setting, dram_bytes) for name, dram_bytes in sides.items()}
    for training in trainings.values():
        training.materialise()
    ids = Ids("zipf", setting, seed=1)
    num_untimed = LOOKAHEAD + 1
    num_timed = 3 if run.quick else 10
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(run.num_rounds + 2):
        batches = [ids.draw() for _ in range(num_untimed + num_timed + DEPTH)]
        names = list(sides)
        for name in names[index % 3 :] + names[: index % 3]:
            seconds = trainings[name].turn(batches, num_untimed, replay=name == "io")
            if index >= 2:
                samples[name].append(sum(seconds) / len(seconds))  # rows come up in rounds, so single steps differ widely
    case = setting.case("step", "zipf")
    spreads = {name: Spread.of([1e3 * sample for sample in found]) for name, found in samples.items()}
    bound = max(("compute", "io"), key=lambda name: spreads[name].median)
    run.record({**case, "bound": bound}, "time", "ms", spreads["step"], "max(compute,io)", spreads[bound])
    for name in ("compute", "io"):
        run.record({**case, "side": name}, "time", "ms", spreads[name])
    stats = trainings["step"].group.stats()
    run.record(case, "hit_ratio", "1", stats.hit_ratio, higher_is_better=True)
    run.record(case, "clairvoyant_ratio", "1", stats.clairvoyant_ratio, higher_is_better=True)
    for training in trainings.values():
        training.group.close()


def record_soak(run: Harness, folder: Path, kinds: Collection[str] = SOAK_IDS) -> None:
    """Adds waiting for the cleaner, space and memory over many steps with ids of these kinds."""
    setting = Setting(8000, 64, 512) if run.quick else Setting(160_000, 64, 8192)
    training = Training(folder, setting, setting.full_cache_bytes // 10)
    training.materialise()
    for kind, num_steps in (("zipf", 100 if run.quick else 1000), ("uniform", 20 if run.quick else 200)):
        if kind not in kinds:
            continue
        ids = Ids(kind, setting, seed=2)
        seconds, waits, space, memory = [], [], [], []
        waited = training.group.stats().store["cleaner_stall_s"]
        drawn = (ids.draw() for _ in range(num_steps))
        for _, dedup in training.batches(drawn):
            begin = time.perf_counter()
            training.step(dedup)
            seconds.append(time.perf_counter() - begin)
            store = training.group.stats().store
            waits.append(store["cleaner_stall_s"] - waited)
            waited = store["cleaner_stall_s"]
            space.append(store["unheld_bytes"] / store["live_unit_bytes"])
            memory.append(resident_bytes() / MIB)
            if len(seconds) % 100 == 0:
                print(f"soak, {kind} ids: {len(seconds)} of {num_steps} steps", file=sys.stderr, flush=True)
        case = {**setting.case("soak", kind), "steps": num_steps}
        median = float(np.median(seconds))
        run.record(case, "time", "ms", Spread.of([1e3 * value for value in seconds]))
        run.record(case, "time_p999", "ms", 1e3 * float(np.quantile(seconds, 0.999)))
        shares = np.array(waits) / np.array(seconds)
        run.record(case, "cleaner_wait_share_p99", "1", float(np.quantile(shares, 0.99)))
        run.record(case, "cleaner_wait_max_over_median_step", "1", max(waits) / median)
        run.record(case, "unheld_over_live_max", "1", max(space))
        second_half = memory[len(memory) // 2 :]
        slope = float(np.polyfit(np.arange(len(second_half)), second_half, 1)[0]) * 100
        run.record(case, "memory_slope_per_100_steps", "MiB", slope)
    training.group.close()


def record_big(run: Harness, folder: Path) -> None:
    """Adds disk and memory of more rows than memory holds, against the estimate and a run with tiny tables."""
    setting = Setting(20_000, 16, 512) if run.quick else Setting(5_000_000, 16, 8192)
    dram_bytes = 16 * MIB if run.quick else 2 * GIB
    num_steps = 10 if run.quick else 300
    measured = in_child(folder / "big", setting, dram_bytes, num_steps)
    baseline = in_child(folder / "tiny", replace(setting, num_rows=1000), dram_bytes, num_steps)
    expected = estimate(setting.tables, OPTIMIZER, dram_bytes, TierConfig(dram_bytes, [folder]))
    tiny = estimate(replace(setting, num_rows=1000).tables, OPTIMIZER, dram_bytes, TierConfig(dram_bytes, [folder]))
    case = setting.case("big", "zipf")
    run.record(case, "disk", "GiB", measured["disk_bytes"] / GIB, "estimate_at_most", expected.max_disk_bytes / GIB)
    run.record(case, "disk_after_sweep", "GiB", measured["sweep_bytes"] / GIB, "estimate", expected.disk_bytes / GIB)
    grown = measured["memory_bytes"] - baseline["memory_bytes"]
    # The baseline holds its few rows in a cache of their own size.
    predicted = expected.memory_bytes - tiny.memory_bytes
    run.record(case, "memory_over_tiny_tables", "MiB", grown / MIB, "estimate", predicted / MIB)
    limit = expected.cache_bytes + expected.index_bytes + 256 * MIB
    run.record(case, "memory_over_tiny_tables", "MiB", grown / MIB, "cache+index+256MiB", limit / MIB)
    run.record(case, "index", "MiB", measured["index_bytes"] / MIB, "estimate", expected.index_bytes / MIB)
    run.record(case, "sweep", "s", measured["sweep_s"])
    run.record(case, "time", "ms", 1e3 * measured["step_s"])
    record_billion(run, folder / "billion")


def record_billion(run: Harness, folder: Path) -> None:
    """Adds what a table of a billion rows costs, untouched and with some rows touched."""
    num_touched = 20_000 if run.quick else 1_000_000
    table = TableSpec("t", 10**9, 16)
    begin = time.perf_counter()
    with TieredTables.open([table], OPTIMIZER, TierConfig(64 * MIB, [folder])) as group:
        created_s = time.perf_counter() - begin
        for rows in torch.arange(0, 10**9, 10**9 // num_touched)[:num_touched].split(20_000):
            group.write(0, rows, torch.ones(rows.numel(), 16))
        group.flush()
        used_bytes = group.usage().total_bytes
    record_bytes = RecordLayout.of(payload_bytes(table, OPTIMIZER), 64 * MIB).record_bytes
    case = {"op": "billion", "dim": 16, "touched": num_touched}
    run.record(case, "created", "s", created_s)
    run.record(case, "disk_over_records", "1", used_bytes / (num_touched * record_bytes))


def in_child(folder: Path, setting: Setting, dram_bytes: int, num_steps: int) -> dict[str, float]:
    """Runs `sweep_and_train` in a process of its own, so that its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(sweep_and_train, folder, setting, dram_bytes, num_steps).result()


def sweep_and_train(folder: Path, setting: Setting, dram_bytes: int, num_steps: int) -> dict[str, float]:
    """Gives every row a record, then trains; bytes on the drive and in memory at the end."""
    training = Training(folder, setting, dram_bytes)
    begin = time.perf_counter()
    training.materialise()
    sweep_s = time.perf_counter() - begin
    sweep_bytes = training.group.usage().total_bytes
    ids = Ids("zipf", setting, seed=3)
    seconds = training.turn([ids.draw() for _ in range(num_steps)], num_untimed=1, replay=False)
    result = {
        "sweep_s": sweep_s,
        "sweep_bytes": float(sweep_bytes),
        "step_s": float(np.median(seconds)),
        "disk_bytes": float(training.group.usage().total_bytes),
        "index_bytes": training.group.stats().total("index_bytes"),
        "memory_bytes": float(resident_bytes()),
    }
    training.group.close()
    shutil.rmtree(folder)
    return result


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--case", action="append", choices=CASES)
    own.add_argument("--ids", choices=SOAK_IDS)
    options, rest = own.parse_known_args(argv)
    run = Harness.from_command_line("tiered_step", __doc__, rest)
    cases = options.case or (list(CASES) if run.quick else ["step"])
    (ROOT / "build").mkdir(exist_ok=True)  # a drive, not a memory file system
    soak = partial(record_soak, kinds=[options.ids] if options.ids else SOAK_IDS)
    recorders: dict[str, Callable[[Harness, Path], None]] = {"step": record_step, "soak": soak, "big": record_big}
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="kstep-bench-", dir=ROOT / "build") as folder:
            recorders[case](run, Path(folder))
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
