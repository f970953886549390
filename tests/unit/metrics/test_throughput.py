"""Layer: metrics. Goal: every second is charged to exactly one phase."""

import time

import pytest

from torchrec_kstep.metrics.throughput import PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_an_inner_phase_pauses_the_outer_one(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("forward_backward"):
        clock[0] += 3
        with timer.phase("optimizer"):
            clock[0] += 2
        clock[0] += 1
    clock[0] += 50  # outside of all phases
    seconds = timer.take()
    assert (seconds["forward_backward"], seconds["optimizer"]) == (4, 2)
    assert sum(timer.take().values()) == 0


def test_waiting_for_items_counts_as_data_wait_only(clock: list[float]) -> None:
    def slow() -> object:
        for item in range(3):
            clock[0] += 2
            yield item
        clock[0] += 5

    timer = PhaseTimer()
    with timer.phase("forward_backward"):
        for _ in timer.waiting_for(slow()):  # type: ignore[var-annotated,arg-type]
            clock[0] += 1
    seconds = timer.take()
    assert seconds["data_wait"] == 11
    assert seconds["forward_backward"] == 3


def test_take_inside_a_phase_charges_what_has_passed(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("evaluation"):
        clock[0] += 2
        assert timer.take()["evaluation"] == 2
        clock[0] += 1
    assert timer.take()["evaluation"] == 1
