"""Ranks that die at chosen points of a merge round."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from torchrec_kstep.merge.transport import Arrival, Exchange, ProcessGroupTransport
from torchrec_kstep.ops import messages as ops


def kill_self() -> None:
    """Ends this process as the kernel ends one that is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


class Watched(ProcessGroupTransport):
    """Calls a function before every exchange begins, and after what it brings was waited for."""

    def __init__(self, inner: ProcessGroupTransport, before: Callable[[int, str], None], after: Callable[[int, str], None]) -> None:
        """`before` and `after` take the number of the exchange, from 0, and its phase."""
        self.__dict__.update(inner.__dict__)
        self._before, self._after = before, after
        self._num_exchanges = 0

    def begin(self, exchange: Exchange) -> Arrival:
        number, self._num_exchanges = self._num_exchanges, self._num_exchanges + 1
        self._before(number, exchange.phase)
        return _WatchedArrival(super().begin(exchange), lambda: self._after(number, exchange.phase))


class _WatchedArrival:
    def __init__(self, inner: Arrival, after: Callable[[], None]) -> None:
        self._inner = inner
        self._after = after

    def wait(self) -> list[torch.Tensor]:
        received = self._inner.wait()
        self._after()
        return received


def die_at_exchange(merger: Any, number: int, when: str) -> list[str]:
    """Has this process die `when` ("before" or "after") exchange `number` from now on of a `RowMerger`; returns a list of phases passed."""
    passed: list[str] = []

    def check(moment: str) -> Callable[[int, str], None]:
        def look(index: int, phase: str) -> None:
            if moment == "before":
                passed.append(phase)
            if index == number and moment == when:
                kill_self()

        return look

    merger._transport = Watched(merger._transport, check("before"), check("after"))
    return passed


def die_in_apply(number: int) -> None:
    """Has this process die before bucket `number` from now on, from 0, of merged rows is written."""
    left = [number]
    apply = ops.apply

    def dying(*arguments: Any, **options: Any) -> Any:
        if left[0] == 0:
            kill_self()
        left[0] -= 1
        return apply(*arguments, **options)

    ops.apply = dying  # of this process alone
