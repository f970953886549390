"""The run report as text: complete in itself, escaped, right numbers, faults named. How it looks is in tests/browser."""

import itertools
import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from torchrec_kstep.errors import DataError
from torchrec_kstep.report import Run, read_run, render, write_facts
from torchrec_kstep.report.__main__ import main
from torchrec_kstep.report.chart import Series, line_chart, number, stacked_bar, thin, ticks
from torchrec_kstep.world import World

finite = st.floats(-1e12, 1e12)


def write_run(folder: Path, lr: float = 1e-3, plan: str = "table user on rank 0") -> Path:
    folder.mkdir(parents=True)
    events = [
        {
            "event": "train",
            "step": 50,
            "loss": 0.6,
            "rows_per_s": 1000.0,
            "data_wait_s": 1.0,
            "forward_backward_s": 2.0,
            "optimizer_s": 0.5,
        },
        {"event": "train", "step": 100, "loss": None, "rows_per_s": 3000.0, "data_wait_s": 1.0, "forward_backward_s": 2.0},
        {"event": "validation", "step": 100, "auc": 0.78, "logloss": 0.55},
        {"event": "test", "step": 100, "auc": 0.7712, "logloss": 0.5512, "normalized_entropy": 0.81, "calibration": 1.01},
        {"event": "end", "step": 100, "evaluation_s": 3.0, "checkpoint_s": 0.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    config = {"model": {"name": "dlrm"}, "data": {"name": "criteo"}, "optim": {"lr": lr, "note": "<b>"}}
    write_facts(folder, world=World(0, 4, 0, 2), config=config, data={"train rows": 1234567}, plan=plan)
    return folder


def test_the_page_shows_results_plan_configuration_versions_and_hardware(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path / "run"))])
    for expected in ("dlrm on criteo", "0.7712", "0.5512", "table user on rank 0", "1,234,567", "optim.lr", "torch", "processor", "2 x 2"):
        assert expected in page


def test_the_page_loads_nothing() -> None:
    page = render([Run("run", [], {})])
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttp", page)


def test_what_a_run_says_is_escaped(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path / "<script>alert(1)</script>".replace("/", "_"), plan="<img src=x>"))])
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;b&gt;" in page


def test_seconds_per_phase_add_up_over_training_and_its_end(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.seconds_per_phase() == {"data_wait": 2.0, "forward_backward": 4.0, "optimizer": 0.5, "evaluation": 3.0, "checkpoint": 0.0}
    assert run.rows_per_s == 2000.0
    assert run.num_steps == 100
    assert run.curve("train", "loss") == [(50, 0.6)]  # a loss that was not finite is no point


def test_runs_are_compared_and_only_what_differs_is_listed(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path / "one")), read_run(write_run(tmp_path / "two", lr=0.5))])
    differences = page.partition("Differences in configuration")[2].partition("</section>")[0]
    assert "optim.lr" in differences
    assert "0.5" in differences
    assert "model.name" not in differences


def test_restarts_are_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_facts(folder, world=World(), config={}, data={}, plan="", resumed_from_step=60)
    run = read_run(folder)
    assert [attempt["from_step"] for attempt in run.facts["attempts"]] == [0, 60]
    assert "continued from step 60" in render([run])


def test_a_run_stopped_at_any_point_gives_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "run.json").unlink()
    for kept in range(len(lines) + 1):
        (folder / "metrics.jsonl").write_text("".join(lines[:kept]) + '{"event": "tr')
        assert "<h1>run</h1>" in render([read_run(folder)])


@pytest.mark.parametrize("wrong", ["left out", None, 7, "text", [], {}, [7], {"a": None}], ids=str)
def test_a_record_of_another_release_gives_a_page_that_says_what_it_lacks(tmp_path: Path, wrong: object) -> None:
    folder = write_run(tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    for name in facts:
        changed = {key: value for key, value in facts.items() if key != name} | ({} if wrong == "left out" else {name: wrong})
        (folder / "run.json").write_text(json.dumps(changed))
        run = read_run(folder)
        page = render([run])
        assert "0.7712" in page
        is_told = name in page.partition("run.json does not say")[2].partition("</p>")[0]
        assert is_told == (not isinstance(wrong, type(facts[name])) or wrong == "left out")
        assert "2 runs compared" in render([run, run])


def test_the_record_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda source, target: (done.append("replace"), replace(source, target)))
    write_run(tmp_path / "run")
    assert done == ["fsync", "replace", "fsync"]


def test_the_command_writes_into_the_run_directory_and_compares_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    assert main([str(one)]) == 0
    assert (one / "report.html").read_text().startswith("<!doctype html>")
    assert main([str(one), str(two), "--output", str(tmp_path / "both.html")]) == 0
    assert "2 runs compared" in (tmp_path / "both.html").read_text()
    assert capsys.readouterr().out == f"{one / 'report.html'}\n{tmp_path / 'both.html'}\n"


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} is no run directory" in capsys.readouterr().err
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"event": "train", "step": 1}\nnonsense\n{"event": "train", "step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_run(folder)


@given(low=finite, high=finite)
def test_ticks_are_even_and_hold_the_range(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    found = ticks(low, high)
    tolerance = 1e-6 * max(abs(low), abs(high), high - low, 1e-9)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + tolerance
    assert found[-1] >= high - tolerance
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps) - min(gaps) <= tolerance


@given(st.lists(st.tuples(st.floats(0, 1e9), finite), max_size=2000))
def test_thinning_keeps_the_ends_and_the_order(points: list[tuple[float, float]]) -> None:
    kept = thin(points)
    assert len(kept) <= 601
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])


@given(st.lists(st.lists(st.tuples(st.integers(0, 10**9), finite), max_size=50).map(sorted), max_size=4))
def test_charts_are_well_formed_and_inside_their_box(curves: list[list[tuple[float, float]]]) -> None:
    chart = line_chart("a <b> & c", [Series(f"run {index}", index, points) for index, points in enumerate(curves)])
    figure = ElementTree.fromstring(chart)
    for line in figure.iter("polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert math.isfinite(x + y)
            assert -1 <= x <= 561
            assert -1 <= y <= 261


def test_a_bar_fills_its_share() -> None:
    bar = ElementTree.fromstring(stacked_bar({"a": 1.0, "b": 3.0}, total=8.0))
    assert sum(float(rect.attrib["width"].rstrip("%")) for rect in bar.iter("rect")) == pytest.approx(50.0)
    ElementTree.fromstring(stacked_bar({"a": 0.0}, total=0.0))


@pytest.mark.parametrize(
    ("value", "text"), [(0.775, "0.775"), (12_000, "12k"), (1_500_000, "1.5M"), (2e9, "2G"), (0, "0"), (9_999, "9999")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("content", ["", "{broken", "[1]", "3", '"x"', "null", "\0\0\0"])
def test_damaged_records_of_a_run_are_named_and_do_not_keep_it_from_going_on(tmp_path: Path, content: str) -> None:
    facts = write_run(tmp_path / "run") / "run.json"
    facts.write_text(content)
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        read_run(tmp_path / "run")
    write_facts(tmp_path / "run", world=World(), config={}, data={}, plan="", resumed_from_step=60)
    assert [attempt["from_step"] for attempt in read_run(tmp_path / "run").facts["attempts"]] == [60]
    events = tmp_path / "run" / "metrics.jsonl"
    events.write_text(f"{content}\n{events.read_text()}")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: expected a JSON object"):
        read_run(tmp_path / "run")
