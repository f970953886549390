"""How often which rows of a table are asked for, and what a cache of a given size makes of it."""

import math

import numpy as np
import numpy.typing as npt

_NUM_EXACT_RANKS = 64  # the most frequent rows, each a bin of its own
_BINS_PER_DECADE = 24
_EXPONENTS = [index / 20 for index in range(41)]  # Zipf exponents tried in a fit

Floats = npt.NDArray[np.float64]


class AccessCurve:
    """Rows in bins of equal probability of being asked for. Draws are independent.

    Args:
        num_rows: rows per bin, `[bins]`, each above 0; may be fractions.
        probability: of one row of each bin per draw, `[bins]`; `sum(num_rows * probability)` is 1.
    """

    def __init__(self, num_rows: Floats, probability: Floats) -> None:
        """Sorts the bins, most frequent rows first."""
        order = np.argsort(-probability, kind="stable")
        self.num_rows: Floats = np.asarray(num_rows, dtype=np.float64)[order]
        self.probability: Floats = np.asarray(probability, dtype=np.float64)[order]
        self._windows: dict[float, float] = {}

    @classmethod
    def zipf(cls, num_rows: int, exponent: float) -> "AccessCurve":
        """p(i) ~ i^-s over rows i = 1..n; s = 0 is the uniform distribution.

        The first rows are exact; behind them a bin stands for ranks whose probabilities differ by 10 % at s = 1.
        """
        if exponent == 0.0:
            return cls(np.array([float(num_rows)]), np.array([1.0 / num_rows]))
        num_exact = min(num_rows, _NUM_EXACT_RANKS)
        edges = np.arange(num_exact + 1, dtype=np.float64) + 0.5
        if num_rows > num_exact:
            num_bins = max(1, math.ceil(_BINS_PER_DECADE * math.log10(num_rows / num_exact)))
            edges = np.concatenate([edges, np.geomspace(num_exact + 0.5, num_rows + 0.5, num_bins + 1)[1:]])
        integral = np.log(edges) if exponent == 1.0 else edges ** (1 - exponent) / (1 - exponent)
        mass = np.diff(integral)
        sizes = np.diff(edges)
        mass[:num_exact] = np.arange(1, num_exact + 1, dtype=np.float64) ** -exponent
        return cls(sizes, mass / mass.sum() / sizes)

    @classmethod
    def from_ids(cls, ids: npt.NDArray[np.int64], num_rows: int) -> "AccessCurve":
        """The curve of a trace: rows that were asked for equally often share a bin.

        Rows never seen share the mass that Good and Turing give to the unseen: the part of the draws that met a row once.
        """
        _, counts = np.unique(ids, return_counts=True)
        values, rows = np.unique(counts, return_counts=True)
        num_draws, num_unseen = float(ids.size), float(num_rows - counts.size)
        unseen = float(rows[0]) / num_draws if values.size and values[0] == 1 and num_unseen > 0 else 0.0
        unseen = min(unseen, 0.99)
        num_in_bin = rows.astype(np.float64)
        mass = values * num_in_bin / num_draws * (1 - unseen)
        if unseen:
            num_in_bin, mass = np.append(num_in_bin, num_unseen), np.append(mass, unseen)
        return cls(num_in_bin, mass / num_in_bin)

    @classmethod
    def fit_zipf(cls, ids: npt.NDArray[np.int64], num_rows: int) -> tuple["AccessCurve", float]:
        """The Zipf curve nearest to a trace by likelihood, with its exponent.

        Ranks are those of the trace itself, so a short trace of a flat distribution looks a little steeper than it is.
        """
        _, counts = np.unique(ids, return_counts=True)
        ranked = np.sort(counts)[::-1].astype(np.float64)
        log_rank = np.log(np.arange(1, ranked.size + 1, dtype=np.float64))
        best, best_likelihood = 0.0, -math.inf
        for exponent in _EXPONENTS:
            curve = cls.zipf(num_rows, exponent)
            log_norm = math.log(curve.probability[0])
            likelihood = float((ranked * (log_norm - exponent * log_rank)).sum())
            if likelihood > best_likelihood:
                best, best_likelihood = exponent, likelihood
        return cls.zipf(num_rows, best), best

    @property
    def num_accessible_rows(self) -> float:
        """Rows that are ever asked for."""
        return float(self.num_rows.sum())

    def distinct_rows(self, num_draws: float) -> float:
        """Expected number of different rows among so many draws."""
        return float((self.num_rows * self._met(num_draws)).sum())

    def missed_rows(self, num_draws: float, cached_rows: float) -> float:
        """Expected rows of a batch of `num_draws` that a cache of `cached_rows` does not hold.

        The cache keeps the rows used last (Che's approximation: a row is held if it was met in the last T draws, where T fills the
        cache). A cache that looks ahead or counts uses misses a little less; `fewest_missed_rows` says how much less at best.
        """
        if cached_rows >= self.num_accessible_rows:
            return 0.0
        window = self._window(cached_rows)
        return float((self.num_rows * self._met(num_draws) * (1 - self._met(window))).sum())

    def fewest_missed_rows(self, num_draws: float, cached_rows: float) -> float:
        """As `missed_rows`, for a cache that holds the most frequent rows and never changes."""
        held = np.clip(cached_rows - (np.cumsum(self.num_rows) - self.num_rows), 0.0, self.num_rows)
        return float(((self.num_rows - held) * self._met(num_draws)).sum())

    def hit_rate(self, cached_rows: float) -> float:
        """Part of the draws that meets a row in a cache of so many rows."""
        if cached_rows >= self.num_accessible_rows:
            return 1.0
        return float((self.num_rows * self.probability * self._met(self._window(cached_rows))).sum())

    def _met(self, num_draws: float) -> Floats:
        """Probability that one row of each bin is met in so many draws."""
        chance: Floats = -np.expm1(num_draws * np.log1p(-np.minimum(self.probability, 1 - 1e-12)))
        return chance

    def _window(self, cached_rows: float) -> float:
        """Draws in which `cached_rows` different rows are met, by bisection in log scale."""
        if cached_rows <= 0:
            return 0.0
        known = self._windows.get(cached_rows)
        if known is not None:
            return known
        low, high = cached_rows, max(cached_rows, 1.0)
        while self.distinct_rows(high) < cached_rows and high < 1e18:
            high *= 4
        for _ in range(50):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.distinct_rows(middle) < cached_rows else (low, middle)
            if high / low < 1 + 1e-6:
                break
        self._windows[cached_rows] = high
        return high
