"""A clean store for every attempt of a job.

When torchrun restarts the ranks, its store lives on in the agent and still holds what the last attempt wrote: its failure, its
heartbeats, its addresses. Restart counts do not tell attempts apart, because an agent whose own ranks did not fail does not
count. So rank 0 names the attempt, and every rank makes sure that the name was given to itself and not to its predecessor.
"""

import json
import time
import uuid
from typing import cast

from torch._C._distributed_c10d import PrefixStore, Store

from torchrec_kstep.errors import RankFailure
from torchrec_kstep.world import World

_POLL_S = 0.05
_ROSTER_KEY = "attempt/roster"


def clean_store(store: Store, world: World, timeout_s: float) -> Store:
    """Returns the part of `store` that belongs to this attempt alone. Must be called on all ranks.

    Every rank signs in under a name of its own making. Rank 0 publishes the attempt's identity with the names it has seen, again
    and again until all ranks have answered; a rank answers only when it finds its own name.

    Raises:
        RankFailure: a rank did not come within `timeout_s`; the message names it.
    """
    identity = uuid.uuid4().hex if world.is_main else _wait_for_roster(store, world, timeout_s)
    if world.is_main:
        _gather(store, world, identity, timeout_s)
    return PrefixStore(f"attempt/{identity}", store)


def _gather(store: Store, world: World, identity: str, timeout_s: float) -> None:
    """Rank 0's part: publishes the roster until everyone has answered."""
    end_s = time.monotonic() + timeout_s
    missing, published = list(range(1, world.world_size)), None
    while missing := [rank for rank in missing if not store.check([_answer_key(identity, rank)])]:
        present = [rank for rank in range(1, world.world_size) if store.check([_name_key(rank)])]
        roster = json.dumps({"identity": identity, "names": {rank: store.get(_name_key(rank)).decode() for rank in present}})
        if roster != published:
            store.set(_ROSTER_KEY, roster)
            published = roster
        if time.monotonic() > end_s:
            hosts = sorted({rank // world.local_world_size for rank in missing})
            raise RankFailure(
                f"{len(missing)} of {world.world_size} ranks did not come within {timeout_s:g} s: ranks {missing} of hosts {hosts}; "
                "look at their output, or raise distributed.start_timeout_s where starting is slow"
            )
        time.sleep(_POLL_S)


def _wait_for_roster(store: Store, world: World, timeout_s: float) -> str:
    """The other ranks' part: signs in, waits to be found on the roster, answers, and returns the attempt's identity."""
    name = uuid.uuid4().hex
    store.set(_name_key(world.rank), name)
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if store.check([_ROSTER_KEY]):
            roster = json.loads(store.get(_ROSTER_KEY))
            if roster["names"].get(str(world.rank)) == name:
                store.set(_answer_key(roster["identity"], world.rank), "1")
                return cast(str, roster["identity"])
        time.sleep(_POLL_S)
    raise RankFailure(
        f"rank {world.rank} waited {timeout_s:g} s for rank 0, which did not come: look at its output, or raise "
        "distributed.start_timeout_s where starting is slow"
    )


def _name_key(rank: int) -> str:
    return f"attempt/name/{rank}"


def _answer_key(identity: str, rank: int) -> str:
    return f"attempt/{identity}/answer/{rank}"
