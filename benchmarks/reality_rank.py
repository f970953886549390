"""One rank of `bench_reality`: builds training loops as `train` does and times their steps, one configuration after the other.

Arguments: a JSON file with a list of cases (name, overrides of `train`, shape of the data), and a folder. Each case leaves what was
predicted and what was measured in the folder of its name. Ids come from memory, so that no reader competes for the cores.
"""

import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.bench_tiered_dmp import materialise
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.data.dataset import BatchStream
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.loop import Loop
from torchrec_kstep.metrics.step_record import StepRecord
from torchrec_kstep.planner.forecast import Measured, write_comparison
from torchrec_kstep.torchrec_seam.quiet import silence_known_warnings
from torchrec_kstep.train import build_loop
from torchrec_kstep.types import Batch, FeatureSchema, SparseFeature, Split
from torchrec_kstep.world import World

POOL_IDS = 1 << 21
NUM_DENSE = 13
TIMEOUT = timedelta(seconds=120)
WARMUP_STEPS, MIN_INTERVALS = 16, 6


@dataclass(frozen=True)
class Case:
    """One configuration, or two that take turns.

    Attributes:
        name: of its folder.
        variants: overrides of `train`, one list for each.
        rows: of each table.
        ids: per bag of each table.
        seconds: to measure for.
        zipf: exponent of the ids.
    """

    name: str
    variants: list[list[str]]
    rows: list[int]
    ids: list[int]
    seconds: float
    zipf: float = 1.05
    tags: dict[str, Any] = field(default_factory=dict)


class DrawnDataset:
    """Zipf ids drawn beforehand; a batch takes a stretch that begins anywhere. Endless."""

    fingerprint = "drawn"

    def __init__(self, case: Case) -> None:
        """Draws the ids of each table."""
        self._case = case
        self._pools = [_pool(num_rows, case.zipf, index % 3) for index, num_rows in enumerate(case.rows)]
        sizes = enumerate(zip(case.rows, case.ids, strict=True))
        features = tuple(SparseFeature(f"f{index}", num_rows, ids) for index, (num_rows, ids) in sizes)
        self.schema = FeatureSchema(tuple(f"d{index}" for index in range(NUM_DENSE)), features)

    def num_rows(self, split: Split) -> int:
        """More than any run takes."""
        del split
        return 10**9

    def batches(self, split: Split, order: BatchOrder, start_step: int = 0) -> BatchStream:
        """Batches of the order's rank."""
        del split

        def make() -> Generator[Batch, None, None]:
            rng = np.random.default_rng((order.rank, 7))
            while True:
                yield self._batch(rng, order)

        return BatchStream(order.num_steps(10**9), start_step, order.micro_batches, 0, make)

    def _batch(self, rng: np.random.Generator, order: BatchOrder) -> Batch:
        size = order.batch_size
        values, lengths = [], []
        for pool, ids in zip(self._pools, self._case.ids, strict=True):
            first = int(rng.integers(0, len(pool) - size * ids))
            values.append(pool[first : first + size * ids])
            lengths.append(np.full(size, ids, dtype=np.int32))
        ids_of_all, all_lengths = torch.from_numpy(np.concatenate(values)), torch.from_numpy(np.concatenate(lengths))
        sparse = KeyedJaggedTensor(keys=list(self.schema.sparse_names), values=ids_of_all, lengths=all_lengths)
        dense = torch.from_numpy(rng.standard_normal((size, NUM_DENSE), dtype=np.float32))
        label = torch.from_numpy((rng.random(size) < 0.3).astype(np.float32))
        return Batch(dense, sparse, label, torch.ones(size), size * order.world_size)


