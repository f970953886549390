"""Steps of a run as they are held against a prediction. Layer: unit."""

import pytest

from torchrec_kstep.metrics.step_record import StepRecord
from torchrec_kstep.metrics.throughput import PHASES


def seconds(forward: float, optimizer: float) -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0) | {"forward_backward": forward, "optimizer": optimizer}


def test_medians_without_the_first_interval() -> None:
    """Otherwise the filling of caches would be taken for what the plan costs."""
    record = StepRecord()
    assert record.measured() is None
    record.add(10, seconds(9.0, 1.0), {"misses_rows": 500.0})  # type: ignore[arg-type]
    for forward, misses in ((1.0, 600.0), (2.0, 700.0), (30.0, 800.0)):
        record.add(10, seconds(forward, 0.5), {"misses_rows": misses})  # type: ignore[arg-type]
    measured = record.measured()
    assert measured is not None
    assert measured.num_steps == 30
    assert measured.forward_backward_s == pytest.approx(0.2)
    assert measured.optimizer_s == pytest.approx(0.05)
    assert measured.step_s == pytest.approx(0.25)
    assert measured.counters == {"tier_rows": pytest.approx(10.0)}


def test_a_run_of_one_interval_counts_it_and_micro_batches_are_told_apart() -> None:
    record = StepRecord(micro_batches=4)
    record.add(5, seconds(2.0, 1.0), {})  # type: ignore[arg-type]
    record.add_rounds({"rows_sent_bytes": 8_000.0}, k=10)
    measured = record.measured()
    assert measured is not None
    assert measured.num_steps == 20
    assert measured.forward_backward_s == pytest.approx(0.1)
    assert measured.counters == {"merge_bytes": pytest.approx(200.0)}


def test_a_counter_that_was_opened_anew_is_left_out() -> None:
    record = StepRecord()
    record.add(1, seconds(1, 1), {"misses_rows": 100.0})  # type: ignore[arg-type]
    record.add(1, seconds(1, 1), {"misses_rows": 3.0})  # type: ignore[arg-type]
    measured = record.measured()
    assert measured is not None
    assert measured.counters == {}
