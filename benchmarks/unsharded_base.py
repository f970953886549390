"""Models in plain PyTorch over one table of all rows: what `train` computes with `planner=dense`, in less time at small batches.

    python -m benchmarks.unsharded_base --seeds 1 2 3 --rates 3e-3,2e-5 1e-3,2e-5 -- data=frappe data.source=FILE train.batch_size=32 ...

What a sharded step costs beside its arithmetic is most of a step of 32 rows, and a base of 32 rows is 63,000 steps on Frappe and
250,000 on MovieLens-1M. So bases are tuned here. Initial weights, loss, Adam and scaling are the product's own; DeepFM's gradient is
written out, and rows come in another random order. `optim.clip=cowclip` clips the gradient of the whole table by
`torchrec_kstep.cow_clip`: the paper's algorithm. Every row decays in every step, whatever `optim.l2_absent_rows` says. Sets without
dense columns only. Prints one line per epoch, and last the test values at the epoch with the best validation AUC;
with `--json` these lines are also appended to a file.
"""

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.unsharded_model import Rows, Stacked, read_splits, stacked
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import OptimConfig, RunConfig
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.metrics.ctr import CTRReport, report
from torchrec_kstep.models import build_model
from torchrec_kstep.optim import LrSchedule
from torchrec_kstep.optim.cowclip import cow_clip
from torchrec_kstep.optim.scaling import describe, scale_optim
from torchrec_kstep.optim.schedule import IS_TABLE
from torchrec_kstep.optim_spec import CowClip


@dataclass(frozen=True)
class Outcome:
    """What a run ended with: test values at the epoch with the best validation AUC."""

    overrides: str
    seed: int
    embedding_lr: float
    embedding_l2: float
    num_steps: int
    best_epoch: int
    validation_auc: float
    validation_logloss: float
    auc: float
    logloss: float
    seconds: float


def shuffled(data: Rows, seed: int, epoch: int) -> Rows:
    """The rows of an epoch in their order."""
    order = torch.randperm(len(data.label), generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    return Rows(data.rows[order], data.label[order])


def evaluate(model: Stacked, data: Rows) -> CTRReport:
    """Reports on all rows of a split."""
    logits = torch.cat([model.logits(rows) for rows in data.rows.split(65_536)])
    return report(logits.numpy(), data.label.to(torch.uint8).numpy())


def optimizer_of(model: Stacked, optim: OptimConfig) -> torch.optim.Optimizer:
    """Adam with the table's own rate and L2; a clip needs the L2 in the gradient, so there it is added before."""
    l2 = 0.0 if optim.clip == "cowclip" else optim.embedding_l2
    groups = [
        {"params": [model.dense], "lr": optim.lr, "weight_decay": optim.weight_decay},
        {"params": [model.table], "lr": optim.embedding_lr, "weight_decay": l2, IS_TABLE: True},
    ]
    return torch.optim.Adam(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def clip_table(model: Stacked, rows: torch.Tensor, optim: OptimConfig) -> None:
    """L2, then CowClip over the embedding columns; first-order weights are exempt."""
    wide = model.num_wide
    grad, weight = model.table.grad, model.table.data
    assert grad is not None, "a step without a gradient"
    grad.add_(weight, alpha=optim.embedding_l2)
    counts = torch.bincount(rows.flatten(), minlength=len(grad))
    grad[:, wide:] = cow_clip(weight[:, wide:], grad[:, wide:], counts, CowClip(optim.clip_ratio, optim.clip_zeta))


@torch.no_grad()
def train(config: RunConfig, dataset: Dataset, overrides: str) -> Outcome:
    """Trains all epochs and tests the best."""
    given, seed, size = config.optim, config.train.seed, config.train.batch_size
    num_epoch_steps = BatchOrder(batch_size=size).num_steps(dataset.num_rows("train"))
    num_steps = num_epoch_steps * config.train.epochs
    optim = scale_optim(given, size, num_epoch_steps, num_steps)
    if given.scaling != "none":
        print(describe(given, optim, size))
    model = stacked(build_model(config.model, dataset.schema, seed=seed))
    assert config.model.pooling == "sum", "made for sums of bags"
    data, model.feature_of_column = read_splits(dataset, model.first_row, len(model.table) - 1)
    optimizer = optimizer_of(model, optim)
    schedule = LrSchedule(optimizer, optim, num_steps)
    best: tuple[int, CTRReport, CTRReport] | None = None
    begin_s, step = time.perf_counter(), 0
    for epoch in range(config.train.epochs):
        inputs = shuffled(data["train"], seed, epoch)
        for rows, label in zip(inputs.rows.split(size), inputs.label.split(size), strict=True):
            schedule.apply(step)
            model.backward(rows, label)
            if optim.clip == "cowclip":
                clip_table(model, rows, optim)
            optimizer.step()
            step += 1
        found = evaluate(model, data["validation"])
        print(f"seed {seed} epoch {epoch + 1} step {step} validation {found}", flush=True)
        if best is None or _values(found) > _values(best[1]):
            best = epoch + 1, found, evaluate(model, data["test"])
    assert best is not None, "no epoch"
    seconds = round(time.perf_counter() - begin_s, 1)
    rates = given.embedding_lr, given.embedding_l2
    return Outcome(overrides, seed, *rates, step, best[0], *_values(best[1]), *_values(best[2]), seconds)


def _values(found: CTRReport) -> tuple[float, float]:
    """AUC and LogLoss."""
    assert found.auc is not None, found.undefined
    assert found.logloss is not None, found.undefined
    return found.auc, found.logloss


def main(argv: list[str] | None = None) -> int:
    """Trains every pair of rate and L2 with every seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unsharded_base", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="values of train.seed")
    parser.add_argument(
        "--rates", nargs="*", default=[], metavar="LR,L2", help="optim.embedding_lr and optim.embedding_l2; default: those given"
    )
    parser.add_argument("--json", type=Path, help="a line is appended for each run; runs that it holds are not run again")
    parser.add_argument("overrides", nargs="*", help="as for train")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    base = load(RunConfig, "train", options.overrides)
    ensure_prepared(base.data)
    dataset = open_dataset(base.data)
    text = " ".join(options.overrides)
    done = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json and options.json.exists() else []
    rates = [tuple(map(float, pair.split(","))) for pair in options.rates] or [(base.optim.embedding_lr, base.optim.embedding_l2)]
    for seed, (lr, l2) in itertools.product(options.seeds, rates):
        if any((run["overrides"], run["seed"], run["embedding_lr"], run["embedding_l2"]) == (text, seed, lr, l2) for run in done):
            continue
        optim = replace(base.optim, embedding_lr=lr, embedding_l2=l2)
        outcome = train(replace(base, optim=optim, train=replace(base.train, seed=seed)), dataset, text)
        print(outcome, flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