@lru_cache(maxsize=40)
def _pool(num_rows: int, exponent: float, seed: int) -> npt.NDArray[np.int64]:
    """Zipf ranks, scattered over the rows by a permutation."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    drawn = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(POOL_IDS)).clip(0, num_rows - 1)
    return np.asarray(rng.permutation(num_rows)[drawn], dtype=np.int64)


class Stepper:
    """A training loop that is taken forward interval by interval."""

    def __init__(self, loop: Loop, has_caches: bool) -> None:
        """Starts the stream; rows of caches get their records before, as they have once training has run for a while."""
        self.loop, self.record = loop, StepRecord()
        self._step, self._limit, self._taken = 0, sys.maxsize, 0
        if has_caches:
            materialise(loop.dmp)
        order = BatchOrder(loop.world.rank, loop.world.world_size, loop.config.train.batch_size)
        self._batches = iter(loop.dataset.batches("train", order))
        self._ahead = loop.timer.waiting_for(self._limited())
        loop.dmp.train()
        loop.pipeline.reset()

    def _limited(self) -> Iterator[Batch]:
        while self._taken < self._limit:
            self._taken += 1
            yield next(self._batches)

    def advance(self, num_steps: int, is_recorded: bool = True) -> float:
        """Takes steps; returns seconds of each, data not counted."""
        self.loop.timer.take()
        for _ in range(num_steps):
            self.loop.schedule.apply(self._step)
            with self.loop.timer.phase("forward_backward"):
                self.loop.pipeline.progress(self._ahead)
            self._step += 1
        seconds = self.loop.timer.take()
        if is_recorded:
            self.record.add(num_steps, seconds, self.loop.table_scalars())
            if self.loop.replicas is not None:
                self.record.add_rounds(self.loop.replicas.take_scalars(), self.loop.config.kstep.k)
        return (seconds["forward_backward"] + seconds["optimizer"]) / num_steps

    def close(self) -> None:
        """Lets the pipeline run dry, so that no exchange is left half done."""
        self._limit = 0
        while True:
            try:
                self.loop.pipeline.progress(self._ahead)
            except StopIteration:
                break
        self.loop.pipeline.reset()
        self._batches.close()


def measure(case: Case, world: World, folder: Path) -> None:
    """Measures a case and writes what came out. Collective."""
    dataset = DrawnDataset(case)
    run_dirs = [folder / case.name / f"v{index}" if len(case.variants) > 1 else folder / case.name for index in range(len(case.variants))]
    for run_dir in run_dirs:
        if world.is_main:
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.mkdir(parents=True)
    dist.barrier()
    steppers = []
    for run_dir, overrides in zip(run_dirs, case.variants, strict=True):
        config = load(RunConfig, "train", [*overrides, "metrics.report=false"])
        steppers.append(Stepper(build_loop(config, world, dataset, run_dir), config.tiers.name == "dram_ssd"))
    k = max(steppers[0].loop.config.kstep.k, 1)
    warmup = [stepper.advance(-(-WARMUP_STEPS // k) * k, is_recorded=False) for stepper in steppers]
    slowest = torch.tensor(warmup, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    total_s = float(slowest.sum())
    # Intervals of about a third of a second, whole periods between merge rounds each, the same on all ranks.
    num_steps = -(-max(1, round(0.3 * len(steppers) / total_s)) // k) * k
    num_intervals = max(MIN_INTERVALS, round(case.seconds / (total_s * num_steps)))
    times: list[list[float]] = [[] for _ in steppers]
    for _ in range(num_intervals + 1):
        for index, stepper in enumerate(steppers):
            dist.barrier()
            times[index].append(stepper.advance(num_steps))
    for stepper, run_dir, taken in zip(steppers, run_dirs, times, strict=True):
        measured = stepper.record.measured()
        if world.is_main and measured is not None:
            _write(case, run_dir, stepper.loop, measured, taken[1:])
        stepper.close()
    steppers.clear()
    gc.collect()
    dist.barrier()
    for run_dir in run_dirs:
        if world.local_rank == 0:
            shutil.rmtree(run_dir / "rows", ignore_errors=True)


def _write(case: Case, run_dir: Path, loop: Loop, measured: Measured, times: Sequence[float]) -> None:
    if loop.forecast is not None:
        write_comparison(run_dir, loop.forecast, measured)
    values = {"name": case.name, "tags": case.tags, "step_s": measured.step_s, "median_s": statistics.median(times), "plan": loop.plan_text}
    values |= {"times_s": list(times), "counters": dict(measured.counters)}
    unfinished = run_dir / "measured.tmp"
    unfinished.write_text(json.dumps(values), encoding="utf-8")
    unfinished.replace(run_dir / "measured.json")
    predicted = "" if loop.forecast is None else f", predicted {1e3 * loop.forecast.step.seconds:.1f}"
    print(f"{time.strftime('%H:%M:%S')} {run_dir.name}: measured {1e3 * measured.step_s:.1f} ms{predicted}", file=sys.stderr, flush=True)


def keep_to_own_cores(world: World) -> None:
    """Hosts share this machine: each keeps to its part of the cores, as the topology written for it says. Threads to come inherit it."""
    cores = sorted(os.sched_getaffinity(0))
    if 1 < world.num_hosts <= len(cores):
        first, end = (len(cores) * host // world.num_hosts for host in (world.host, world.host + 1))
        os.sched_setaffinity(0, cores[first:end])


def main(argv: Sequence[str]) -> int:
    """Runs the cases of a file."""
    silence_known_warnings()
    world = World.from_torchrun()
    keep_to_own_cores(world)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for values in json.loads(Path(argv[0]).read_text()):
            measure(Case(**values), world, Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
