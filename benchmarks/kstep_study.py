"""Does training with merged replicas lose accuracy? Test AUC and LogLoss of k-step training against synchronous training.

    python -m benchmarks.kstep_study --work runs/kstep_study                       the whole study
    python -m benchmarks.kstep_study --stages k by_user --seeds 1                  parts of it
    python -m benchmarks.kstep_study --stages variants --methods "default, frozen" --seeds 3

Replicas live in one process and take turns (`kstep_replicas`). Every method sees the same global batches in the same order and
starts from the same weights; differences are paired by seed. Learning rates were chosen on validation with seed 1, for each method
at k = 20; `--tune` chooses them anew, for every k, among steps of the root of two around these (where the best one is at an end,
the next step is tried too).

Synchronous training is one replica with the whole global batch, Adam with global (`sync_global`) or row-wise (`sync_row`) bias
correction; each method is compared with that of its own bias correction and with the better of the two. k = 1 is synchronous
training, so its rows are those of the synchronous runs.

Every run is one line of `<work>/<data>.jsonl`, so the study can be interrupted and divided among processes, and `study.md` and the
plots there are written anew after each stage.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._harness import ROOT
from benchmarks.kstep_replicas import Replica, Replicas
from benchmarks.kstep_rows import Rows, Step, add_cross, owners, read_rows, shuffled, shuffled_by_owner
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import KStepConfig, RunConfig
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.merge_spec import RECIPES
from torchrec_kstep.metrics.ctr import CTRMetrics, CTRReport
from torchrec_kstep.report.chart import Series, chart_file
from torchrec_kstep.types import Split

SYNC = {"global": "sync_global", "row": "sync_row"}
NUM_TUNING_STEPS = 4  # at most so many rates are tried beyond the first three
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}  # Student's t, 95 %, by number of seeds


@dataclass(frozen=True)
class Method:
    """A way to merge.

    Attributes:
        recipe: its base.
        settings: keys of `KStepConfig` that differ from the recipe.
        falls: whether the last third of all steps has half of k.
    """

    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    falls: bool = False

    def config(self, k: int, num_steps: int = 0) -> KStepConfig:
        """Returns the configuration of a run of `num_steps` steps."""
        stages = [f"{2 * num_steps // 3}:{k // 2}"] if self.falls else []
        return KStepConfig(k=k, recipe=self.recipe, stages=stages, **self.settings)

    @property
    def bias(self) -> str:
        """Bias correction of the tables' Adam."""
        return str(self.settings.get("bias_correction", RECIPES[self.recipe].bias_correction))

    def lr_factor(self, num_replicas: int) -> float:
        """Factor on the rate of synchronous training."""
        return float(self.settings.get("lr_factor", 0) or RECIPES[self.recipe].lr_factor(num_replicas))


METHODS = {
    "sync_global": Method("paper"),
    "sync_row": Method("default"),
    "default": Method("default"),
    "paper": Method("paper"),
    "default, bf16": Method("default", {"wire": "bf16"}),
    "default, half of k in the last third": Method("default", falls=True),
    "default, int8": Method("default", {"wire": "int8"}),
    "default, moments of rows local": Method("default", {"row_states": "weights"}),
    "default, m every 3, v every 6 rounds": Method("default", {"m_period_rounds": 3, "v_period_rounds": 6}),
    "default, v every 3, m every 6 rounds": Method("default", {"m_period_rounds": 6, "v_period_rounds": 3}),
    "default, m and v every 3 rounds": Method("default", {"m_period_rounds": 3, "v_period_rounds": 3}),
    "default, moments=delta": Method("default", {"moments": "delta"}),
    "default, global bias": Method("default", {"bias_correction": "global"}),
    "default, frozen": Method("default", {"variant": "frozen"}),
    "default, row_merge=touched": Method("default", {"row_merge": "touched"}),
    "paper, row-wise bias": Method("paper", {"bias_correction": "row"}),
    "paper, moments of rows local": Method("paper", {"row_states": "weights"}),
    "paper, frozen": Method("paper", {"variant": "frozen"}),
    "paper, frozen, amsgrad": Method("paper", {"variant": "frozen", "is_amsgrad": True}),
    "paper, bf16": Method("paper", {"wire": "bf16"}),
}
FALLING = ("default", "default, half of k in the last third")
VARIANTS = tuple(name for name in METHODS if "," in name and not any(word in name for word in ("bf16", "int8", "every", "half")))


