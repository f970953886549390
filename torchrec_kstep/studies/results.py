"""What a study has found so far: one result per run, and their summary by curve and point. Pure but for reading run folders."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrec_kstep.errors import DataError
from torchrec_kstep.report.run import read_run
from torchrec_kstep.studies.cells import Cell


@dataclass(frozen=True)
class Result:
    """What one run ended with.

    Attributes:
        auc: test AUC.
        logloss: test LogLoss, in nats.
        num_steps: optimizer steps taken.
        seconds: time in the training loop.
    """

    auc: float
    logloss: float
    num_steps: int
    seconds: float


def read_result(folder: Path) -> Result | None:
    """Reads the result of a finished run; `None` if the run is not finished, or not there."""
    try:
        run = read_run(folder)
    except DataError:
        return None
    auc, logloss = run.test.get("auc"), run.test.get("logloss")
    if auc is None or logloss is None:
        return None
    return Result(auc, logloss, run.num_steps, sum(run.seconds_per_phase().values()))


@dataclass(frozen=True)
class Summary:
    """Results over the seeds of one curve at one point."""

    results: tuple[Result, ...]

    @property
    def auc(self) -> float:
        """Mean test AUC."""
        return statistics.mean(one.auc for one in self.results)

    @property
    def logloss(self) -> float:
        """Mean test LogLoss."""
        return statistics.mean(one.logloss for one in self.results)

    @property
    def minutes(self) -> float:
        """Median minutes in the training loop."""
        return statistics.median(one.seconds for one in self.results) / 60

    @property
    def auc_spread(self) -> float:
        """Standard deviation of the test AUC; 0 for one seed."""
        return statistics.stdev(one.auc for one in self.results) if len(self.results) > 1 else 0.0

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the longest run."""
        return max(one.num_steps for one in self.results)


def summarize(cells: Sequence[Cell], results: Mapping[str, Result]) -> dict[tuple[str, str], Summary]:
    """Returns (curve, point) -> summary over the seeds that are finished."""
    grouped: dict[tuple[str, str], list[Result]] = {}
    for cell in cells:
        if cell.name in results:
            grouped.setdefault((cell.curve, cell.point), []).append(results[cell.name])
    return {key: Summary(tuple(found)) for key, found in grouped.items()}
