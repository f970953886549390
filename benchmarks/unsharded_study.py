"""A study of large batches in plain PyTorch: the cells of `torchrec_kstep.study`, trained by `benchmarks.unsharded_base`.

    python -m benchmarks.unsharded_study study=large_batch_curve_frappe 'extra=["data.source=FILE"]' work=FOLDER

Takes what `torchrec_kstep.study` takes and writes the same `study.md`, `study.svg` and `study.html`, in a fraction of the time at small
batches. A finished run is a file of the folder and is not run again. Left out are runs in which rows that are absent from a batch
stand still (tiered tables with `optim.l2_absent_rows=skip`): here all rows decay.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.unsharded_base import train
from torchrec_kstep.config.load import load
from torchrec_kstep.config.load import main as command_line
from torchrec_kstep.config.schema import RunConfig, StudyConfig
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.studies.cells import Cell, cells_of
from torchrec_kstep.studies.page import auc_chart, page, table
from torchrec_kstep.studies.results import Result, summarize


def result_of(cell: Cell, work: Path) -> Result | None:
    """Trains a cell, unless its file is there; None for runs that are left out."""
    path = work / f"{cell.name}.json"
    if path.exists():
        return Result(**json.loads(path.read_text()))
    config = load(RunConfig, "train", cell.overrides)
    if config.planner.kernel == "tiered" and config.optim.embedding_l2 and config.optim.l2_absent_rows == "skip":
        return None
    ensure_prepared(config.data)
    outcome = train(config, open_dataset(config.data), " ".join(cell.overrides))
    result = Result(outcome.auc, outcome.logloss, outcome.num_steps, outcome.seconds)
    path.write_text(json.dumps(asdict(result)))
    return result


def run(config: StudyConfig) -> int:
    """Trains what is missing, then writes table, chart and page."""
    torch.set_num_threads(1)
    cells = cells_of(config)
    work = Path(config.work or f"runs/unsharded_{config.name}").absolute()
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Result] = {}
    for cell in cells:
        begin_s = time.monotonic()
        result = result_of(cell, work)
        if result is None:
            print(f"left out: {cell.name}")
            continue
        found[cell.name] = result
        spent_s = time.monotonic() - begin_s
        print(f"{cell.curve}, {cell.point}, seed {cell.seed}: {result.auc:.4f} / {result.logloss:.4f}, {spent_s:.0f} s", flush=True)
    summaries = summarize(cells, found)
    title = f"Study {config.name}"
    text = table(summaries, config.axis, config.points)
    (work / "study.md").write_text(text)
    (work / "study.svg").write_text(auc_chart(title, summaries, config.axis, config.points))
    (work / "study.html").write_text(page(title, summaries, config.axis, config.points))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(command_line(StudyConfig, "study", run))
