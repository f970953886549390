"""What goes wrong on one rank is told on all of them."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_kstep.errors import CheckpointError, KStepError

T = TypeVar("T")


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
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = work()
    except CheckpointError as error:
        problem = str(error)
    except (KStepError, OSError) as error:
        problem = f"rank {dist.get_rank()}: {error}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next((text for text in problems if text is not None), None):
        raise CheckpointError(first)
    return cast(T, result)
