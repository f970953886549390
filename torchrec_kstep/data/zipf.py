"""Zipf-distributed ranks for tables of any size, by inverting the distribution function; nothing of the table's size is stored."""

import math

import numpy as np
import numpy.typing as npt

_NUM_EXACT_RANKS = 256  # behind them sums over ranks are integrals, off by some 1e-6 of themselves


class Zipf:
    """The distribution p(i) ~ i^-s over the ranks i = 1..n, reported as 0..n-1, most frequent first.

    The first ranks come from a table. For the others the sum of i^-s over a..b is taken as the integral of x^-s from a - 1/2
    to b + 1/2 (midpoint rule, relative error s (s + 1) / (24 a^2)), which inverts in closed form.
    """

    def __init__(self, num_rows: int, exponent: float) -> None:
        """Takes n and s; s = 0 is the uniform distribution."""
        self._num_rows = num_rows
        self._exponent = exponent
        num_exact = min(num_rows, _NUM_EXACT_RANKS)
        self._cumulated = np.cumsum(np.arange(1, num_exact + 1, dtype=np.float64) ** -exponent)
        self._tail_begin = num_exact + 0.5
        self._weight = float(self._cumulated[-1]) + self._integral(num_rows + 0.5)

    def ranks(self, draws: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
        """Turns numbers that are uniform in (0, 1) into ranks."""
        target = draws * self._weight
        ranks = np.searchsorted(self._cumulated, target, side="right").astype(np.uint64)
        is_tail = target >= self._cumulated[-1]
        if is_tail.any():
            in_tail = np.floor(self._inverse(target[is_tail] - self._cumulated[-1]) - 0.5)
            ranks[is_tail] = np.clip(in_tail, 0, self._num_rows - 1).astype(np.uint64)
        return ranks

    def _integral(self, end: float) -> float:
        """Integral of x^-s from the begin of the tail to `end`."""
        power = 1 - self._exponent
        if power == 0:
            return math.log(end / self._tail_begin)
        return float(end**power - self._tail_begin**power) / power

    def _inverse(self, area: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        power = 1 - self._exponent
        if power == 0:
            return self._tail_begin * np.exp(area)
        root: npt.NDArray[np.float64] = (self._tail_begin**power + power * area) ** (1 / power)
        return root
