"""Goal: work ahead is bounded, ordered, honest about failures, and ends with its consumer. Layer: background threads."""

import threading
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.data.background import map_ahead, work_ahead


def numbers(end: int, fail_at: int | None = None, closed: list[bool] | None = None) -> Generator[int, None, None]:
    try:
        for number in range(end):
            if number == fail_at:
                raise ValueError(f"item {number}")
            yield number
    finally:
        if closed is not None:
            closed.append(True)


@given(num_items=st.integers(0, 20), depth=st.integers(1, 5))
def test_all_items_come_in_order(num_items: int, depth: int) -> None:
    assert list(work_ahead(numbers(num_items), depth, "kstep-test")) == list(range(num_items))


def test_a_failure_comes_after_the_items_before_it() -> None:
    items = work_ahead(numbers(9, fail_at=4), 2, "kstep-test")
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="item 4"):
        next(items)
    assert list(items) == []


@pytest.mark.parametrize("num_taken", [1, 2, 10])
def test_closing_ends_the_thread_and_closes_the_source(num_taken: int) -> None:
    closed: list[bool] = []
    items = work_ahead(numbers(1000, closed=closed), 3, "kstep-closing")
    for _ in range(num_taken):
        next(items)
    items.close()
    assert closed == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "kstep-closing"]


@given(num_items=st.integers(0, 20), num_threads=st.integers(1, 4))
def test_mapping_keeps_the_order(num_items: int, num_threads: int) -> None:
    assert list(map_ahead(lambda number: number * number, range(num_items), num_threads)) == [n * n for n in range(num_items)]


def test_mapping_raises_in_place_of_the_result_and_runs_ahead_within_bounds() -> None:
    taken: list[int] = []

    def items() -> Generator[int, None, None]:
        for number in range(100):
            taken.append(number)
            yield number

    results = map_ahead(lambda number: 1 // (number - 5), items(), 2)
    assert [next(results) for _ in range(5)] == [-1, -1, -1, -1, -1]
    assert len(taken) <= 8
    with pytest.raises(ZeroDivisionError):
        next(results)
