"""Accuracy of the five models on real data: test AUC and LogLoss of whole runs of `python -m torchrec_kstep.train`.

Every run is a process of its own, started through the public command line with the tuned settings of
`conf/experiment/`; finished runs are kept in `--work`, so that an interrupted study goes on where it stopped. The peer is
the AUC of a hardly tuned DeepFM in plain PyTorch on the same split (`reference_auc`), as the data's own notes give it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._harness import ROOT, Harness, Spread

MODELS = ("dlrm", "deepfm", "wide_deep", "dcn", "dcnv2")
RUN_LIMIT_S = 3600
DATA = Path(os.environ.get("KSTEP_TEST_DATA", ROOT.parent / "shared" / "data"))


@dataclass(frozen=True)
class Task:
    """A data set with its settings.

    Attributes:
        name: as it is shown.
        experiment: file of `conf/experiment/`.
        source: raw files below the data folder; `None` where a package brings them.
        reference_auc: test AUC of a plain PyTorch DeepFM on this split.
    """

    name: str
    experiment: str
    source: str | None
    reference_auc: float


TASKS = (
    Task("movielens_100k", "", None, 0.786),
    Task("movielens_1m", "ml1m_deepfm", "ml1m", 0.8173),
    Task("frappe", "frappe_deepfm", "frappe/frappe_recon.parquet", 0.9679),
)


@dataclass(frozen=True)
class Result:
    """What one run ended with."""

    auc: float
    logloss: float
    seconds: float


def train_once(task: Task, model: str, seed: int, work: Path, quick: bool) -> Result:
    """Runs one training, or reads its result if it has finished before.

    Raises:
        RuntimeError: the run failed; the message ends with its last lines.
    """
    name = f"{task.name}_{model}_seed{seed}{'_quick' if quick else ''}"
    kept = work / f"{name}.json"
    if kept.exists():
        return Result(**json.loads(kept.read_text()))
    run_dir = work / "runs" / name
    command = [sys.executable, "-m", "torchrec_kstep.train", f"run_dir={run_dir}", f"model={model}", f"train.seed={seed}"]
    command += [f"data.path={work / 'prepared' / task.name}", "metrics.progress=none", "metrics.tensorboard=false"]
    command += [f"experiment={task.experiment}"] if task.experiment else []
    command += [f"data.source={DATA / task.source}"] if task.source else []
    command += ["train.epochs=1", "data.limit=20000"] if quick else []
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    test = next(event for event in events if event["event"] == "test")
    result = Result(test["auc"], test["logloss"], seconds)
    kept.write_text(json.dumps(vars(result)))
    return result


def main(argv: list[str] | None = None) -> int:
    """Trains every model on every set at hand and reports AUC, LogLoss and seconds."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--work", type=Path, default=Path("runs/bench_models"), help="finished runs and prepared data stay there")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of DeepFM; the other models run the first one only")
    options, rest = parser.parse_known_args(argv)
    run = Harness.from_command_line("models", f"{__doc__}\n{parser.format_help()}", rest)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        if task.source and not (DATA / task.source).exists():
            print(f"left out {task.name}: {DATA / task.source} is not there (set KSTEP_TEST_DATA)", file=sys.stderr)
            continue
        for model in MODELS if not run.quick else ("deepfm",):
            seeds = range(1, 1 + (options.seeds if model == "deepfm" and not run.quick else 1))
            results = [train_once(task, model, seed, work, run.quick) for seed in seeds]
            case = {"data": task.name, "model": model, "seeds": len(results)}
            peer = ("reference_deepfm", task.reference_auc) if model == "deepfm" and not run.quick else (None, None)
            run.record(case, "test_auc", "AUC", Spread.of([one.auc for one in results]), *peer, higher_is_better=True)
            run.record(case, "test_logloss", "nats", Spread.of([one.logloss for one in results]))
            run.record(case, "wall", "s", Spread.of([one.seconds for one in results]))
            print(f"{task.name} {model}: test AUC {statistics.mean(one.auc for one in results):.4f}", file=sys.stderr, flush=True)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
