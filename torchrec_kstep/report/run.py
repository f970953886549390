"""What a run directory says about its run."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_kstep.errors import DataError, PlanError, TopologyError
from torchrec_kstep.planner.forecast import PREDICTION_NAME, Forecast, Measured, read_comparison
from torchrec_kstep.report.facts import FACTS_NAME

METRICS_NAME = "metrics.jsonl"
STEP_PHASES = ("data_wait", "forward_backward", "optimizer")
PHASES = (*STEP_PHASES, "evaluation", "checkpoint")
FACTS: dict[str, type] = {
    **{"attempts": list, "ranks": dict, "data": dict, "plan": str, "routes": str},
    **{"versions": dict, "hardware": dict, "config": dict},
}

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: name of its folder.
        events: records of `metrics.jsonl`, in order.
        facts: content of `run.json`, by whatever release; empty for a run that was stopped before it was written.
        comparison: what the planner predicted and what was measured; None for a run that was stopped before, or planned otherwise.
    """

    name: str
    events: list[dict[str, Any]]
    facts: dict[str, Any]
    comparison: tuple[Forecast, Measured] | None = None

    def curve(self, event: str, value: str) -> Points:
        """Returns (step, value) of every record of an event that has the value; values that were not finite are left out."""
        return [(record["step"], record[value]) for record in self.events if record["event"] == event and record.get(value) is not None]

    @property
    def test(self) -> dict[str, float]:
        """The test report, empty if the run did not get there."""
        return next((record for record in reversed(self.events) if record["event"] == "test"), {})

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return max((record["step"] for record in self.events if record["event"] == "train"), default=0)

    @property
    def best_validation_auc(self) -> float | None:
        """The highest AUC on validation."""
        return max((auc for _, auc in self.curve("validation", "auc")), default=None)

    @property
    def rows_per_s(self) -> float | None:
        """Median throughput of training."""
        rates = [rate for _, rate in self.curve("train", "rows_per_s")]
        return statistics.median(rates) if rates else None

    def seconds_per_phase(self) -> dict[str, float]:
        """Returns seconds of the training loop by phase, over all records."""
        timed = [record for record in self.events if record["event"] in ("train", "end")]
        return {phase: sum(record.get(f"{phase}_s") or 0.0 for record in timed) for phase in PHASES}

    def fact(self, name: str) -> Any:
        """Returns an entry of `run.json`, or an empty value of the type expected in `FACTS`."""
        value = self.facts.get(name)
        return value if isinstance(value, FACTS[name]) else FACTS[name]()

    def missing_facts(self) -> list[str]:
        """Names the entries that `run.json` lacks, or holds as something else than expected."""
        return [name for name, kind in FACTS.items() if not isinstance(self.facts.get(name), kind)]

    def attempts(self) -> list[tuple[str, str]]:
        """Returns start and step continued from of every attempt; "?" for what is not recorded."""
        entries = [attempt if isinstance(attempt, dict) else {} for attempt in self.fact("attempts")]
        return [(str(entry.get("started", "?")), str(entry.get("from_step", "?"))) for entry in entries]

    def config(self) -> dict[str, str]:
        """Returns the configuration as dotted keys, values as text."""
        return _flat(self.fact("config"))


def read_run(folder: Path) -> Run:
    """Reads a run directory; a last line cut short, as a killed run leaves it, is ignored.

    Raises:
        DataError: the folder holds no run, or a record is damaged.
    """
    path = folder / METRICS_NAME
    if not path.is_file():
        raise DataError(f"{folder} is no run directory: expected {METRICS_NAME} in it; `train` names its run directory on its first line")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    events = []
    for number, line in enumerate(lines, start=1):
        event = _json_object(line)
        if event is not None and {"event", "step"} <= event.keys():
            events.append(event)
        elif number < len(lines):
            raise DataError(f"{path}:{number}: expected a JSON object with event and step, got {line[:60]!r}")
    path = folder / FACTS_NAME
    facts = _json_object(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}
    if facts is None:
        raise DataError(f"{path} is damaged: expected a JSON object; remove it, and the page is made without what it says")
    return Run(folder.resolve().name, events, facts, _comparison(folder))


def _comparison(folder: Path) -> tuple[Forecast, Measured] | None:
    if not (folder / PREDICTION_NAME).is_file():
        return None
    try:
        return read_comparison(folder)
    except (PlanError, TopologyError) as error:
        raise DataError(f"{error}; remove {folder / PREDICTION_NAME}, and the page is made without what it says") from error


def _json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or `None` if it is anything else."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return leaves
