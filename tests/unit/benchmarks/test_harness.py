"""The benchmark harness: peers take turns, ratios point the right way, and an empty run is no success."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as all_benchmarks
from benchmarks import _harness
from benchmarks._harness import Contender, Harness, Spread, measure

ROW_KEYS = {"case", "metric", "unit", "value", "peer", "peer_value", "ratio"}


class Clock:
    """A clock that moves only when work says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(_harness.time, "perf_counter", lambda: self.now_s)

    def work(self, seconds: float) -> None:
        self.now_s += seconds


def test_contenders_take_turns_and_each_begins_in_turn() -> None:
    order: list[str] = []
    contenders = {name: Contender(lambda name=name: order.append(name)) for name in "abc"}
    samples = measure(contenders, num_rounds=3, num_warmup_rounds=1)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_warm_up_and_preparation_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    costs = iter([100.0, 1.0, 2.0])  # the first call compiles
    samples = measure({"x": Contender(lambda: clock.work(next(costs)), before=lambda: clock.work(50.0))}, num_rounds=2, num_warmup_rounds=1)
    assert samples == {"x": [1.0, 2.0]}


@pytest.mark.parametrize(("contenders", "num_rounds"), [({}, 3), ({"x": Contender(int)}, 0)])
def test_nothing_to_measure_is_refused(contenders: dict[str, Contender], num_rounds: int) -> None:
    with pytest.raises(ValueError, match="at least one contender and one round"):
        measure(contenders, num_rounds)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_a_spread_is_ordered_and_made_of_the_samples(samples: list[float]) -> None:
    spread = Spread.of(samples)
    assert min(samples) <= spread.p10 <= spread.median <= spread.p90 <= max(samples)
    assert {spread.p10, spread.p90} <= set(samples)
    assert spread.num_samples == len(samples)


def test_half_the_time_is_twice_as_good_and_throughput_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = Harness("made_up", num_rounds=3)
    sides = {"ours": lambda: clock.work(0.002), "peers": {"slow": lambda: clock.work(0.004), "fast": lambda: clock.work(0.001)}}
    run.compare({"dim": 64}, **sides, unit="ms")
    run.compare({"dim": 64}, **sides, unit="rows", num_items=10)
    times, rates = run.rows[:2], run.rows[2:]
    assert [row.peer for row in times] == ["slow", "fast"]
    assert [row.value for row in times] == pytest.approx([2, 2])
    assert [row.value for row in rates] == pytest.approx([5000, 5000])
    assert [row.unit for row in rates] == ["rows/s", "rows/s"]
    for rows in (times, rates):
        assert [row.ratio for row in rows] == pytest.approx([2, 0.5])


def test_a_time_needs_a_unit_of_time() -> None:
    with pytest.raises(ValueError, match="'rows'"):
        Harness("made_up").compare({}, int, {}, unit="rows")


@pytest.mark.parametrize(("higher_is_better", "ratio"), [(False, 0.25), (True, 4)])
def test_recorded_values_are_compared_in_the_stated_direction(higher_is_better: bool, ratio: float) -> None:
    run = Harness("made_up")
    run.record({"k": 20}, "hit_rate", "share", 0.8, "lru", 0.2, higher_is_better)
    assert run.rows[0].ratio == pytest.approx(ratio)


def test_a_peer_of_zero_gives_no_ratio() -> None:
    run = Harness("made_up")
    run.record({"k": 20}, "sent", "bytes", 0.0, "sync", 5)
    run.record({"k": 20}, "sent", "bytes", 7)
    assert [row.ratio for row in run.rows] == [None, None]


def test_json_holds_the_agreed_keys_and_what_the_numbers_depend_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "made up.json"
    run = Harness.from_command_line("made_up", None, ["--quick", "--rounds", "2", "--json", str(path)])
    run.compare({"op": "sum", "num": 10}, ours=lambda: sum(range(10)), peers={"max": lambda: max(range(10))})
    assert run.finish() == 0
    result = json.loads(path.read_text())
    assert set(result) == {"benchmark", "environment", "rows"}
    assert set(result["rows"][0]) >= ROW_KEYS
    assert result["rows"][0]["case"] == "op=sum num=10"
    assert {"cpu", "num_cores", "kernel", "versions", "commit", "quick", "command"} <= set(result["environment"])
    assert result["environment"]["quick"] is True
    assert [path.name] == [file.name for file in path.parent.iterdir()]
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert "not a measurement" in printed


def test_values_that_json_cannot_hold_are_refused_and_leave_no_result(tmp_path: Path) -> None:
    run = Harness("made_up", json_path=tmp_path / "result.json")
    run.record({}, "loss", "1", math.nan)
    with pytest.raises(ValueError, match="JSON"):
        run.finish()
    assert not (tmp_path / "result.json").exists()


def test_a_run_without_rows_is_no_success() -> None:
    with pytest.raises(RuntimeError, match="made_up measured nothing"):
        Harness("made_up").finish()


def test_zero_rounds_are_refused_at_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Harness.from_command_line("made_up", None, ["--rounds", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err


def test_the_example_of_the_readme_runs(root: Path, tmp_path: Path) -> None:
    example = (root / "benchmarks" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "bench_sum.py"
    script.write_text(example)
    command = [sys.executable, str(script), "--quick", "--json", str(tmp_path / "sum.json")]
    subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}, check=True, timeout=60)
    assert json.loads((tmp_path / "sum.json").read_text())["rows"][0]["peer"] == "python_loop"


def make_benchmark(folder: Path, name: str, body: str) -> None:
    (folder / f"bench_{name}.py").write_text(f"import sys\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write('{{}}')\n{body}\n")


def test_running_all_goes_on_after_a_failure_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    make_benchmark(folder, "a_broken", "sys.exit(3)")
    make_benchmark(folder, "b_good", "assert '--quick' in sys.argv")
    monkeypatch.setattr(all_benchmarks, "HERE", folder)
    assert all_benchmarks.main(["--quick", "--json-dir", str(tmp_path)]) == 1
    assert (tmp_path / "b_good.json").exists()
    assert "failed: a_broken" in capfd.readouterr().err
    assert all_benchmarks.main(["--quick", "--json-dir", str(tmp_path), "b_good"]) == 0
    with pytest.raises(SystemExit):
        all_benchmarks.main(["c_missing"])
    assert "there are a_broken, b_good" in capfd.readouterr().err
