"""Fitting coefficients to measured steps: what was put in comes out, outliers count little, error bars cover. Layer: unit."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_kstep.cost import QUANTITIES, AccessCurve, Coefficients, StepSetup, Table, shard_work
from torchrec_kstep.cost.coefficients import FITTED
from torchrec_kstep.cost.fit import Observation, fit, nonnegative_least_squares
from torchrec_kstep.topology import ClusterTopology, Drive, DrivePoint, Exchange, Host, Link, NumaNode
from torchrec_kstep.units import GIB

TRUE = Coefficients().having(
    {"step_s": 8e-3, "sample_s": 2e-6, "lookup_id_s": 150e-9, "update_row_s": 20e-9, "core_shard_s": 90e-6, "collective_s": 900e-6}
)


def machine() -> ClusterTopology:
    drive = Drive("ssd0", 10**12, (DrivePoint(4096, 64, 5e4),), 1e9)
    node = NumaNode("numa0", 16 * GIB, 1e10, 4e9, 2)
    return ClusterTopology("m", (Host("h", (node,), Exchange(1e9, 100.0), drives=(drive,), links=(Link(("numa0", "ssd0"), 1e10, 1.0),)),))


def observations(noise: float = 0.0, seed: int = 1) -> list[Observation]:
    """Runs of many shapes whose times are those of the model under `TRUE`."""
    rng = np.random.default_rng(seed)
    found = []
    shapes = itertools.product([1, 2, 4], [256, 2048], [4, 20], [("table_wise", "dram"), ("row_wise", "ssd")])
    for number, (ranks, batch, num_tables, (sharding, tier)) in enumerate(shapes):
        setup = StepSetup(batch, ranks, ranks, dense_parameters=50_000 * (1 + number % 3), flops_per_sample=3e5 * (1 + number % 4))
        work = np.zeros((ranks, len(QUANTITIES)))
        for index in range(num_tables):
            table = Table(f"t{index}", 100_000, 16 * (1 + number % 4), AccessCurve.zipf(100_000, 1.05), 1.0 + number % 5, 1, 256)
            num_shards = ranks if sharding == "row_wise" else 1
            vector = shard_work(table, setup, sharding, num_shards, tier, 8_000, on_device=False).vector  # type: ignore[arg-type]
            for rank in range(ranks) if sharding == "row_wise" else [index % ranks]:
                work[rank] += vector
        one = Observation(f"run{number}", machine(), setup, 1.0, work, 1.0, 1.0)
        step = one.predicted(TRUE)
        factor = float(np.exp(noise * rng.standard_normal()))
        optimizer_s = step.seconds_of("optimizer", "merge") * factor
        found.append(Observation(one.name, one.topology, setup, 1.0, work, step.seconds * factor, optimizer_s))
    return found


def test_predictions_meet_what_was_measured_under_other_coefficients() -> None:
    runs = observations()
    found = fit(runs)
    before = [abs(run.predicted(Coefficients()).seconds / run.step_s - 1) for run in runs]
    after = [abs(run.predicted(found.coefficients).seconds / run.step_s - 1) for run in runs]
    assert np.median(before) > 0.1
    assert max(after) < 0.05
    assert found.median_error < 0.05
    assert found.num_runs == len(runs)


def test_a_half_predicts_the_other_and_error_bars_cover_it() -> None:
    """Otherwise the fit would only describe the runs that it has seen."""
    runs = observations(noise=0.08)
    found = fit(runs[::2])
    steps = [run.predicted(found.coefficients) for run in runs[1::2]]
    errors = [abs(step.seconds / run.step_s - 1) for step, run in zip(steps, runs[1::2], strict=True)]
    assert np.median(errors) < 0.15
    declared = found.coefficients.measured_error * np.array([step.spread_s for step in steps])
    covered = [abs(step.seconds - run.step_s) <= bar for step, run, bar in zip(steps, runs[1::2], declared, strict=True)]
    assert np.mean(covered) >= 0.8


def test_one_run_on_a_busy_machine_does_not_spoil_the_others() -> None:
    runs = observations()
    spoiled = [*runs[:-1], Observation("busy", runs[-1].topology, runs[-1].setup, 1.0, runs[-1].work, 10 * runs[-1].step_s, 0.0)]
    found = fit(spoiled)
    errors = [abs(run.predicted(found.coefficients).seconds / run.step_s - 1) for run in runs[:-1]]
    assert np.median(errors) < 0.1


def test_no_coefficient_becomes_negative_and_what_runs_do_not_tell_stays() -> None:
    alone = [run for run in observations(noise=0.2) if run.setup.world_size == 1]
    found = fit(alone).coefficients
    assert all(getattr(found, name) >= 0 for name in FITTED)
    assert found.merge_row_s == pytest.approx(Coefficients().merge_row_s, rel=1e-6), "there was no merge round"
    assert found.collective_s == pytest.approx(Coefficients().collective_s, rel=1e-6), "there was one rank"


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 runs, got 2"):
        fit(observations()[:2])


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_least_squares_without_negative_values_meet_their_conditions(size: int, seed: int) -> None:
    """Karush, Kuhn, Tucker: gradient zero where the value is positive, not pointing inwards where it is zero."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((size + 3, size))
    gram, moments = matrix.T @ matrix + 1e-3 * np.eye(size), matrix.T @ rng.standard_normal(size + 3)
    found = nonnegative_least_squares(gram, moments)
    gradient = gram @ found - moments
    assert (found >= 0).all()
    assert (abs(gradient[found > 0]) < 1e-6).all()
    assert (gradient[found == 0] > -1e-6).all()
