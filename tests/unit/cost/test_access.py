"""Access curves against counted draws and simulated caches. Layer: unit."""

from collections import OrderedDict

import numpy as np
import pytest

from torchrec_kstep.cost import AccessCurve


def draws(num_rows: int, exponent: float, num: int, seed: int = 0) -> np.ndarray:
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    return np.random.default_rng(seed).choice(num_rows, size=num, p=weights / weights.sum())


@pytest.mark.parametrize("num_rows", [1, 7, 64, 65, 5_000, 10**9])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 2.0])
def test_a_curve_is_a_distribution_over_all_rows(num_rows: int, exponent: float) -> None:
    curve = AccessCurve.zipf(num_rows, exponent)
    assert curve.num_rows.sum() == pytest.approx(num_rows, rel=1e-9)
    assert (curve.num_rows * curve.probability).sum() == pytest.approx(1.0)
    assert (np.diff(curve.probability) <= 0).all()


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.5])
def test_distinct_rows_are_those_counted(exponent: float) -> None:
    """Otherwise updates, misses and merge traffic would all be off by the same factor."""
    counted = np.mean([len(np.unique(draws(20_000, exponent, 5_000, seed))) for seed in range(5)])
    assert AccessCurve.zipf(20_000, exponent).distinct_rows(5_000) == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.5])
@pytest.mark.parametrize("cached_rows", [200, 2_000, 10_000])
def test_misses_are_those_of_a_cache_of_the_rows_used_last(exponent: float, cached_rows: int) -> None:
    """Otherwise the planner would give DRAM to the wrong tables."""
    num_draws, num_steps, cache, missed = 500, 160, OrderedDict[int, None](), []
    ids = draws(20_000, exponent, num_draws * num_steps).reshape(num_steps, num_draws)
    for step, batch in enumerate(ids):
        batch_misses = 0
        for row in np.unique(batch):
            batch_misses += row not in cache
        for row in batch:
            cache.pop(row, None)
            cache[row] = None
            if len(cache) > cached_rows:
                cache.popitem(last=False)
        if step >= num_steps // 2:
            missed.append(batch_misses)
    curve = AccessCurve.zipf(20_000, exponent)
    if cached_rows < curve.distinct_rows(num_draws * num_steps / 2):  # else the cache was still filling
        assert curve.missed_rows(num_draws, cached_rows) == pytest.approx(np.mean(missed), rel=0.08, abs=3)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05])
def test_more_cache_never_misses_more_and_all_of_it_never(exponent: float) -> None:
    curve = AccessCurve.zipf(10**7, exponent)
    sizes = [0, 10, 10**3, 10**5, 10**6, 5 * 10**6, 10**7]
    missed = [curve.missed_rows(10_000, size) for size in sizes]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] == pytest.approx(curve.distinct_rows(10_000))
    assert missed[-1] == 0.0
    assert all(curve.fewest_missed_rows(10_000, size) <= miss * (1 + 1e-4) for size, miss in zip(sizes, missed, strict=True))
    rates = [curve.hit_rate(size) for size in sizes]
    assert rates == sorted(rates)
    assert rates[-1] == 1.0


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.05, 1.4])
def test_a_fit_finds_the_exponent_of_a_trace(exponent: float) -> None:
    _, found = AccessCurve.fit_zipf(draws(1_000, exponent, 200_000), 1_000)
    assert found == pytest.approx(exponent, abs=0.051)


def test_a_trace_keeps_its_hot_rows_and_leaves_mass_to_those_not_seen() -> None:
    """Otherwise a short trace would make a large table look as if it fitted into a small cache."""
    ids = np.concatenate([np.zeros(900, dtype=np.int64), np.arange(1, 101, dtype=np.int64)])
    curve = AccessCurve.from_ids(ids, 10_000)
    assert curve.num_accessible_rows == 10_000
    assert curve.probability[0] == pytest.approx(0.9)
    assert curve.distinct_rows(1_000) == pytest.approx(101, abs=1)
    assert curve.distinct_rows(10_000) > 500, "a longer trace would have met more rows"
    assert curve.hit_rate(1) == pytest.approx(0.81, abs=0.01), "a cache of one row meets an id that comes twice in a row"
    assert AccessCurve.from_ids(np.repeat(np.arange(10), 50), 10_000).num_accessible_rows == 10


@pytest.mark.parametrize("exponent", [0.0, 0.6, 0.8, 1.05, 1.3])
@pytest.mark.parametrize("num_rows", [3_000, 400_000])
def test_a_short_trace_tells_what_more_data_would(exponent: float, num_rows: int) -> None:
    """Otherwise updates, misses and merge traffic of large tables would be off: what was not seen is not all equally rare."""
    true = AccessCurve.zipf(num_rows, exponent)
    traced = AccessCurve.from_ids(draws(num_rows, exponent, 50_000), num_rows)
    assert (traced.num_rows * traced.probability).sum() == pytest.approx(1.0)
    for num_draws in (1_000, 20_000, 400_000):
        assert traced.distinct_rows(num_draws) == pytest.approx(true.distinct_rows(num_draws), rel=0.1)
    for cached_rows in (0.02 * num_rows, 0.1 * num_rows, 0.4 * num_rows):
        assert traced.missed_rows(2_000, cached_rows) == pytest.approx(true.missed_rows(2_000, cached_rows), rel=0.12, abs=10)


@pytest.mark.parametrize("ids", [[3], [3, 3], [0, 1, 2, 3], [5] * 7, [5] * 9 + [1]])
def test_the_shortest_traces_make_a_curve(ids: list[int]) -> None:
    curve = AccessCurve.from_ids(np.array(ids), 6)
    assert (curve.num_rows * curve.probability).sum() == pytest.approx(1.0)
    assert curve.num_accessible_rows <= 6
    assert (curve.probability <= 1 + 1e-9).all()
    assert curve.distinct_rows(len(ids)) == pytest.approx(len(set(ids)), rel=0.4)
