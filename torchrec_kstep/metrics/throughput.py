"""Where the time goes: seconds per phase of the training loop."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

from torchrec_kstep.units import format_seconds

Phase = Literal["data_wait", "forward_backward", "optimizer", "evaluation", "checkpoint"]
PHASES: tuple[Phase, ...] = ("data_wait", "forward_backward", "optimizer", "evaluation", "checkpoint")
STEP_PHASES: tuple[Phase, ...] = ("data_wait", "forward_backward", "optimizer")

T = TypeVar("T")


class PhaseTimer:
    """Adds up wall-clock seconds per phase. A phase entered inside another pauses the outer one, so no second counts twice.

    On CUDA the times are those of the host, which waits for the device only where it reads a result.
    """

    def __init__(self) -> None:
        """Starts with no phase running."""
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._totals: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._running: list[Phase] = []
        self._since_s = 0.0

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Charges the time inside the `with` block to `name`."""
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def waiting_for(self, items: Iterable[T]) -> Iterator[T]:
        """Yields `items`, charging the time each takes to arrive to `data_wait`."""
        iterator = iter(items)
        while True:
            with self.phase("data_wait"):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take(self) -> dict[Phase, float]:
        """Returns the seconds per phase since the last call and starts anew."""
        self._charge()
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        for phase, spent in seconds.items():
            self._totals[phase] += spent
        return seconds

    def summary(self) -> str:
        """One line with the seconds per phase since the start."""
        self.take()
        return "time " + ", ".join(f"{phase.replace('_', ' ')} {format_seconds(spent)}" for phase, spent in self._totals.items())

    def _charge(self) -> None:
        now_s = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now_s - self._since_s
        self._since_s = now_s


class TimedOptimizer:
    """Hands `zero_grad` and `step` on and charges their time to the `optimizer` phase."""

    def __init__(self, optimizer: torch.optim.Optimizer, timer: PhaseTimer) -> None:
        """Wraps `optimizer`. Fused tables step inside backward and are counted there."""
        self._optimizer = optimizer
        self._timer = timer

    def zero_grad(self) -> None:
        """Clears gradients."""
        with self._timer.phase("optimizer"):
            self._optimizer.zero_grad()

    def step(self) -> None:
        """Takes one step."""
        with self._timer.phase("optimizer"):
            self._optimizer.step()
