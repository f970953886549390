"""What the report says of predictions. Layer: unit."""

from pathlib import Path

import pytest

from tests.planners import planner, sharders, task
from torchrec_kstep.errors import DataError
from torchrec_kstep.planner.forecast import Forecast, Measured, write_comparison
from torchrec_kstep.report import read_run, render

MEASURED = Measured(400, 0.021, 0.004)


def forecast() -> Forecast:
    made = planner()
    made.plan(task([1_000, 160]), sharders("tiered"))
    return made.forecast()


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"event": "train", "step": 1, "loss": 0.5}\n')
    return folder


def test_the_report_shows_both_sides(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    write_comparison(folder, forecast(), MEASURED)
    page = render([read_run(folder)])
    assert "Prediction and reality" in page
    assert "of it forward and backward" in page
    assert "25 ms" in page
    assert "not calibrated" in page
    other = run_folder(tmp_path / "b")
    page = render([read_run(folder), read_run(other)])
    assert "Prediction and reality: a" in page
    assert "Prediction and reality: b" not in page


def test_a_damaged_prediction_is_told_with_its_remedy(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    (folder / "prediction.json").write_text("{")
    with pytest.raises(DataError, match=r"remove .*prediction.json"):
        read_run(folder)
