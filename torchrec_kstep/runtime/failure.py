"""The record of the first failure of a job, and how an exception becomes text for people. No threads, no processes."""

import json
import signal
import time
import traceback
from dataclasses import dataclass
from typing import Protocol

from torchrec_kstep.errors import ConfigError, KStepError, RankFailure

_FAILURE_KEY = "failure"
_PEER_LOSS_SIGNS = ("connection closed by peer", "connection reset", "broken pipe", "socket", "recvvalue failed", "failed to recv")
_TIMEOUT_SIGNS = ("timed out", "timeout")

EXIT_FAILURE = 1
EXIT_CONFIG = 2


class Store(Protocol):
    """What is used of `torch.distributed`'s key-value stores."""

    def set(self, key: str, value: str) -> None:
        """Writes a key."""

    def get(self, key: str) -> bytes:
        """Reads a key, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Tells whether all keys are there."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Writes a key that is not there yet, and returns what is there now."""


class Stopped(BaseException):
    """A signal asked this process to end. Not an `Exception`, so that nothing on the way mistakes it for a fault."""

    def __init__(self, signum: int) -> None:
        """Remembers which signal."""
        super().__init__(signum)
        self.signum = signum

    def __str__(self) -> str:
        """The signal's name."""
        return signal.Signals(self.signum).name


@dataclass(frozen=True)
class Failure:
    """Which rank failed first, its cause in one line, and who found out: another rank where the first died silently."""

    rank: int
    cause: str
    reported_by: int


def record(store: Store, failure: Failure) -> bool:
    """Publishes `failure` unless another is published already; returns whether `failure` is the one on record."""
    mine = json.dumps([failure.rank, failure.cause, failure.reported_by])
    return store.compare_set(_FAILURE_KEY, "", mine).decode() == mine


def recorded(store: Store) -> Failure | None:
    """The first failure of the job, if there is one."""
    if not store.check([_FAILURE_KEY]):
        return None
    return Failure(*json.loads(store.get(_FAILURE_KEY)))


def is_from_elsewhere(error: BaseException) -> bool:
    """Whether `error` is what this rank would see if another one went away or got stuck.

    Collectives and the store raise plain RuntimeErrors then, told apart by their text only.
    """
    if isinstance(error, RankFailure) or (isinstance(error, Stopped) and error.signum == signal.SIGTERM):
        return True  # a launcher sends SIGTERM to the other ranks when one is gone
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in (*_PEER_LOSS_SIGNS, *_TIMEOUT_SIGNS))


def one_line(error: BaseException) -> str:
    """The cause in one line: our own errors by their text, others with their type."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, KStepError) else f"{type(error).__name__}: {text}"


def explain(error: BaseException) -> str:
    """The cause in full: our own errors are written for people; others come with a traceback."""
    if isinstance(error, Stopped):
        return f"stopped by {error}; start it again with the same run_dir to continue from the newest checkpoint"
    if isinstance(error, KStepError):
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "".join(traceback.format_exception(error)).rstrip()


def exit_code(error: BaseException) -> int:
    """The shell's exit code for `error`."""
    if isinstance(error, Stopped):
        return 128 + error.signum
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILURE


def is_timeout(error: BaseException) -> bool:
    """Whether `error` looks like a collective that waited too long."""
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _TIMEOUT_SIGNS)


def heartbeat_key(rank: int) -> str:
    """Key under which `rank` counts up while it lives."""
    return f"alive/{rank}"


def seen_key(rank: int) -> str:
    """Key that `rank` sets when it knows of the first failure."""
    return f"seen/{rank}"


def silent_ranks(store: Store, ranks: list[int], window_s: float) -> list[int]:
    """Ranks that had a heartbeat and did not advance it for `window_s` seconds. Waits that long, unless `ranks` is empty."""
    if not ranks:
        return []
    known = [rank for rank in ranks if store.check([heartbeat_key(rank)])]
    before = {rank: store.get(heartbeat_key(rank)) for rank in known}
    time.sleep(window_s)
    return [rank for rank in known if store.get(heartbeat_key(rank)) == before[rank]]
