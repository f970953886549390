"""What steps took and did, interval by interval, to be held against a prediction."""

import statistics
from collections.abc import Mapping

from torchrec_kstep.metrics.throughput import Phase
from torchrec_kstep.planner.forecast import Measured

# Counters that grow from the opening of the tables on, and the quantity of the cost model that they count.
_GROWING = {"misses_rows": "tier_rows"}


class StepRecord:
    """Collects intervals between log lines; the first one, in which caches fill and threads start, is left out of the result.

    Args:
        micro_batches: per step; a prediction is for one of them.
    """

    def __init__(self, micro_batches: int = 1) -> None:
        """Starts with no interval."""
        self._micro_batches = micro_batches
        self._times: list[tuple[int, float, float]] = []
        self._counted: list[tuple[int, dict[str, float]]] = []
        self._round_bytes: list[float] = []

    def add(self, num_steps: int, seconds: Mapping[Phase, float], counters: Mapping[str, float]) -> None:
        """Adds an interval.

        Args:
            num_steps: taken in it.
            seconds: by phase.
            counters: of tiered tables at its end.
        """
        num_batches = num_steps * self._micro_batches
        if num_batches:
            self._times.append((num_batches, seconds["forward_backward"] / num_batches, seconds["optimizer"] / num_batches))
            self._counted.append((num_batches, {name: counters[key] for key, name in _GROWING.items() if key in counters}))

    def add_rounds(self, scalars: Mapping[str, float], k: int) -> None:
        """Adds merge rounds as `RoundTotals` reports them."""
        if "rows_sent_bytes" in scalars and k:
            self._round_bytes.append(scalars["rows_sent_bytes"] / k / self._micro_batches)

    def measured(self) -> Measured | None:
        """Medians over the intervals; None before the first one."""
        if not self._times:
            return None
        skipped = 1 if len(self._times) > 1 else 0
        times = self._times[skipped:]
        num_steps = sum(num for num, _, _ in times)
        counters = {}
        first, last = self._counted[0][1] if skipped else {}, self._counted[-1][1]
        for name in last:
            grown = last[name] - first.get(name, 0.0)
            if grown >= 0:
                counters[name] = grown / num_steps
        if self._round_bytes:
            counters["merge_bytes"] = statistics.median(self._round_bytes)
        forward_backward, optimizer = (statistics.median(values) for values in list(zip(*times, strict=True))[1:])
        return Measured(num_steps, forward_backward, optimizer, counters)
