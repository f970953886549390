"""Misses of caches that merge rounds pass through, against simulated ones. Layer: unit."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import pytest

from torchrec_kstep.cost import AccessCurve
from torchrec_kstep.cost.round_misses import round_misses

NUM_ROWS, DRAWS = 8_000, 256


class Cache:
    """Keeps the rows used last."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows = OrderedDict[int, None]()

    def missed(self, rows: Iterable[int]) -> int:
        """Uses rows one after the other and counts those that were not here."""
        count = 0
        for row in rows:
            count += row not in self._rows
            self._rows[row] = None
            self._rows.move_to_end(row)
            if len(self._rows) > self._num_rows:
                self._rows.popitem(last=False)
        return count


def simulated(exponent: float, k: int, num_replicas: int, cached_rows: int) -> tuple[float, float]:
    """Misses per step and per round of one replica, whose rounds go over all touched rows in the order of their ids."""
    rng = np.random.default_rng(0)
    weights = np.cumsum(np.arange(1, NUM_ROWS + 1, dtype=np.float64) ** -exponent)
    place = rng.permutation(NUM_ROWS)

    def drawn(num: int) -> np.ndarray:
        return place[np.searchsorted(weights / weights[-1], rng.random(num))]

    cache, of_steps, of_rounds = Cache(cached_rows), [], []
    for _ in range(10):
        batches = [np.unique(drawn(DRAWS)) for _ in range(k)]
        of_steps.append(sum(cache.missed(batch.tolist()) for batch in batches) / k)
        union = np.unique(np.concatenate([*batches, drawn(DRAWS * k * (num_replicas - 1))]))
        of_rounds.append(cache.missed(union.tolist()))
    return float(np.mean(of_steps[4:])), float(np.mean(of_rounds[4:]))


@pytest.mark.parametrize("cached_rows", [500, 1_500, 4_000])
@pytest.mark.parametrize(("exponent", "k", "num_replicas"), [(1.05, 20, 2), (0.8, 10, 2), (1.05, 10, 4), (0.0, 5, 2)])
def test_rounds_and_the_steps_between_them_miss_what_a_simulated_cache_misses(
    exponent: float, k: int, num_replicas: int, cached_rows: int
) -> None:
    """Otherwise a plan would take rounds over rows on drives for free, or give their caches DRAM that brings nothing."""
    found = round_misses(AccessCurve.zipf(NUM_ROWS, exponent), DRAWS, k, num_replicas, cached_rows)
    per_step, per_round = simulated(exponent, k, num_replicas, cached_rows)
    assert found.per_step == pytest.approx(per_step, rel=0.12, abs=2)
    assert found.per_round == pytest.approx(per_round, rel=0.15, abs=20)


def test_more_cache_never_misses_more_and_all_of_it_never() -> None:
    curve = AccessCurve.zipf(10**6, 1.05)
    sizes = [0, 1_000, 30_000, 200_000, 600_000, 10**6]
    found = [round_misses(curve, 20_000, 20, 2, size) for size in sizes]
    assert [misses.per_step for misses in found] == sorted((misses.per_step for misses in found), reverse=True)
    assert [misses.per_round for misses in found] == sorted((misses.per_round for misses in found), reverse=True)
    assert found[0].per_step == pytest.approx(curve.distinct_rows(20_000))
    assert found[-1] == (0.0, 0.0)


def test_rare_rounds_leave_a_cache_as_training_alone_would() -> None:
    curve = AccessCurve.zipf(10**6, 1.05)
    assert round_misses(curve, 1_000, 1_000, 2, 20_000).per_step == pytest.approx(curve.missed_rows(1_000, 20_000), rel=0.05)
