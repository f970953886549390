"""`python -m torchrec_kstep.study study=large_batch`: trains one model after the other and shows how they compare.

Every run is a process of its own, started through the public command line of `train`, so a study can be checked run by run.
Finished runs are kept: a study that was interrupted goes on where it stopped, and one that was extended runs what is new.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from torchrec_kstep.config.load import main
from torchrec_kstep.config.schema import StudyConfig
from torchrec_kstep.studies.cells import Cell, cells_of
from torchrec_kstep.studies.page import auc_chart, page, table
from torchrec_kstep.studies.results import Result, read_result, summarize
from torchrec_kstep.units import format_seconds

EXIT_FAILED_RUNS = 1  # exit code when some runs failed; the others are shown
_TAIL_CHARS = 2000


def run(config: StudyConfig) -> int:
    """Runs what is missing, writing table and page after each run.

    Returns:
        0, or 1 where runs failed.
    """
    cells = cells_of(config)
    work = Path(config.work or f"runs/study_{config.name}").absolute()
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    failed: list[str] = []
    began_s = time.monotonic()
    for number, cell in enumerate(cells, start=1):
        result = read_result(work / cell.name)
        is_new = result is None
        if result is None:
            result = _train(cell, work, config.run_limit_s)
        if result is None:
            failed.append(cell.name)
            continue
        results[cell.name] = result
        if is_new:
            _write(config, cells, results, work)
        print(
            f"{number} of {len(cells)}: {cell.curve}, {config.axis}={cell.point}, seed {cell.seed}: test AUC {result.auc:.4f}, LogLoss "
            f"{result.logloss:.4f}, {result.num_steps} steps, {format_seconds(result.seconds)}" + ("" if is_new else " (finished before)"),
            flush=True,
        )
    _write(config, cells, results, work)
    print(table(summarize(cells, results), config.axis, config.points))
    print(f"{work / 'study.html'} after {format_seconds(time.monotonic() - began_s)}")
    for name in failed:
        print(f"failed: {work / name}.log", file=sys.stderr)
    return EXIT_FAILED_RUNS if failed else 0


def _train(cell: Cell, work: Path, limit_s: float) -> Result | None:
    """Runs one cell; its output goes to a file beside the run directory."""
    command = [sys.executable, "-m", "torchrec_kstep.train", *cell.overrides, f"run_dir={work / cell.name}", "metrics.progress=none"]
    log = work / f"{cell.name}.log"
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False)
            why = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"no end after {format_seconds(limit_s)}"
    result = read_result(work / cell.name)
    if result is None:
        print(
            f"{cell.name} failed ({why}); the end of {log}:\n{log.read_text(errors='replace')[-_TAIL_CHARS:]}", file=sys.stderr, flush=True
        )
    return result


def _write(config: StudyConfig, cells: list[Cell], results: dict[str, Result], work: Path) -> None:
    summaries = summarize(cells, results)
    for name, text in (
        ("study.md", table(summaries, config.axis, config.points)),
        ("study.html", page(f"Study {config.name}", summaries, config.axis, config.points)),
        ("study.svg", auc_chart(f"Study {config.name}", summaries, config.axis, config.points)),
    ):
        partial = work / f"{name}.tmp"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, work / name)


if __name__ == "__main__":
    sys.exit(main(StudyConfig, "study", run))
