"""Where numbers go: JSON lines, TensorBoard, and the person at the console."""

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TextIO

import tqdm

from torchrec_kstep.config.schema import MetricsConfig


class Sink(Protocol):
    """Takes what the training loop reports. Used on rank 0 only; calls come from one thread."""

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        """Records numbers of an `event` (train, validation, test) after optimizer step `step`."""

    def line(self, text: str) -> None:
        """Shows one line to people."""

    def progress(self, step_in_epoch: int, num_steps: int, epoch: int) -> None:
        """Tells how far the epoch is."""

    def close(self) -> None:
        """Flushes and releases files. Safe to call twice."""


class JsonLinesSink:
    """One JSON object a line: `{"event": "train", "step": 50, "loss": 0.61, ...}`; a value that is not finite is null."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Appends to `path`; records after step `first_step`, where a resumed run takes over, are removed first."""
        if path.exists():
            _drop_lines_after(path, first_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        """Writes one line."""
        record: dict[str, Any] = {"event": event, "step": step}
        record |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def line(self, text: str) -> None:
        """Text is for people: not recorded."""

    def progress(self, step_in_epoch: int, num_steps: int, epoch: int) -> None:
        """Progress is for people: not recorded."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _drop_lines_after(path: Path, step: int) -> None:
    """Rewrites `path` without records after `step` and without a torn last line."""
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue  # a line cut short when the run was killed
        if record["step"] <= step and record["event"] != "test":
            kept.append(text + "\n")
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


class TensorBoardSink:
    """TensorBoard events, one tag `<event>/<name>` per value."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """Writes below `folder`; events after `first_step` of an earlier attempt are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import: only runs that want it pay

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        """Adds one point per value."""
        for name, value in values.items():
            self._writer.add_scalar(f"{event}/{name}", value, step)

    def line(self, text: str) -> None:
        """Text is for people: not recorded."""

    def progress(self, step_in_epoch: int, num_steps: int, epoch: int) -> None:
        """Progress is for people: not recorded."""

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class ConsoleSink:
    """Lines on stdout, and a progress bar on stderr where that is a terminal."""

    def __init__(self, style: str, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        """`style` is a key of `metrics.progress`: auto, bar, lines or none."""
        self._stdout, self._stderr = stdout or sys.stdout, stderr or sys.stderr
        is_bar = style == "bar" or (style == "auto" and self._stderr.isatty())
        self._style = "bar" if is_bar else "none" if style == "none" else "lines"
        self._bar: tqdm.tqdm[Any] | None = None

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        """Prints training numbers as a line, or beside the bar."""
        if event != "train" or self._style == "none":
            return
        if self._style == "bar":
            if self._bar is not None:
                self._bar.set_postfix_str(f"loss {values['loss']:.4f} {values['rows_per_s']:.0f} rows/s")
            return
        self.line(
            f"epoch {values['epoch']:.0f} step {step} loss {values['loss']:.4f} {values['rows_per_s']:.0f} rows/s lr {values['lr']:.3g}"
        )

    def line(self, text: str) -> None:
        """Prints one line above the bar."""
        if self._style == "none":
            return
        if self._bar is not None:
            self._bar.clear()
        print(text, file=self._stdout, flush=True)

    def progress(self, step_in_epoch: int, num_steps: int, epoch: int) -> None:
        """Moves the bar."""
        if self._style != "bar":
            return
        if self._bar is None:
            self._bar = tqdm.tqdm(
                total=num_steps, initial=step_in_epoch, desc=f"epoch {epoch}", file=self._stderr, unit="step", leave=False
            )
        else:
            self._bar.update(step_in_epoch - self._bar.n)
        if step_in_epoch >= num_steps:
            self.close()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Sinks:
    """Hands everything to several sinks; without any it swallows all, which is what ranks other than 0 use."""

    def __init__(self, sinks: list[Sink] | None = None) -> None:
        """Takes over the sinks; `close` closes them."""
        self._sinks = sinks or []

    @classmethod
    def open(cls, config: MetricsConfig, run_dir: Path, first_step: int = 0) -> "Sinks":
        """Opens the sinks that `config` asks for, in `run_dir`; numbers after `first_step` of an earlier attempt are dropped."""
        sinks: list[Sink] = [JsonLinesSink(run_dir / "metrics.jsonl", first_step)]
        if config.tensorboard:
            sinks.append(TensorBoardSink(run_dir / "tensorboard", first_step))
        sinks.append(ConsoleSink(config.progress))
        return cls(sinks)

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        """Records numbers of an event."""
        for sink in self._sinks:
            sink.scalars(event, step, values)

    def line(self, text: str) -> None:
        """Shows one line to people."""
        for sink in self._sinks:
            sink.line(text)

    def progress(self, step_in_epoch: int, num_steps: int, epoch: int) -> None:
        """Tells how far the epoch is."""
        for sink in self._sinks:
            sink.progress(step_in_epoch, num_steps, epoch)

    def close(self) -> None:
        """Closes all sinks, also where one of them fails; then raises the last failure, the others as its context."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
