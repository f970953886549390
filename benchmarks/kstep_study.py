"""Does training with merged replicas lose accuracy? Test AUC and LogLoss of k-step training against synchronous training.

    python -m benchmarks.kstep_study --data movielens_1m --seeds 9 --k 20 --work runs/kstep_study

Replicas live in one process and take turns: model, tables, optimizers and the merge of rows are the product's own (rows are merged
by `torchrec_kstep.merge`, in-process transport; tests show the same bits as between processes), only the mean of the few dense
parameters is taken here. Every method sees the same global batches in the same order and starts from the same weights; differences
are paired by seed. Learning rates are tuned on validation with seed 1, for each method by itself (`--tune`).

Methods: `sync_global`, `sync_row`: one replica with the whole global batch, Adam with global or row-wise bias correction.
`default`, `paper`: the recipes of `KStepAdam`. Every run is one line of `<work>/<data>.jsonl`, so a study can be interrupted.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from benchmarks._harness import ROOT
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import KStepConfig, RunConfig
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge_spec import RECIPES
from torchrec_kstep.metrics.ctr import CTRMetrics, CTRReport
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.optim import build_optimizer
from torchrec_kstep.optim.build_kstep import merge_spec
from torchrec_kstep.planner import make_plan
from torchrec_kstep.sharding import build_sharders, shard_task
from torchrec_kstep.sharding.tiered.state import kernels_of_model
from torchrec_kstep.types import Split
from torchrec_kstep.world import World

SYNC = ("sync_global", "sync_row")
METHODS = (*SYNC, *RECIPES)
RIVAL = {"default": "sync_row", "paper": "sync_global"}  # synchronous training with the same bias correction
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Task:
    """A data set with its settings.

    Attributes:
        overrides: of `train`.
        source: raw files below the data folder.
        batch_size: rows per replica and step.
        num_passes: passes over the training split; where synchronous training is best on validation.
        lr: start values for tuning, of each method's synchronous rival.
    """

    overrides: tuple[str, ...]
    source: str
    batch_size: int
    num_passes: int
    lr: dict[str, float]


MODEL = ("planner=tiered", "model=deepfm", "model.embedding_dim=16", "model.mlp=[64,32]", "train.eval_batch_size=16384")
TASKS = {
    "movielens_1m": Task((*MODEL, "data=movielens_1m"), "ml1m", 512, 3, {"sync_global": 5.7e-3, "sync_row": 8e-3}),
    "frappe": Task((*MODEL, "data=frappe"), "frappe/frappe_recon.parquet", 256, 3, {"sync_global": 22.6e-3, "sync_row": 32e-3}),
}


@dataclass(frozen=True)
class Run:
    """One training: which method, k, seed and learning rate."""

    method: str
    k: int
    seed: int
    lr: float

    @property
    def key(self) -> str:
        """Tells runs apart in the file of results."""
        return f"{self.method} k={self.k} seed={self.seed} lr={self.lr:.6g}"


@dataclass
class Replica:
    """A model with its optimizer."""

    dmp: DistributedModelParallel
    optimizer: KeyedOptimizer

    @property
    def dense(self) -> dict[str, torch.nn.Parameter]:
        """Dense parameters by name."""
        return {name: param for name, param in self.dmp.named_parameters() if param.numel()}

    def step(self, batch: object) -> None:
        """Takes one batch forward, back, and through the optimizer."""
        self.optimizer.zero_grad()
        loss, _ = self.dmp(batch)
        loss.backward()
        self.optimizer.step()


def make_replica(config: RunConfig, dataset: Dataset, kstep: KStepConfig, num_replicas: int) -> Replica:
    """Builds a replica as `train` does, on this process alone."""
    world = World()
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, dataset.schema, seed=config.train.seed, table_device=torch.device("meta"))
    task = CTRTask(model, num_replicas)
    sharders = build_sharders(config.planner, config.optim, config.tiers, 1, world, kstep, num_replicas)
    group = dist.GroupMember.WORLD
    assert group is not None
    plan = make_plan(task, config.planner, world, sharders, config.train.batch_size, group)
    dmp = shard_task(task, plan, sharders, world, torch.device("cpu"))
    for module in dmp.modules():
        assert not isinstance(module, DistributedDataParallel) or module.process_group.size() == 1
    return Replica(dmp, build_optimizer(dmp, config.optim))


def merge_dense(replicas: Sequence[Replica]) -> None:
    """Gives all replicas the mean of their dense parameters and moments."""
    for name, first in replicas[0].dense.items():
        for state in ("weight", *MOMENTS):
            parts = [_dense_state(replica, name, state) for replica in replicas]
            mean = torch.stack(parts).sum(dim=0) / len(parts)
            for part in parts:
                part.copy_(mean)
        assert torch.equal(first, replicas[-1].dense[name])


def _dense_state(replica: Replica, name: str, state: str) -> torch.Tensor:
    param = replica.dense[name]
    if state == "weight":
        return param.detach()
    value: torch.Tensor = next(entry[state] for key, entry in replica.optimizer.state.items() if key is param)
    return value


def batches(dataset: Dataset, config: RunConfig, rank: int, num_ranks: int, epoch: int) -> Iterator[object]:
    """Yields the share of one rank of every global batch of a pass."""
    order = BatchOrder(rank, num_ranks, config.train.batch_size, seed=config.train.seed, epoch=epoch, shuffle=True)
    return iter(dataset.batches("train", order))


def train(run: Run, task: Task, config: RunConfig, dataset: Dataset, num_replicas: int) -> dict[str, CTRReport]:
    """Trains and evaluates; returns reports by split."""
    num_trained = 1 if run.method in SYNC else num_replicas
    recipe = run.method if run.method in RECIPES else ("paper" if run.method == "sync_global" else "default")
    kstep = KStepConfig(k=run.k, recipe=recipe)
    factor = RECIPES[recipe].lr_factor(num_replicas) if num_trained > 1 else 1.0
    config = replace(
        config,
        train=replace(config.train, seed=run.seed, batch_size=task.batch_size * num_replicas // num_trained),
        optim=replace(config.optim, lr=run.lr * factor, embedding_lr=run.lr * factor),
    )
    replicas = [make_replica(config, dataset, kstep, num_trained) for _ in range(num_trained)]
    merger = None
    if num_trained > 1:
        groups = [[kernel.group for kernel in kernels_of_model(replica.dmp)] for replica in replicas]
        merger = InProcessMerger(groups, merge_spec(kstep))
        merge_dense(replicas)  # all start alike
    num_rounds = num_local_steps = 0

    def merge(is_full: bool) -> None:
        nonlocal num_rounds, num_local_steps
        if merger is not None and num_local_steps:
            merger.merge(num_rounds, num_local_steps, is_full)
            merge_dense(replicas)
            num_rounds, num_local_steps = num_rounds + 1, 0

    for epoch in range(task.num_passes):
        for replica in replicas:
            replica.dmp.train()
        shares = [batches(dataset, config, rank, num_trained, epoch) for rank in range(num_trained)]
        for parts in zip(*shares, strict=True):
            for replica, batch in zip(replicas, parts, strict=True):
                replica.step(batch)
            num_local_steps += 1
            if num_local_steps == run.k:
                merge(is_full=False)
        merge(is_full=True)
    return {split: evaluate(replicas[0], dataset, config, split) for split in ("validation", "test")}


def evaluate(replica: Replica, dataset: Dataset, config: RunConfig, split: Split) -> CTRReport:
    """Reports on a split."""
    metrics = CTRMetrics(device=torch.device("cpu"))
    replica.dmp.eval()
    with torch.no_grad(), closing(iter(dataset.batches(split, BatchOrder(0, 1, config.train.eval_batch_size)))) as stream:
        for batch in stream:
            metrics.update(replica.dmp(batch)[1], 0)
    return metrics.compute()


class Study:
    """Runs of one data set, each done once."""

    def __init__(self, name: str, work: Path, data: Path, num_replicas: int) -> None:
        """Prepares the set and reads what was done before."""
        self.task = TASKS[name]
        self.num_replicas = num_replicas
        self._path = work / f"{name}.jsonl"
        overrides = [*self.task.overrides, f"data.source={data / self.task.source}", f"data.path={work / 'prepared' / name}"]
        self._config = load(RunConfig, "train", overrides)
        ensure_prepared(self._config.data)
        self._dataset = open_dataset(self._config.data)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._done = {entry["key"]: entry for entry in map(json.loads, lines)}

    def result(self, run: Run) -> dict[str, float]:
        """Returns AUC and LogLoss by split, training only if need be."""
        if run.key not in self._done:
            begin = time.perf_counter()
            reports = train(run, self.task, self._config, self._dataset, self.num_replicas)
            entry = {"key": run.key, **asdict(run), "seconds": time.perf_counter() - begin}
            for split, report in reports.items():
                entry |= {f"{split}_auc": report.auc, f"{split}_logloss": report.logloss}
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self._done[run.key] = entry
            text = f"{run.key}: test AUC {entry['test_auc']:.5f}, LogLoss {entry['test_logloss']:.5f}, {entry['seconds']:.0f} s"
            print(text, file=sys.stderr, flush=True)
        return dict(self._done[run.key])

    def tuned_lr(self, method: str, k: int, is_tuned: bool) -> float:
        """Returns the learning rate with the best validation AUC of a grid around the start value."""
        start = self.task.lr[method if method in SYNC else RIVAL[method]]
        if not is_tuned:
            return start
        grid = [start / math.sqrt(2), start, start * math.sqrt(2)]
        return max(grid, key=lambda lr: self.result(Run(method, k, 1, lr))["validation_auc"])


def compare(study: Study, ks: Sequence[int], num_seeds: int, is_tuned: bool) -> str:
    """Runs all methods and returns a Markdown table of paired differences."""
    seeds = range(1, num_seeds + 1)
    rates = {method: study.tuned_lr(method, 1, is_tuned) for method in SYNC}
    sync = {method: [study.result(Run(method, 1, seed, rates[method])) for seed in seeds] for method in SYNC}
    lines = [
        "| method | k | lr | test AUC | LogLoss | d AUC same bias | d LogLoss same bias | d AUC best sync |",
        "|--|--|--|--|--|--|--|--|",
    ]
    best = max(SYNC, key=lambda method: statistics.mean(one["test_auc"] for one in sync[method]))
    for method in SYNC:
        lines.append(
            f"| {method} | - | {rates[method]:.2g} | {_mean(sync[method], 'test_auc')} | {_mean(sync[method], 'test_logloss')} | | | |"
        )
    for k in ks:
        for method in RECIPES:
            lr = study.tuned_lr(method, k, is_tuned and k == 20) if k == 20 else study.tuned_lr(method, 20, is_tuned)
            found = [study.result(Run(method, k, seed, lr)) for seed in seeds]
            rival = sync[RIVAL[method]]
            cells = [method, str(k), f"{lr:.2g}", _mean(found, "test_auc"), _mean(found, "test_logloss")]
            cells += [_paired(found, rival, "test_auc"), _paired(found, rival, "test_logloss"), _paired(found, sync[best], "test_auc")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(results: Sequence[dict[str, float]], name: str) -> str:
    return f"{statistics.mean(one[name] for one in results):.5f}"


def _paired(results: Sequence[dict[str, float]], rivals: Sequence[dict[str, float]], name: str) -> str:
    differences = [one[name] - other[name] for one, other in zip(results, rivals, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else float("nan")
    return f"{statistics.mean(differences):+.5f} ± {error:.5f}"


def main(argv: list[str] | None = None) -> int:
    """Runs the study of one data set and prints its table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kstep_study", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", choices=TASKS, default="movielens_1m")
    parser.add_argument("--source", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the raw sets")
    parser.add_argument("--work", type=Path, default=Path("runs/kstep_study"), help="results and prepared sets")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--k", type=int, nargs="+", default=[20])
    parser.add_argument("--tune", action="store_true", help="tune each method's learning rate on validation, seed 1")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=600))
    try:
        study = Study(options.data, work, options.source.resolve(), options.replicas)
        print(f"{options.data}, {options.replicas} replicas, {options.seeds} seeds; ± is the standard error of paired differences\n")
        print(compare(study, options.k, options.seeds, options.tune))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
