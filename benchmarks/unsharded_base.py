"""DeepFM in plain PyTorch over one table of all rows: what `train` computes with `planner=dense`, in less time at small batches.

    python -m benchmarks.unsharded_base --seeds 1 2 3 --rates 3e-3,2e-5 1e-3,2e-5 -- data=frappe data.source=FILE train.batch_size=32 ...

What a sharded step costs beside its arithmetic is most of a step of 32 rows, and a base of 32 rows is 63,000 steps on Frappe and
250,000 on MovieLens-1M. So bases are tuned here. Initial weights, loss, Adam and scaling are the product's own; the gradient is written
out, and rows come in another random order. `optim.clip=cowclip` clips the gradient of the whole table by `torchrec_kstep.cow_clip`: the
paper's algorithm, every row decaying. Sets with one id per feature and no dense columns only. Prints one line per epoch, and last the
test values at the epoch with the best validation AUC; with `--json` these lines are also appended to a file.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import OptimConfig, RunConfig
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.metrics.ctr import CTRReport, report
from torchrec_kstep.models import build_model
from torchrec_kstep.models.deepfm import DeepFM, pairwise_sum
from torchrec_kstep.optim import LrSchedule
from torchrec_kstep.optim.cowclip import cow_clip
from torchrec_kstep.optim.scaling import describe, scale_optim
from torchrec_kstep.optim.schedule import IS_TABLE
from torchrec_kstep.optim_spec import CowClip
from torchrec_kstep.types import SPLITS, Split


@dataclass(frozen=True)
class Rows:
    """A split in memory: `rows` `[N, F]` int64 into the stacked tables, `label` `[N]`."""

    rows: torch.Tensor
    label: torch.Tensor

    @classmethod
    def read(cls, dataset: Dataset, split: Split, first_row: torch.Tensor) -> "Rows":
        """Reads a split; `first_row` `[F]` is where the table of each feature begins."""
        rows, labels = [], []
        for batch in dataset.batches(split, BatchOrder(batch_size=65_536)):
            assert batch.sparse.values().numel() == len(first_row) * batch.sparse.stride(), "a bag without or with several ids"
            rows.append((batch.sparse.values().view(len(first_row), -1) + first_row[:, None]).t())
            labels.append(batch.label)
        return cls(torch.cat(rows), torch.cat(labels))


class StackedDeepFM:
    """A DeepFM whose tables lie one below the other, with its gradient written out: autograd is half the time of a small step.

    Attributes:
        table: `[R, 1 + D]`, column 0 of a row is its first-order weight, the others its embedding.
        dense: all other weights, flat; `layers` are views of it, (weight, bias) from the first to the last.
        first_row: `[F]`, where the table of each feature begins.
    """

    def __init__(self, model: DeepFM) -> None:
        """Takes the weights of a model without dense columns."""
        bags, wide = model.embeddings.embedding_bags, model.first_order.wide.embedding_bags
        parts = [torch.cat([wide[f"wide_{name}"].weight[:, :1], bags[name].weight], dim=1).detach() for name in model.names]
        self.table = nn.Parameter(torch.cat(parts))
        self.first_row = torch.tensor([0, *[len(part) for part in parts[:-1]]]).cumsum(0)
        linears = [module for module in model.deep.modules() if isinstance(module, nn.Linear)]
        tensors = [param.detach() for linear in linears for param in (linear.weight, linear.bias)] + [model.first_order.bias.detach()]
        self.dense = nn.Parameter(torch.cat([tensor.flatten() for tensor in tensors]))
        self.table.grad, self.dense.grad = torch.zeros_like(self.table), torch.zeros_like(self.dense)
        shapes = [tensor.shape for tensor in tensors]
        *self.layers, (self.bias,) = _pairs(_views(self.dense.data, shapes))
        *self._layer_grads, (self._bias_grad,) = _pairs(_views(self.dense.grad, shapes))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[B]` for rows `[B, F]`."""
        return self._forward(rows)[0]

    def backward(self, rows: torch.Tensor, label: torch.Tensor) -> None:
        """Fills `table.grad` and `dense.grad` with the gradient of the mean loss over a batch, `[B, F]` and `[B]`."""
        logit, fields, hidden = self._forward(rows)
        error = ((logit.sigmoid() - label) / len(label))[:, None]
        upstream = error
        for (weight, _), (weight_grad, bias_grad), below in reversed(list(zip(self.layers, self._layer_grads, hidden, strict=True))):
            torch.mm(upstream.t(), below, out=weight_grad)
            torch.sum(upstream, 0, out=bias_grad)
            upstream = upstream @ weight
            if below is not hidden[0]:
                upstream.mul_(below > 0)
        torch.sum(error, 0, out=self._bias_grad)
        pairs = fields.sum(dim=1, keepdim=True) - fields  # gradient of the sum over pairs
        grad = torch.cat(
            [error.expand(rows.shape)[:, :, None], torch.addcmul(upstream.view(fields.shape), error[:, :, None], pairs)], dim=2
        )
        assert self.table.grad is not None, "it is made with the table"
        self.table.grad.zero_().index_add_(0, rows.reshape(-1), grad.view(-1, grad.shape[2]))

    def _forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Returns logits, embeddings `[B, F, D]`, and what goes into each layer."""
        found = self.table.data.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)
        fields = found[:, :, 1:]
        hidden = [fields.reshape(len(rows), -1)]
        for weight, bias in self.layers[:-1]:
            hidden.append(torch.addmm(bias, hidden[-1], weight.t()).relu_())
        weight, bias = self.layers[-1]
        deep = torch.addmm(bias, hidden[-1], weight.t())[:, 0]
        return found[:, :, 0].sum(dim=1) + self.bias + pairwise_sum(fields) + deep, fields, hidden


def _views(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Cuts a flat tensor into views of these shapes."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _pairs(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Groups (weight, bias), (weight, bias), ..., (last,)."""
    return [tuple(tensors[begin : begin + 2]) for begin in range(0, len(tensors), 2)]


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
    auc: float
    logloss: float
    seconds: float


