"""Layer: metrics. Goal: numbers reach file and console once, also after a resume; the console never garbles a pipe."""

import io
import json
from pathlib import Path

import pytest

from torchrec_kstep.config.schema import MetricsConfig
from torchrec_kstep.metrics.sink import ConsoleSink, JsonLinesSink, Sinks

TRAIN = {"loss": 0.5, "rows_per_s": 10.0, "lr": 1e-3, "epoch": 1.0}


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_hold_one_object_a_line_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink.scalars("train", 3, {"loss": 0.5, "bad": float("nan")})
    sink.close()
    assert records(tmp_path / "metrics.jsonl") == [{"event": "train", "step": 3, "loss": 0.5, "bad": None}]


def test_a_resumed_run_drops_what_it_will_write_again_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path)
    for step in (1, 2, 3):
        sink.scalars("train", step, {"loss": float(step)})
    sink.close()
    with path.open("a") as file:
        file.write('{"event": "tra')
    sink = JsonLinesSink(path, first_step=2)
    sink.scalars("train", 3, {"loss": 33.0})
    sink.close()
    assert [(r["step"], r["loss"]) for r in records(path)] == [(1, 1.0), (2, 2.0), (3, 33.0)]


def test_without_a_terminal_the_console_prints_plain_lines_and_no_bar() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    sink = ConsoleSink("auto", stdout, stderr)
    sink.progress(1, 10, 1)
    sink.scalars("train", 1, TRAIN)
    sink.line("hello")
    sink.close()
    assert stdout.getvalue() == "epoch 1 step 1 loss 0.5000 10 rows/s lr 0.001\nhello\n"
    assert stderr.getvalue() == ""


def test_the_bar_goes_to_stderr_and_ends_with_the_epoch() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    sink = ConsoleSink("bar", stdout, stderr)
    for step in range(1, 4):
        sink.progress(step, 3, 1)
        sink.scalars("train", step, TRAIN)
    sink.line("validation")
    sink.close()
    sink.close()
    assert stdout.getvalue() == "validation\n"
    assert "epoch 1" in stderr.getvalue()


def test_style_none_is_silent() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    sink = ConsoleSink("none", stdout, stderr)
    sink.progress(1, 3, 1)
    sink.scalars("train", 1, TRAIN)
    sink.line("validation")
    assert stdout.getvalue() + stderr.getvalue() == ""


@pytest.mark.parametrize("tensorboard", [True, False])
def test_tensorboard_events_are_written_only_if_asked_for(tmp_path: Path, tensorboard: bool) -> None:
    sinks = Sinks.open(MetricsConfig(tensorboard=tensorboard, progress="none"), tmp_path)
    sinks.scalars("validation", 5, {"auc": 0.75})
    sinks.close()
    assert bool(list(tmp_path.glob("tensorboard/events*"))) is tensorboard
    assert records(tmp_path / "metrics.jsonl") == [{"event": "validation", "step": 5, "auc": 0.75}]
