"""Training speed by batch size: the whole loop against its compute bound, and where the time goes.

The bound is the same sharded model, pipeline and optimizer over the same batches, all of them in memory before the clock
starts: no reader, no loss bookkeeping, no log. `peer=compute_bound`. Both take turns. Samples/s are rows of an epoch over
seconds. `phase` rows say which share of the loop's time each phase took.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._harness import ROOT, Harness, Spread
from torchrec_kstep.checkpoint import TrainState
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.metrics.sink import Sinks
from torchrec_kstep.metrics.throughput import STEP_PHASES
from torchrec_kstep.train import build_loop
from torchrec_kstep.types import Batch
from torchrec_kstep.world import World

SETTINGS = (
    "planner=tiered",
    "optim.clip=cowclip",
    "optim.embedding_l2=1e-5",
    "model.embedding_dim=10",
    "model.mlp=[128,64]",
    "metrics.progress=none",
    "metrics.tensorboard=false",
)
DATA = ROOT.parent / "shared" / "data" / "ml1m"
TARGET_STEPS = 400  # of one turn at small batches; large ones take a whole epoch


class Phases(Sinks):
    """Adds up the seconds of phases that the loop reports, and writes nothing."""

    def __init__(self) -> None:
        """Starts at zero."""
        super().__init__()
        self.seconds = dict.fromkeys(STEP_PHASES, 0.0)

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        """Takes the phases out of a report."""
        del event, step
        for phase in STEP_PHASES:
            self.seconds[phase] += values.get(f"{phase}_s", 0.0)


class Side:
    """A model of its own, with its own optimizer, that trains the same batches again and again."""

    def __init__(self, overrides: Sequence[str], folder: Path, num_steps: int) -> None:
        """Builds the loop of `train`."""
        self.config = load(RunConfig, "train", [*overrides, f"train.max_steps={num_steps}", "train.epochs=1"])
        self.dataset = open_dataset(self.config.data)
        self.loop = build_loop(self.config, World(), self.dataset, folder)
        self.num_steps = num_steps

    def train(self) -> None:
        """Runs the product's loop over the first `num_steps` batches of an epoch."""
        self.loop._train_epoch(TrainState())

    def batches(self) -> list[Batch]:
        """Reads the same batches into memory."""
        order = BatchOrder(batch_size=self.config.train.batch_size, world_size=1, seed=self.config.train.seed, shuffle=True)
        stream = iter(self.dataset.batches("train", order))
        return [next(stream) for _ in range(self.num_steps)]

    def compute(self, batches: list[Batch]) -> None:
        """Takes batches that are in memory through pipeline and optimizer."""
        self.loop.dmp.train()
        self.loop.pipeline.reset()
        source = iter(batches)
        for _ in batches:
            self.loop.pipeline.progress(source)


def measure(run: Harness, batch_size: int, overrides: Sequence[str], folder: Path) -> None:
    """Times loop and bound at one batch size, in turns."""
    own = (*overrides, *SETTINGS, f"train.batch_size={batch_size}")
    num_rows = open_dataset(load(RunConfig, "train", list(own)).data).num_rows("train")
    num_epoch_steps = -(-num_rows // batch_size)
    num_steps = min(num_epoch_steps, 20 if run.quick else TARGET_STEPS)
    ours, bound = Side(own, folder / f"loop_{batch_size}", num_steps), Side(own, folder / f"bound_{batch_size}", num_steps)
    batches = bound.batches()
    rows = sum(int(batch.num_global_rows) for batch in batches)
    rates: dict[str, list[float]] = {"loop": [], "bound": []}
    phases = Phases()
    wall = 0.0
    for turn in range(2 + min(run.num_rounds, 7)):
        if turn == 2:
            ours.loop.sinks = phases = Phases()
        for name in ("loop", "bound") if turn % 2 else ("bound", "loop"):
            begin = time.perf_counter()
            if name == "loop":
                ours.train()
            else:
                bound.compute(batches)
            spent = time.perf_counter() - begin
            if turn >= 2:
                rates[name].append(rows / spent)
                if name == "loop":
                    wall += spent
    case = {"batch": batch_size, "steps": num_steps}
    run.record(case, "samples_per_s", "rows/s", Spread.of(rates["loop"]), "compute_bound", Spread.of(rates["bound"]), higher_is_better=True)
    for phase in STEP_PHASES:
        run.record(case, f"share_{phase}", "1", phases.seconds[phase] / wall)


def main(argv: list[str] | None = None) -> int:
    """Measures the base batch and larger ones."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 512, 4096, 65_536], help="rows per step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_large_batch"), help="the prepared set stays there")
    options, rest = parser.parse_known_args(argv)
    run = Harness.from_command_line("large_batch", f"{__doc__}\n{parser.format_help()}", rest)
    torch.set_num_threads(options.threads)
    if DATA.exists() and not run.quick:
        data = ["data=movielens_1m", f"data.source={DATA}", f"data.path={options.work.resolve() / 'ml1m'}"]
    else:
        print("MovieLens-100K, which is small, in place of MovieLens-1M", file=sys.stderr)
        data = ["data=movielens_100k", f"data.path={options.work.resolve() / 'ml100k'}"]
    ensure_prepared(load(RunConfig, "train", data).data)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=600))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for batch_size in options.batch_sizes if not run.quick else options.batch_sizes[:2]:
                measure(run, batch_size, data, Path(folder))
                print(f"batch {batch_size}: {run.rows[-1 - len(STEP_PHASES)].ratio:.2f} of the compute bound", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
