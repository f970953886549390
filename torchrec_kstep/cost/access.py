"""How often which rows of a table are asked for, and what a cache of a given size makes of it."""

import math

import numpy as np
import numpy.typing as npt

_NUM_EXACT_RANKS = 64  # the most frequent rows, each a bin of its own
_BINS_PER_DECADE = 24
_OFTEN = 8  # times that a row of a trace was met, from which on its count tells its probability
_STEEPEST = 16.0  # exponent of the law behind the rows that a trace met often
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
        edges = _rank_edges(1, num_rows)
        mass, sizes = _power_mass(edges, exponent), np.diff(edges)
        num_exact = min(num_rows, _NUM_EXACT_RANKS)
        mass[:num_exact] = np.arange(1, num_exact + 1, dtype=np.float64) ** -exponent
        return cls(sizes, mass / mass.sum() / sizes)

    @classmethod
    def from_ids(cls, ids: npt.NDArray[np.int64], num_rows: int) -> "AccessCurve":
        """The curve of a trace: rows that were met often are as probable as they were frequent.

        Counts of the others say little of single rows: of a thousand rows as rare as each other a trace meets some twice and most never.
        So they and the rows never met follow a power law over their ranks, steep enough that a trace of this length is expected to meet
        as many different rows as this one did.
        """
        _, counts = np.unique(ids, return_counts=True)
        often = counts[counts >= _OFTEN]
        values, rows = np.unique(often, return_counts=True)
        num_draws, num_rare_met = float(ids.size), counts.size - often.size
        num_in_bin, probability = rows.astype(np.float64), values / num_draws
        if num_rare_met:
            edges = _rank_edges(often.size + 1, num_rows)
            mass = float(ids.size - often.sum()) / num_draws
            sizes, rare = np.diff(edges), _rare_probability(edges, mass, num_draws, float(num_rare_met))
            num_in_bin, probability = np.concatenate([num_in_bin, sizes]), np.concatenate([probability, rare])
        return cls(num_in_bin, probability)

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
        return float((self.num_rows * self.met(num_draws)).sum())

    def missed_rows(self, num_draws: float, cached_rows: float) -> float:
        """Expected rows of a batch of `num_draws` that a cache of `cached_rows` does not hold.

        The cache keeps the rows used last (Che's approximation: a row is held if it was met in the last T draws, where T fills the
        cache). A cache that looks ahead or counts uses misses a little less; `fewest_missed_rows` says how much less at best.
        """
        if cached_rows >= self.num_accessible_rows:
            return 0.0
        return float((self.num_rows * self.met(num_draws) * (1 - self.met(self.window(cached_rows)))).sum())

    def fewest_missed_rows(self, num_draws: float, cached_rows: float) -> float:
        """As `missed_rows`, for a cache that holds the most frequent rows and never changes."""
        held = np.clip(cached_rows - (np.cumsum(self.num_rows) - self.num_rows), 0.0, self.num_rows)
        return float(((self.num_rows - held) * self.met(num_draws)).sum())

    def hit_rate(self, cached_rows: float) -> float:
        """Part of the draws that meets a row in a cache of so many rows."""
        if cached_rows >= self.num_accessible_rows:
            return 1.0
        return float((self.num_rows * self.probability * self.met(self.window(cached_rows))).sum())

    def met(self, num_draws: float) -> Floats:
        """Probability that one row of each bin is met in so many draws, `[bins]`."""
        return _met(self.probability, num_draws)

    def window(self, cached_rows: float) -> float:
        """Draws in which `cached_rows` different rows are met, by bisection in log scale; fewer than are ever asked for."""
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


def _met(probability: Floats, num_draws: float) -> Floats:
    """Probability that a row is met in so many draws."""
    chance: Floats = -np.expm1(num_draws * np.log1p(-np.minimum(probability, 1 - 1e-12)))
    return chance


def _rank_edges(first: int, last: int) -> Floats:
    """Edges of bins over the ranks from `first` to `last`: the first ones alone, then bins whose ranks differ by 10 %."""
    num_exact = min(last - first + 1, _NUM_EXACT_RANKS)
    behind = first + num_exact
    edges = np.arange(first, behind + 1, dtype=np.float64) - 0.5
    if behind <= last:
        num_bins = max(1, math.ceil(_BINS_PER_DECADE * math.log10(last / (behind - 1))))
        edges = np.concatenate([edges, np.geomspace(behind - 0.5, last + 0.5, num_bins + 1)[1:]])
    return edges


def _power_mass(edges: Floats, exponent: float) -> Floats:
    """The integral of x^-exponent over each bin."""
    integral = np.log(edges) if exponent == 1.0 else edges ** (1 - exponent) / (1 - exponent)
    mass: Floats = np.diff(integral)
    return mass


def _rare_probability(edges: Floats, mass: float, num_draws: float, num_met: float) -> Floats:
    """Probability of one row of each bin under the power law of `mass` whose rows are expected to be met `num_met` at a time."""
    sizes = np.diff(edges)

    def law(exponent: float) -> Floats:
        shares = _power_mass(edges / edges[0], exponent)
        probability: Floats = mass * shares / shares.sum() / sizes
        return probability

    low, high = 0.0, _STEEPEST  # the steeper, the fewer different rows are met
    while high - low > 1e-4:
        middle = (low + high) / 2
        is_flat = float((sizes * _met(law(middle), num_draws)).sum()) > num_met
        low, high = (middle, high) if is_flat else (low, middle)
    return law(low)