@dataclass(frozen=True)
class Task:
    """A data set with its model and settings.

    Attributes:
        overrides: of `train`.
        source: raw files below the data folder.
        batch_size: rows per replica and step.
        num_passes: passes over the training split.
        lr: best rates found, by method; others have that of their recipe, or of synchronous training with their bias correction.
        crosses: columns added, by name: the columns they combine.
        owner: column whose values belong to one replica each; "" = rows are shared out at random.
        table_lr: factor on the rate for tables.
    """

    overrides: tuple[str, ...]
    source: str
    batch_size: int
    num_passes: int
    lr: dict[str, float]
    crosses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    owner: str = ""
    table_lr: float = 1.0


COMMON = ("planner=tiered", "model.embedding_dim=16", "model.mlp=[64,32]", "train.eval_batch_size=16384")
CLIP = ("optim.clip=cowclip", "optim.clip_zeta=1e-4")
SSD = ("tiers=dram_ssd", "tiers.dram_bytes=384KiB", "tiers.segment_bytes=1MiB")  # a cache of a fifth to a third of the rows
ML1M = Task((*COMMON, "model=deepfm", "data=movielens_1m"), "ml1m", 512, 3, {"sync_global": 5.7e-3, "sync_row": 8e-3})
TASKS = {
    "ml1m": ML1M,
    "frappe": Task(
        (*COMMON, "model=deepfm", "data=frappe"),
        "frappe/frappe_recon.parquet",
        256,
        3,
        {"sync_global": 22.6e-3, "sync_row": 32e-3, "paper": 32e-3},
    ),
    "ml1m_by_user": replace(ML1M, owner="user"),
    "ml1m_dlrm": replace(ML1M, overrides=(*COMMON, "model=dlrm", "data=movielens_1m")),
    "ml1m_crosses": replace(
        ML1M,
        num_passes=1,  # more passes over its many rare rows lose on validation
        crosses={
            "user_genre": ("user", "genres"),
            "user_decade": ("user", "year/10"),
            "item_gender_age": ("item", "gender", "age"),
            "item_occupation": ("item", "occupation"),
        },
        lr={"sync_global": 4e-3, "sync_row": 8e-3},
    ),
}
# 4,096 rows per step by CowClip's rule (docs/large_batch.md): L2 128 times, and the dense rate 11.3 times, that of 32 rows.
LARGE_BATCH = {
    "frappe": Task(
        (*COMMON, "model=deepfm", "data=frappe", "optim.embedding_l2=6.4e-5", "optim.eps=1e-7"),
        "frappe/frappe_recon.parquet",
        1024,
        10,
        {"sync_global": 11.3e-3, "sync_row": 11.3e-3},
        table_lr=20 / 11.3,
    ),
    "ml1m": Task(
        (*COMMON, "model=deepfm", "data=movielens_1m", "optim.embedding_l2=6.144e-5", "optim.eps=1e-7"),
        "ml1m",
        1024,
        10,
        {"sync_global": 11.3e-3, "sync_row": 11.3e-3},
        table_lr=3 / 11.3,
    ),
}
TASKS |= {
    f"{data}_{name}": replace(task, overrides=(*task.overrides, *overrides))
    for data, task in LARGE_BATCH.items()
    for name, overrides in {"no_clip": (), "cowclip": CLIP, "cowclip_ssd": (*CLIP, *SSD)}.items()
}


@dataclass(frozen=True)
class Stage:
    """A part of the study: a table.

    Attributes:
        title: of the table.
        task: key of `TASKS`.
        methods: keys of `METHODS`.
        ks: values of k.
        num_seeds: seeds 1, 2, ...
    """

    title: str
    task: str
    methods: tuple[str, ...]
    ks: tuple[int, ...] = (20,)
    num_seeds: int = 3

    def only(self, methods: Sequence[str] | None) -> "Stage":
        """Returns the part with some of the methods; None = all."""
        return self if methods is None else replace(self, methods=tuple(name for name in self.methods if name in methods))


