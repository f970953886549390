"""Trainings started by benchmarks, and what their `metrics.jsonl` tells of steps and tiers."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hosts import CHECKOUT
from torchrec_kstep.metrics.throughput import STEP_PHASES

# Trainings of benchmarks write numbers only, and evaluate as little as they may.
QUIET = ("metrics.tensorboard=false", "metrics.report=false", "metrics.progress=none", "train.epochs=1")


def synthetic(num_rows_per_table: Sequence[int], num_train_rows: int, zipf_exponent: float) -> list[str]:
    """Overrides for the Criteo-shaped stream with a planted teacher."""
    return [
        "data=synthetic",
        f"data.synthetic.num_rows_per_table={json.dumps(list(num_rows_per_table), separators=(',', ':'))}",
        f"data.synthetic.num_train_rows={num_train_rows}",
        f"data.synthetic.zipf_exponent={zipf_exponent}",
    ]


def on_one_host(overrides: Sequence[str], num_ranks: int, scratch: Path, deadline_s: float, env: Mapping[str, str] | None = None) -> str:
    """Trains on this machine without namespaces and returns stdout.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    command = [sys.executable, "-m", "torchrec_kstep.launch", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), **(env or {})}
    done = subprocess.run(
        [*command, "-m", "torchrec_kstep.train", *overrides],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(overrides)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def records(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Returns the records of one event, in order."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == event]


def step_seconds(run_dir: Path, skipped_share: float = 0.34) -> list[float]:
    """Returns the mean seconds of a step between two log lines, in order, without the first part of them, which warms up."""
    found, last = [], 0
    for record in records(run_dir, "train"):
        found.append(sum(record[f"{phase}_s"] for phase in STEP_PHASES) / (record["step"] - last))
        last = record["step"]
    return found[int(len(found) * skipped_share) :]


def last_tiers(run_dir: Path) -> dict[str, float]:
    """Returns rank 0's counters of tiers at the end of training; empty for rows in DRAM."""
    found = records(run_dir, "tiers")
    return found[-1] if found else {}
