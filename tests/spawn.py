"""Runs a function on several gloo ranks, each a process of its own, and brings back results or every traceback.

    def check(world: World, num_rows: int) -> float: ...        # at module level, arguments and result picklable

    def test_it(spawn_ranks):
        losses = spawn_ranks(check, 2, args=(100,))              # one result per rank, in rank order

Each process starts fresh (nothing of pytest's state is inherited), with the process group made through a file store (no
port to race for), torchrun's variables set as on hosts of `local_world_size` ranks, one thread, and torch seeded. The
processes are forked from a server that has imported torch and torchrec once, which saves their import of seconds each.
"""

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import pytest

from torchrec_kstep.world import World

PRELOADED = ["torch", "torch.distributed.checkpoint", "torchrec", "torchrec.distributed.planner", "torchrec.distributed.model_parallel"]
GRACE_S = 3.0  # for the other ranks to report in after the first failure


class SpawnRanks(Protocol):
    """What the fixture hands out."""

    def __call__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        local_world_size: int | None = None,
        timeout_s: float = 90.0,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Returns `fn(world, *args)` of each rank; see `run_ranks`."""


class RanksFailed(AssertionError):  # noqa: N818 - it is a failed test
    """At least one rank raised, died or ran out of time; the message holds what every rank said."""


@dataclass
class _Rank:
    """One child process and what is known of it."""

    process: BaseProcess
    connection: Connection
    stacks: Path
    outcome: tuple[str, Any] | None = None


@pytest.fixture
def spawn_ranks(tmp_path: Path) -> SpawnRanks:
    """Returns a function that runs another one on several ranks."""

    def run(
        fn: Callable[..., Any],
        world_size: int,
        local_world_size: int | None = None,
        timeout_s: float = 90.0,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        return run_ranks(fn, world_size, tmp_path, local_world_size, timeout_s, args, env)

    return run


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    folder: Path,
    local_world_size: int | None = None,
    timeout_s: float = 90.0,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(world, *args)` on every rank and returns the results by rank.

    Args:
        fn: a function at module level.
        world_size: number of processes.
        folder: where the file store and stack dumps go.
        local_world_size: ranks per simulated host; by default all ranks are on one.
        timeout_s: deadline for all of it, start included; also that of each collective.
        args: further arguments.
        env: further environment variables of the ranks.

    Raises:
        RanksFailed: a rank raised, died or did not end in time. The others are given a moment to fail too, then killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = folder / f"store_{time.monotonic_ns()}"
    deadline = time.monotonic() + timeout_s
    ranks = [
        _start(
            context,
            fn,
            World(rank, world_size, rank % (local_world_size or world_size), local_world_size or world_size),
            store,
            timeout_s,
            args,
            env,
        )
        for rank in range(world_size)
    ]
    try:
        _collect(ranks, deadline)
        late = [index for index, rank in enumerate(ranks) if rank.outcome is None]
        if late:
            _dump_stacks([ranks[index] for index in late])
    finally:
        for rank in ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.connection.close()
    if any(rank.outcome is None or rank.outcome[0] != "result" for rank in ranks):
        raise RanksFailed("\n".join(_report(index, rank, timeout_s) for index, rank in enumerate(ranks)))
    return [rank.outcome[1] for rank in ranks if rank.outcome is not None]


def _start(
    context: ForkServerContext,
    fn: Callable[..., Any],
    world: World,
    store: Path,
    timeout_s: float,
    args: Sequence[Any],
    env: Mapping[str, str] | None,
) -> _Rank:
    """Starts one rank."""
    receiver, sender = context.Pipe(duplex=False)
    stacks = store.with_name(f"{store.name}_stacks_{world.rank}")
    process = context.Process(
        target=_rank_main, args=(sender, fn, world, store, stacks, timeout_s, tuple(args), dict(env or {})), daemon=True
    )
    process.start()
    sender.close()
    return _Rank(process, receiver, stacks)


def _rank_main(
    sender: Connection,
    fn: Callable[..., Any],
    world: World,
    store: Path,
    stacks: Path,
    timeout_s: float,
    args: tuple[Any, ...],
    env: dict[str, str],
) -> None:
    """Runs in the child: sets the stage, calls `fn`, sends what came of it."""
    import torch
    import torch.distributed as dist

    with stacks.open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = (world.rank, world.world_size, world.local_rank, world.local_world_size)
        os.environ.update(env | {name: str(value) for name, value in zip(names, values, strict=True)})
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.world_size, timeout=timedelta(seconds=timeout_s)
            )
            dist.barrier()  # or a rank that fails at once would break the connecting of the others and hide their reasons
            outcome = ("result", fn(world, *args))
            dist.destroy_process_group()
        except BaseException:  # also SystemExit and pytest's skip: everything must be told to the parent
            outcome = ("traceback", traceback.format_exc())
        # Plain pickle: torch's own would pass tensors through shared memory that ends with this process.
        sender.send_bytes(pickle.dumps(outcome))


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Waits for outcomes until all are there, the deadline, or a grace period after the first failure."""
    while True:
        waiting = {rank.connection: rank for rank in ranks if rank.outcome is None}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())) if waiting else []
        if not ready:
            return
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]  # wait returns what it was given
            try:
                rank.outcome = pickle.loads(rank.connection.recv_bytes())
            except EOFError:
                rank.process.join(timeout=GRACE_S)
                rank.outcome = ("death", rank.process.exitcode)
            if rank.outcome is not None and rank.outcome[0] != "result":
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    """Asks ranks that have not reported for the stacks of their threads."""
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None and rank.stacks.exists():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # the handler writes at once, yet in another process


def _report(index: int, rank: _Rank, timeout_s: float) -> str:
    """Says what became of one rank."""
    head = f"--- rank {index}: "
    if rank.outcome is None:
        stacks = rank.stacks.read_text() if rank.stacks.exists() else ""
        return f"{head}still running when another failed, or after {timeout_s} s:\n{stacks}"
    kind, value = rank.outcome
    if kind == "death":
        return f"{head}died with exit code {value} (negative: the number of a signal)"
    return f"{head}ok" if kind == "result" else f"{head}raised\n{value}"