def shuffled(data: Rows, seed: int, epoch: int) -> Rows:
    """The rows of an epoch in their order."""
    order = torch.randperm(len(data.label), generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    return Rows(data.rows[order], data.label[order])


def evaluate(model: StackedDeepFM, data: Rows) -> CTRReport:
    """Reports on all rows of a split."""
    logits = torch.cat([model.logits(rows) for rows in data.rows.split(65_536)])
    return report(logits.numpy(), data.label.to(torch.uint8).numpy())


def optimizer_of(model: StackedDeepFM, optim: OptimConfig) -> torch.optim.Optimizer:
    """Adam with the table's own rate and L2; a clip needs the L2 in the gradient, so there it is added before."""
    l2 = 0.0 if optim.clip == "cowclip" else optim.embedding_l2
    groups = [
        {"params": [model.dense], "lr": optim.lr, "weight_decay": optim.weight_decay},
        {"params": [model.table], "lr": optim.embedding_lr, "weight_decay": l2, IS_TABLE: True},
    ]
    return torch.optim.Adam(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def clip_table(model: StackedDeepFM, rows: torch.Tensor, optim: OptimConfig) -> None:
    """L2, then CowClip over the embedding columns; first-order weights are exempt."""
    grad, weight = model.table.grad, model.table.data
    assert grad is not None, "a step without a gradient"
    grad.add_(weight, alpha=optim.embedding_l2)
    counts = torch.bincount(rows.flatten(), minlength=len(grad))
    grad[:, 1:] = cow_clip(weight[:, 1:], grad[:, 1:], counts, CowClip(optim.clip_ratio, optim.clip_zeta))


@torch.no_grad()
def train(config: RunConfig, dataset: Dataset, overrides: str) -> Outcome:
    """Trains all epochs and tests the best."""
    given, seed, size = config.optim, config.train.seed, config.train.batch_size
    num_epoch_steps = BatchOrder(batch_size=size).num_steps(dataset.num_rows("train"))
    optim = scale_optim(given, size, num_epoch_steps)
    if given.scaling != "none":
        print(describe(given, optim, size))
    built = build_model(config.model, dataset.schema, seed=seed)
    assert isinstance(built, DeepFM), "made for model=deepfm"
    assert not built.num_dense, "made for sets without dense columns"
    model = StackedDeepFM(built)
    data = {split: Rows.read(dataset, split, model.first_row) for split in SPLITS}
    optimizer = optimizer_of(model, optim)
    schedule = LrSchedule(optimizer, optim, num_epoch_steps * config.train.epochs)
    best: tuple[float, int, CTRReport] | None = None
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
        assert found.auc is not None, found.undefined
        if best is None or found.auc > best[0]:
            best = found.auc, epoch + 1, evaluate(model, data["test"])
    assert best is not None, "no epoch"
    assert best[2].auc is not None, best[2].undefined
    assert best[2].logloss is not None, best[2].undefined
    seconds = round(time.perf_counter() - begin_s, 1)
    return Outcome(overrides, seed, given.embedding_lr, given.embedding_l2, step, best[1], best[0], best[2].auc, best[2].logloss, seconds)


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
