"""One job over all ranks: how they meet, share values made by rank 0, and end together.

A rank that fails records its cause in the store before it leaves. The first cause is printed in full by the rank it
happened on; every other rank says one short line. A rank killed without a word is named by its missing heartbeat.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from torchrec_kstep.config.schema import DistributedConfig
from torchrec_kstep.errors import RankFailure
from torchrec_kstep.runtime import failure
from torchrec_kstep.runtime.attempt import clean_store
from torchrec_kstep.runtime.failure import Failure
from torchrec_kstep.runtime.watch import POLL_S, Watch
from torchrec_kstep.world import World

_POLL_S = 0.1
_SILENT = "does not answer: it was killed, ran out of memory or crashed without a message, or it is stopped (SIGSTOP, a debugger)"
_SILENCE_S = 6 * POLL_S
_SILENCE_WHILE_WAITING_S = 30.0
_LINGER_S = 4 * POLL_S


class Job:
    """This rank's handle on the job: the store, the process group, and values shared by rank 0."""

    def __init__(self, world: World, config: DistributedConfig, store: Store | None = None) -> None:
        """Meets the other ranks at the store. Must be called on all ranks; waits up to `config.start_timeout_s`.

        Args:
            world: who this rank is.
            config: deadlines and backend.
            store: a store common to all ranks; `None` = the one that torchrun's environment names.
        """
        self.world = world
        self._config = config
        self._timeout = timedelta(seconds=config.timeout_s)
        self.store = store if store is not None else _meet(world, timedelta(seconds=config.start_timeout_s))
        self._watch = Watch(self.store.clone(), world.rank)  # type: ignore[attr-defined]  # absent from torch's stubs only
        self._at_end: list[Callable[[], None]] = []
        self._on_failure: list[Callable[[], None]] = []

    def start(self) -> None:
        """Starts to watch for failures and signals."""
        self.store.set(failure.heartbeat_key(self.world.rank), "0")
        self._watch.start()

    def init_process_group(self) -> None:
        """Forms the default process group, whose collectives fail after `timeout_s`. Collective."""
        dist.init_process_group(
            self._config.backend,
            store=PrefixStore("process_group", self.store),
            rank=self.world.rank,
            world_size=self.world.world_size,
            timeout=self._timeout,
        )

    def share(self, key: str, make: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Returns rank 0's `make()` on every rank. Not a torch collective: works before the process group is there.

        Args:
            key: name of the value, used once in a job.
            make: called on rank 0 only; its result must survive JSON.
            timeout_s: how long the others wait; `None` = the deadline of collectives.

        Raises:
            RankFailure: rank 0 failed, died, or did not answer in time.
        """
        if self.world.is_main:
            value = make()
            self.store.set(f"shared/{key}", json.dumps(value))
            return value
        deadline_s = time.monotonic() + (self._config.timeout_s if timeout_s is None else timeout_s)
        beat, beat_seen_s = b"", time.monotonic()
        while not self.store.check([f"shared/{key}"]):
            if first := failure.recorded(self.store):
                raise RankFailure(f"rank {first.rank} failed: {first.cause}")
            now_s = time.monotonic()
            if self.store.check([failure.heartbeat_key(0)]) and (latest := self.store.get(failure.heartbeat_key(0))) != beat:
                beat, beat_seen_s = latest, now_s
            if now_s > deadline_s or now_s - beat_seen_s > _SILENCE_WHILE_WAITING_S:
                why = "in time" if now_s > deadline_s else f"and shows no sign of life for {_SILENCE_WHILE_WAITING_S:.0f} s"
                raise RankFailure(f"waited for rank 0 to provide {key!r}; it did not answer {why}")
            time.sleep(_POLL_S)
        return json.loads(self.store.get(f"shared/{key}"))

    def finish(self) -> None:
        """Ends the job in good order: no rank leaves before all have arrived. Collective.

        Raises:
            RankFailure: a rank did not arrive within the deadline; the message names it.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        if not self.world.is_main:
            self._watch.stop()  # first: rank 0 may leave, and the store with it, as soon as this rank is known to be done
        self.store.set(f"done/{self.world.rank}", "1")
        if self.world.is_main:  # it may hold the store, so it leaves last
            self._wait_for_others()
            self._watch.stop()

    def _wait_for_others(self) -> None:
        missing = list(range(1, self.world.world_size))
        deadline_s = time.monotonic() + self._config.timeout_s
        while missing := [rank for rank in missing if not self.store.check([f"done/{rank}"])]:
            if first := failure.recorded(self.store):
                raise RankFailure(f"rank {first.rank} failed: {first.cause}")
            if time.monotonic() > deadline_s:
                raise RankFailure(f"ranks {missing} did not reach the end of the job within {self._config.timeout_s:g} s")
            time.sleep(_POLL_S)

    def fail(self, error: BaseException) -> int:
        """Prints why this rank ends and returns its exit code; in the whole job the cause is printed once. Not collective."""
        self._watch.let_finish()  # launchers send SIGTERM while the cause is still being looked for
        rank = self.world.rank
        first = self._watch.first_failure
        if first is None and self._has_store():
            first = self._first_failure(error)
        if first is None and failure.is_from_elsewhere(error):
            _say(f"rank {rank} stopped: lost the job's store, because the process that holds it ended without a message")
        elif first is not None and first.reported_by != rank:
            _say(f"rank {rank} stopped, because rank {first.rank} failed first")
        elif first is not None and first.rank != rank:
            _say(f"error: rank {first.rank} {first.cause}")
        else:
            self._explain(error)
        self._clean_up_failure()
        return failure.exit_code(error)

    def _explain(self, error: BaseException) -> None:
        where = f" (rank {self.world.rank})" if self.world.world_size > 1 else ""
        why = failure.explain(error)
        if failure.is_timeout(error):
            why = f"waited {self._config.timeout_s:g} s (distributed.timeout_s) for other ranks, which live but did not take part:\n{why}"
        _say(f"error{where}: {why}")

    def _has_store(self) -> bool:
        """Whether the store still answers. Asking a TCP store that has gone would print a page of its own."""
        store = self.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore) or self.world.is_main:
            return True
        try:
            socket.create_connection((store.host, store.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _first_failure(self, error: BaseException) -> Failure | None:
        """The job's first failure: the one on record, or a peer that died silently, or else `error`; None without a store."""
        rank, world_size = self.world.rank, self.world.world_size
        others = [other for other in range(world_size) if other != rank]
        mine = Failure(rank, failure.one_line(error), reported_by=rank)
        try:
            is_first = failure.recorded(self.store) is None
            if is_first and failure.is_from_elsewhere(error) and (silent := failure.silent_ranks(self.store, others, _SILENCE_S)):
                mine = Failure(silent[0], _SILENT, reported_by=rank)
            failure.record(self.store, mine)
            first = failure.recorded(self.store)
            if self.world.is_main:  # it may hold the store: let the others read the cause before it goes
                self._wait_until_seen(others)
        except RuntimeError:  # the store's own errors
            return None
        return first

    def _wait_until_seen(self, ranks: list[int]) -> None:
        deadline_s = time.monotonic() + (_LINGER_S if ranks else 0.0)
        while time.monotonic() < deadline_s and not self.store.check([failure.seen_key(rank) for rank in ranks]):
            time.sleep(_POLL_S)

    def at_end(self, action: Callable[[], None]) -> None:
        """Has `action` called when this rank's part of the job is over, whichever way it ends."""
        self._at_end.append(action)

    def on_failure(self, action: Callable[[], None]) -> None:
        """Has `action` called when this rank fails, after the cause is told and before its process ends; the last one first."""
        self._on_failure.append(action)

    def _clean_up_failure(self) -> None:
        while self._on_failure:
            try:
                self._on_failure.pop()()
            except OSError as error:
                _say(f"cleaning up after this failed as well: {error}")

    def close(self) -> None:
        """Stops the watch thread, gives the signal handlers back, and calls what `at_end` collected. Safe to call twice."""
        self._watch.stop()
        while self._at_end:
            self._at_end.pop()()


def run(world: World, config: DistributedConfig, body: Callable[[Job], int], store: Store | None = None) -> int:
    """Runs `body` as this rank's part of a job and returns its exit code.

    In a job of several ranks, a rank whose `body` raises ends its process here and now, without taking down a process
    group that its peers may be stuck in: their sockets close, and they end too.

    Args:
        world: who this rank is.
        config: deadlines and backend.
        body: the work; gets the job, returns an exit code.
        store: a store common to all ranks; `None` = the one that torchrun's environment names.
    """
    try:
        job = Job(world, config, store)
    except RankFailure as error:
        _say(f"error: {error}")
        return failure.EXIT_FAILURE
    job.start()
    try:
        code = body(job)
        job.finish()
    except BaseException as error:  # every way to end a rank is reported, interrupts included
        code = job.fail(error)
        if world.world_size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        job.close()
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _meet(world: World, timeout: timedelta) -> Store:
    """Connects to the store that all ranks of the job share."""
    if world.world_size == 1:
        return HashStore()
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))
    except (ValueError, RuntimeError) as error:
        raise RankFailure(
            f"rank {world.rank} could not meet the other {world.world_size - 1} ranks within {timeout.total_seconds():g} s: "
            f"{error}; start all ranks with torchrun, which sets MASTER_ADDR and MASTER_PORT"
        ) from None
    assert isinstance(store, Store)
    return clean_store(store, world, timeout.total_seconds())
