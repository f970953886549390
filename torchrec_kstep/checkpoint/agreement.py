"""What goes wrong on one rank is told on all of them."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_kstep.errors import CheckpointError, DamagedCheckpointError, KStepError

T = TypeVar("T")
_POLL_S = 2.0  # a fraction of any deadline of a collective
_TELL_S = 30.0
_log = logging.getLogger(__name__)


def on_all_ranks(verb: str, collective: Callable[[], object]) -> None:
    """Runs a `torch.distributed.checkpoint` call and says in one line what went wrong on which rank.

    Raises:
        CheckpointError: on all ranks.
    """
    try:
        collective()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, Exception):
            raise cause from None  # a signal or an exit on its way out, not a fault of the checkpoint
        text = str(cause) if isinstance(cause, KStepError) else f"{type(cause).__name__}: {cause}"
        raise CheckpointError(f"{verb} failed on rank {rank}: {text}") from cause


def agree(work: Callable[[], T]) -> T:
    """Runs `work` on every rank; if it fails on any, all raise the error of the lowest such rank. Collective.

    Raises:
        CheckpointError: with that rank's message, where it is one of ours or the operating system's.
        DamagedCheckpointError: every rank that failed found damage.
    """
    result: T | None = None
    problem: tuple[bool, str] | None = None  # whether it is damage, and the message
    try:
        result = work()
    except CheckpointError as error:
        problem = isinstance(error, DamagedCheckpointError), str(error)
    except (KStepError, OSError) as error:
        problem = False, f"rank {dist.get_rank()}: {error}"
    problems: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    failed = sorted((one for one in problems if one is not None), key=lambda one: one[0])  # what is no damage first
    if failed:
        is_damage, text = failed[0]
        raise (DamagedCheckpointError if is_damage else CheckpointError)(text)
    return cast(T, result)


def sum_over_ranks(number: int) -> int:
    """Adds up a number of every rank. Collective."""
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return sum(numbers)


def agree_at_length(work: Callable[[], T], what: str) -> T:
    """As `agree`, for work that may take longer on one rank than others may wait in a collective: it runs in a thread. Collective.

    Args:
        work: safe in another thread, and not collective.
        what: said on rank 0 every half minute, with the seconds that it has taken.
    """
    begin_s = told_s = time.monotonic()
    with ThreadPoolExecutor(1, thread_name_prefix="kstep-checkpoint") as pool:
        future = pool.submit(work)
        is_done = [False] * dist.get_world_size()
        while not all(is_done):
            wait([future], timeout=_POLL_S)
            dist.all_gather_object(is_done, future.done())
            now_s = time.monotonic()
            if dist.get_rank() == 0 and now_s - told_s > _TELL_S:
                told_s = now_s
                _log.warning("%s: %.0f s so far, %d of %d ranks done", what, now_s - begin_s, sum(is_done), len(is_done))
    return agree(future.result)
