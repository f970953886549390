"""Studies: the grid, its results, how they are shown, and that finished runs are kept. Layer: unit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from torchrec_kstep import study
from torchrec_kstep.config.schema import StudyConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.studies.cells import Cell, cells_of
from torchrec_kstep.studies.page import auc_chart, page, table
from torchrec_kstep.studies.results import Result, read_result, summarize

GRID = StudyConfig(
    name="toy",
    train=["data=frappe"],
    models=["deepfm", "dcn"],
    variants={"plain": "", "clipped": "optim.clip=cowclip planner=tiered"},
    points_of={"clipped": "64"},
    points=["32", "64"],
    seeds=[1, 2],
)


def finish(folder: Path, auc: float = 0.8, logloss: float = 0.4, step: int = 100) -> None:
    """Writes what a finished run leaves."""
    folder.mkdir(parents=True)
    events = [
        {"event": "train", "step": step, "loss": 0.5, "forward_backward_s": 60.0},
        {"event": "test", "step": step, "auc": auc, "logloss": logloss},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_the_grid_holds_every_run_once_and_only_the_points_of_a_variant() -> None:
    cells = cells_of(GRID)
    assert len(cells) == len({cell.name for cell in cells}) == 2 * 2 * 3
    assert {cell.point for cell in cells if cell.variant == "clipped"} == {"64"}
    first = next(cell for cell in cells if cell.variant == "clipped")
    assert first.overrides == ("model=deepfm", "data=frappe", "optim.clip=cowclip", "planner=tiered", "train.batch_size=64", "train.seed=1")
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)


def test_other_overrides_are_another_run() -> None:
    """Otherwise a study that was changed would show results of the settings before."""
    before, after = cells_of(GRID), cells_of(replace(GRID, train=["data=frappe", "optim.lr=0.1"]))
    assert not {cell.name for cell in before} & {cell.name for cell in after}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"points": []}, "points is empty"),
        ({"variants": {}, "points_of": {}}, "variants is empty"),
        ({"train": ["train.batch_size=3"]}, "train.batch_size is set by the study itself"),
        ({"variants": {"a": "model=dcn"}, "points_of": {}}, "model is set by the study itself"),
        ({"points_of": {"nobody": "32"}}, "'nobody' is named in points_of"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cells_of(replace(GRID, **changes))  # type: ignore[arg-type]


def test_unfinished_and_damaged_runs_are_no_results(tmp_path: Path) -> None:
    assert read_result(tmp_path / "absent") is None
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "metrics.jsonl").write_text('{"event": "train", "step": 3, "loss": 1.0}\n')
    assert read_result(tmp_path / "cut") is None
    finish(tmp_path / "done", 0.75, 0.5, 7)
    assert read_result(tmp_path / "done") == Result(0.75, 0.5, 7, 60.0)


def test_table_and_page_show_means_over_seeds_and_mark_starved_cells() -> None:
    cells = [Cell("deepfm", "a & b", "32", seed, ()) for seed in (1, 2)] + [Cell("deepfm", "a & b", "64", 1, ("x",))]
    cells[1] = replace(cells[1], overrides=("y",))
    results = {
        cells[0].name: Result(0.80, 0.4, 9000, 60),
        cells[1].name: Result(0.82, 0.6, 9000, 120),
        cells[2].name: Result(0.7, 0.5, 499, 30),
    }
    summaries = summarize(cells, results)
    text = table(summaries, "train.batch_size", ["32", "64", "128"])
    assert "| deepfm, a & b | 0.8100 ± 0.0141 / 0.5000 (1.5) | 0.7000 / 0.5000 (0.5)* | - |" in text
    shown = page("Study <x>", summaries, "train.batch_size", ["32", "64", "128"])
    assert "Study &lt;x&gt;" in shown
    assert "a &amp; b" in shown
    assert ">128</text>" in shown


def test_finished_runs_are_kept_and_failures_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(GRID, work=str(tmp_path), models=["deepfm"], seeds=[1], points_of={})
    cells = cells_of(config)
    finish(tmp_path / cells[0].name)
    trained: list[str] = []

    def train(cell: Cell, work: Path, _limit_s: float) -> Result | None:
        trained.append(cell.name)
        if cell.name == cells[1].name:
            return None
        finish(work / cell.name)
        return read_result(work / cell.name)

    monkeypatch.setattr(study, "_train", train)
    assert study.run(config) == 1
    assert trained == [cell.name for cell in cells[1:]]
    assert "finished before" in capsys.readouterr().out
    trained.clear()
    assert study.run(config) == 1
    assert trained == [cells[1].name]
    assert (tmp_path / "study.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "study.svg").read_text().startswith("<svg")
    assert "| deepfm, plain |" in (tmp_path / "study.md").read_text()


def test_the_chart_for_documents_shows_the_points_that_were_run() -> None:
    cells = cells_of(GRID)
    results = {cell.name: Result(0.8, 0.4, 100, 60.0) for cell in cells if cell.point == "64"}
    chart = auc_chart("Toy", summarize(cells, results), GRID.axis, GRID.points)
    assert ">64<" in chart
    assert ">32<" not in chart
    assert "deepfm, plain" in chart
    assert auc_chart("Toy", {}, GRID.axis, GRID.points).startswith("<svg")