STAGES = {
    "k": Stage("MovieLens-1M, DeepFM, over k", "ml1m", ("default", "paper"), (5, 20, 50, 100)),
    "frappe": Stage("Frappe, DeepFM", "frappe", ("default", "paper"), num_seeds=9),
    "ml1m": Stage("MovieLens-1M, DeepFM, nine seeds", "ml1m", ("default", "paper"), num_seeds=9),
    "by_user": Stage("MovieLens-1M, every user on one replica", "ml1m_by_user", ("default", "paper")),
    "wires": Stage("Frappe, narrow wires", "frappe", ("default", "default, bf16", "default, int8", "paper, bf16")),
    "variants": Stage("Frappe, variants", "frappe", ("default", "paper", *VARIANTS)),
    "periods": Stage("Frappe, periods of the moments", "frappe", ("default", *(name for name in METHODS if "every" in name))),
    "dlrm": Stage("MovieLens-1M, DLRM", "ml1m_dlrm", ("default", "default, frozen", "paper"), (5, 20)),
    "long_tail": Stage(
        "MovieLens-1M with crosses, DeepFM",
        "ml1m_crosses",
        ("default", "default, moments of rows local", "default, int8", "paper"),
        (5, 20),
    ),
    "ml1m_wires": Stage("MovieLens-1M, narrow wires", "ml1m", ("default", "default, bf16", "default, int8")),
    "ml1m_variants": Stage("MovieLens-1M, variants", "ml1m", ("default", "paper", *VARIANTS), num_seeds=1),
    "cowclip": Stage("Frappe, CowClip at 4,096 rows per step", "frappe_cowclip", ("default", "paper"), (5, 20)),
    "cowclip_ssd": Stage("Frappe, CowClip at 4,096 rows per step, tables on SSD", "frappe_cowclip_ssd", ("default", "paper")),
    "no_clip": Stage("Frappe, 4,096 rows per step by CowClip's rule without its clip", "frappe_no_clip", ("default", "paper")),
    "ml1m_cowclip": Stage("MovieLens-1M, CowClip at 4,096 rows per step", "ml1m_cowclip", ("default", "paper")),
    "ml1m_cowclip_ssd": Stage("MovieLens-1M, CowClip at 4,096 rows per step, tables on SSD", "ml1m_cowclip_ssd", ("default", "paper")),
    "ml1m_no_clip": Stage("MovieLens-1M, 4,096 rows per step by CowClip's rule without its clip", "ml1m_no_clip", ("default", "paper")),
    "falling": Stage("Frappe, a smaller k at the end", "frappe", FALLING, num_seeds=9),
    "ml1m_falling": Stage("MovieLens-1M, a smaller k at the end", "ml1m", FALLING),
    "frappe_k": Stage("Frappe, DeepFM, over k", "frappe", ("default", "paper"), (5, 10, 20, 50, 100)),
}


@dataclass(frozen=True)
class Run:
    """One training: which method, k, seed and learning rate (that of synchronous training; recipes put a factor on it)."""

    method: str
    k: int
    seed: int
    lr: float

    @property
    def key(self) -> str:
        """Tells runs apart in the file of results."""
        return f"{self.method} k={self.k} seed={self.seed} lr={self.lr:.6g}"


