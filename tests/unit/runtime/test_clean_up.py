"""Goal: the first cause of a failure survives whatever happens while cleaning up. Layer: runtime."""

import signal

import pytest

from torchrec_kstep.errors import DataError
from torchrec_kstep.metrics.sink import ConsoleSink, Sinks
from torchrec_kstep.runtime import cleaned_up
from torchrec_kstep.runtime.failure import Stopped, explain, one_line

FIRST = [DataError("the disk is full"), ValueError("odd"), Stopped(signal.SIGTERM), KeyboardInterrupt()]
SECOND = [OSError(28, "No space left on device"), Stopped(signal.SIGTERM), KeyboardInterrupt(), SystemExit(3)]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("first", FIRST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("second", SECOND, ids=lambda error: type(error).__name__)
def test_the_first_cause_is_raised_and_the_second_is_noted(first: BaseException, second: BaseException) -> None:
    told = one_line(first)
    with pytest.raises(type(first)) as caught, cleaned_up(lambda: fail(second)):
        fail(first)
    assert caught.value is first
    assert type(second).__name__ in caught.value.__notes__[-1]
    assert one_line(first) == told


def test_notes_are_told_with_our_own_errors() -> None:
    with pytest.raises(DataError) as caught, cleaned_up(lambda: fail(OSError("second"))):
        raise DataError("first")
    assert explain(caught.value) == "first\ncleaning up after this failed as well: OSError: second"


def test_a_failing_clean_up_behind_a_good_block_is_a_failure() -> None:
    with pytest.raises(OSError, match="No space"), cleaned_up(lambda: fail(OSError(28, "No space left on device"))):
        pass


def test_all_sinks_are_closed_where_one_fails() -> None:
    closed: list[str] = []

    class Recording(ConsoleSink):
        def __init__(self, name: str, error: Exception | None = None) -> None:
            super().__init__("none")
            self._name, self._error = name, error

        def close(self) -> None:
            closed.append(self._name)
            if self._error is not None:
                raise self._error

    with pytest.raises(OSError, match="second"):
        Sinks([Recording("first"), Recording("second", OSError("second")), Recording("third")]).close()
    assert closed == ["first", "second", "third"]