def train(run: Run, task: Task, config: RunConfig, rows: Mapping[Split, Rows], num_replicas: int) -> dict[str, CTRReport]:
    """Trains and evaluates; returns reports by split."""
    method, is_sync = METHODS[run.method], run.method in SYNC.values()
    num_trained = 1 if is_sync else num_replicas
    lr = run.lr * (1.0 if is_sync else method.lr_factor(num_replicas))
    config = replace(
        config,
        train=replace(config.train, seed=run.seed, batch_size=task.batch_size * num_replicas // num_trained),
        optim=replace(config.optim, lr=lr, embedding_lr=lr * task.table_lr),
    )
    num_steps = task.num_passes * sum(1 for _ in steps(task, rows["train"], num_replicas, run.seed, epoch=0))
    with tempfile.TemporaryDirectory(prefix="kstep-study-") as folder:  # rows on SSD are needed no longer than the run
        replicas = Replicas(config, rows["train"].schema, method.config(run.k, num_steps), num_trained, Path(folder))
        return _train(replicas, run, task, config, rows, num_replicas)


def _train(
    replicas: Replicas, run: Run, task: Task, config: RunConfig, rows: Mapping[Split, Rows], num_replicas: int
) -> dict[str, CTRReport]:
    """Trains replicas, or one that takes their shares together, and evaluates."""
    for epoch in range(task.num_passes):
        for replica in replicas.members:
            replica.dmp.train()
        for step in steps(task, rows["train"], num_replicas, run.seed, epoch):
            shares = step if len(replicas.members) > 1 else [np.concatenate(step)]
            num_rows = sum(map(len, step))
            replicas.step([rows["train"].batch(share, num_rows) for share in shares])
        replicas.merge()
    return {split: evaluate(replicas.members[0], rows[split], config.train.eval_batch_size) for split in ("validation", "test")}


def steps(task: Task, rows: Rows, num_replicas: int, seed: int, epoch: int) -> Iterator[Step]:
    """Yields the rows of every step of a pass, by replica."""
    if not task.owner:
        return shuffled(len(rows.label), num_replicas, task.batch_size, seed, epoch)
    return shuffled_by_owner(owners(rows.columns[task.owner].ids, num_replicas), num_replicas, task.batch_size, seed, epoch)


def evaluate(replica: Replica, rows: Rows, batch_size: int) -> CTRReport:
    """Reports on a split."""
    metrics = CTRMetrics(device=torch.device("cpu"))
    replica.dmp.eval()
    with torch.no_grad():
        for batch in rows.batches(batch_size):
            metrics.update(replica.dmp(batch)[1], 0)
    return metrics.compute()


class Results:
    """Runs of one task, each done once."""

    def __init__(self, name: str, work: Path, source: Path, num_replicas: int) -> None:
        """Reads what was done before; the data only when a run is missing."""
        self._task, self._work, self._source, self._num_replicas = TASKS[name], work, source, num_replicas
        self._path = work / f"{name}.jsonl"
        self._done: dict[str, dict[str, float]] = {}
        self._read()
        self._loaded: tuple[RunConfig, dict[Split, Rows]] | None = None

    def result(self, run: Run) -> dict[str, float]:
        """Returns AUC and LogLoss by split, training only if need be."""
        if run.key not in self._done:
            self._read()  # another process may have done it
        if run.key not in self._done:
            config, rows = self._load()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            reports = train(run, self._task, config, rows, self._num_replicas)
            spent = {"seconds": time.perf_counter() - begin_s, "cpu_seconds": time.process_time() - begin_cpu_s}
            entry: dict[str, Any] = {"key": run.key, **asdict(run), **spent}
            for split, report in reports.items():
                entry |= {f"{split}_auc": report.auc, f"{split}_logloss": report.logloss}
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self._done[run.key] = entry
            text = f"{self._path.stem}, {run.key}: test AUC {entry['test_auc']:.5f}, LogLoss {entry['test_logloss']:.5f}"
            print(f"{text}, {spent['seconds']:.0f} s, of which on the processor {spent['cpu_seconds']:.0f}", file=sys.stderr, flush=True)
        return dict(self._done[run.key])

    def lr(self, method: str, k: int, is_tuned: bool) -> float:
        """Returns the rate known to be best, or the one with the best validation AUC around it."""
        rates, recipe, bias = self._task.lr, METHODS[method].recipe, METHODS[method].bias
        of_bias = rates[SYNC[bias]]
        start = rates.get(method, rates.get(recipe, of_bias) if bias == RECIPES[recipe].bias_correction else of_bias)
        if not is_tuned:
            return start
        return climb(lambda place: self.result(Run(method, k, 1, rate(start, place)))["validation_auc"], start)

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all runs so far."""
        return sum(entry["cpu_seconds"] for entry in self._done.values())

    def _read(self) -> None:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._done |= {entry["key"]: entry for entry in map(json.loads, lines)}

    def _load(self) -> tuple[RunConfig, dict[Split, Rows]]:
        if self._loaded is None:
            task = self._task
            overrides = [*task.overrides, f"data.source={self._source / task.source}"]
            config = load(RunConfig, "train", [*overrides, f"data.path={self._work / 'prepared' / task.source.split('/')[0]}"])
            ensure_prepared(config.data)
            rows = read_rows(open_dataset(config.data))
            for name, parts in task.crosses.items():
                rows = add_cross(rows, name, parts)
            self._loaded = (config, rows)
        return self._loaded


def rate(start: float, place: int) -> float:
    """Returns the learning rate `place` half doublings above `start`."""
    return float(f"{start * 2 ** (place / 2):.6g}")


def climb(score: Callable[[int], float], start: float) -> float:
    """Returns the best rate of three around `start`; goes on in its direction where it lies at an end."""
    scores = {place: score(place) for place in (-1, 0, 1)}
    for _ in range(NUM_TUNING_STEPS):
        best = max(scores, key=scores.__getitem__)
        if min(scores) < best < max(scores):
            break
        place = best + (1 if best == max(scores) else -1)
        scores[place] = score(place)
    return rate(start, max(scores, key=scores.__getitem__))


@dataclass(frozen=True)
class Line:
    """A method at one k beside synchronous training.

    Attributes:
        lr: its rate, the recipe's factor left out.
        found: results by seed.
        rival: synchronous results with the same bias correction, by seed; empty for synchronous training itself.
        best: those of the better synchronous training.
    """

    method: str
    k: int
    lr: float
    found: list[dict[str, float]]
    rival: list[dict[str, float]] = field(default_factory=list)
    best: list[dict[str, float]] = field(default_factory=list)

    def difference(self, name: str, of: Sequence[dict[str, float]]) -> tuple[float, float]:
        """Returns the mean difference and its standard error (NaN for one seed)."""
        differences = [one[name] - other[name] for one, other in zip(self.found, of, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        return statistics.mean(differences), error


def compare(results: Results, stage: Stage, num_seeds: int, is_tuned: bool) -> list[Line]:
    """Runs a stage."""
    seeds = range(1, num_seeds + 1)
    sync = {}
    for bias, method in SYNC.items():
        lr = results.lr(method, 1, is_tuned)
        sync[bias] = Line(method, 1, lr, [results.result(Run(method, 1, seed, lr)) for seed in seeds])
    best = max(sync.values(), key=lambda line: statistics.mean(one["test_auc"] for one in line.found))
    lines = list(sync.values())
    for k in stage.ks:
        for method in stage.methods:
            lr = results.lr(method, k, is_tuned)
            found = [results.result(Run(method, k, seed, lr)) for seed in seeds]
            lines.append(Line(method, k, lr, found, sync[METHODS[method].bias].found, best.found))
    return lines


HEADER = (
    "| method | k | seeds | lr | test AUC | LogLoss | d AUC, same bias | d LogLoss, same bias | d AUC, best synchronous |\n"
    "|--|--|--|--|--|--|--|--|--|"
)


def table(title: str, lines: Sequence[Line], num_replicas: int) -> str:
    """Returns a Markdown table; ± one standard error."""
    text = [f"**{title}**", "", HEADER]
    for line in lines:
        factor = METHODS[line.method].lr_factor(num_replicas) if line.rival else 1.0
        cells = [line.method, str(line.k), str(len(line.found)), f"{line.lr:.2g}" + (f" x {factor:g}" if factor != 1 else "")]
        cells += [f"{statistics.mean(one[name] for one in line.found):.5f}" for name in ("test_auc", "test_logloss")]
        if line.rival:
            pairs = (("test_auc", line.rival), ("test_logloss", line.rival), ("test_auc", line.best))
            cells += [_with_error(*line.difference(*pair)) for pair in pairs]
        else:
            cells += [""] * 3
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def _with_error(mean: float, error: float) -> str:
    return f"{mean:+.5f}" + ("" if math.isnan(error) else f" ± {error:.5f}")


def plot(title: str, lines: Sequence[Line]) -> str:
    """Draws the difference of test AUC over k, with bars of 95 % confidence (Student's t)."""
    ks = sorted({line.k for line in lines if line.rival})
    series = []
    for colour, method in enumerate(dict.fromkeys(line.method for line in lines if line.rival)):
        aside = 0.04 * colour  # so that bars do not cover each other
        points, halves = [(aside, 0.0)], [0.0]  # k = 1 is synchronous training
        for line in lines:
            if line.method == method and line.rival:
                mean, error = line.difference("test_auc", line.rival)
                points.append((1 + ks.index(line.k) + aside, mean))
                halves.append(0.0 if math.isnan(error) else T_95[min(len(line.found), max(T_95))] * error)
        series.append(Series(f"{method}: mean, 95 % confidence", colour, points, halves))
    return chart_file(title, series, "k, steps between rounds", x_names=["1", *map(str, ks)])


def main(argv: list[str] | None = None) -> int:
    """Runs stages and prints their tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kstep_study", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stages", choices=STAGES, nargs="+", default=list(STAGES))
    parser.add_argument("--source", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the raw sets")
    parser.add_argument("--work", type=Path, default=Path("runs/kstep_study"), help="results and prepared sets")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=0, help="seeds of every stage; 0 = as each stage says")
    parser.add_argument("--methods", choices=METHODS, nargs="+", help="of those that a stage compares, these only")
    parser.add_argument("--tune", action="store_true", help="choose every learning rate on validation, seed 1")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=600))
    try:
        results = {name: Results(name, work, options.source.resolve(), options.replicas) for name in TASKS}
        tables: dict[str, str] = {}
        for name in options.stages:
            stage = STAGES[name].only(options.methods)
            lines = compare(results[stage.task], stage, options.seeds or stage.num_seeds, options.tune)
            tables[name] = table(stage.title, lines, options.replicas)
            print(tables[name], flush=True)
            (work / f"{name}.md").write_text(tables[name])
            if len(stage.ks) > 1:
                (work / f"{name}.svg").write_text(plot(f"{stage.title}: test AUC minus that of synchronous training", lines))
        spent = sum(one.cpu_seconds for one in results.values())
        note = (
            f"{options.replicas} replicas; ± one standard error of paired differences; {spent / 60:.0f} min of processor time in all runs."
        )
        (work / "study.md").write_text("\n".join([note, "", *tables.values()]))
        print(note)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
