"""Ranks agree before they exchange: through the job's store and with a deadline, not by a collective.

Collectives cannot ask such questions: ranks that differ in what they are about to do would hang in them, or abort.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from torchrec_kstep.errors import DivergenceError, LaunchError, MergeError, RankFailure
from torchrec_kstep.world import World

_POLL_S = 0.02
_SHOWN = 4


class RoundAgreement:
    """Compares facts of all ranks before each round. One per optimizer, used on all ranks alike."""

    def __init__(self, store: Store, world: World, timeout_s: float, name: str = "round") -> None:
        """Asks nothing yet.

        Args:
            store: common to all ranks; no other thread may wait on this connection.
            world: who this rank is.
            timeout_s: how long to wait for the other ranks, for each question.
            name: tells several agreements of one job apart.
        """
        self._store = store
        self._world = world
        self._timeout_s = timeout_s
        self._name = name
        self._num_asked = 0

    def agree(self, facts: Mapping[str, Any], ill: str = "") -> None:
        """Makes sure that all ranks are here, well, and hold the same `facts`. Must be called on all ranks.

        Args:
            facts: values by name that survive JSON.
            ill: why this rank must not be merged, e.g. a parameter that is NaN; "" if it is well.

        Raises:
            RankFailure: a rank did not come within the deadline; named.
            DivergenceError: a rank is ill; its own words.
            MergeError: facts differ; named with both values.
        """
        answers = self.answers(facts, ill)
        for rank, answer in enumerate(answers):
            if answer["ill"]:
                raise DivergenceError(f"rank {rank}: {answer['ill']}; nothing was merged, the last checkpoint is intact")
        if found := _difference([answer["facts"] for answer in answers]):
            raise MergeError(
                f"ranks cannot merge: {found}. All ranks must take the same number of steps with the same k and plan, and merge together; "
                "give all ranks equally many batches"
            )

    def answers(self, facts: Mapping[str, Any], ill: str = "") -> list[dict[str, Any]]:
        """Returns what all ranks answered, by rank: `facts` and `ill`. Must be called on all ranks.

        Raises:
            RankFailure: a rank did not come within the deadline; named.
        """
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._store.set(self._key(number, self._world.rank), json.dumps({"facts": dict(facts), "ill": ill}))
        found = self._wait(number, facts)
        if number:  # all ranks have come here, so nobody reads the last question any more
            self._store.delete_key(self._key(number - 1, self._world.rank))
        return found

    def _wait(self, number: int, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        keys = [self._key(number, rank) for rank in range(self._world.world_size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:  # the store's own: the deadline, or its process has gone
            missing = self._missing(keys)
            if missing is None:
                raise RankFailure(f"lost the job's store while waiting for a merge round ({facts}): {error}") from error
            raise RankFailure(
                f"ranks {missing} did not come to the merge round of rank {self._world.rank} ({_shown(facts)}) within "
                f"{self._timeout_s:g} s: they failed, hang, or had fewer batches than the others; look at their output"
            ) from error
        return [json.loads(self._store.get(key)) for key in keys]

    def _missing(self, keys: list[str]) -> list[int] | None:
        """Returns the ranks that have not answered; None without a store."""
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            try:
                return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            except RuntimeError:
                time.sleep(_POLL_S)
        return None

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/{number}/{rank}"


def check_same(store: Store, world: World, topic: str, facts: Mapping[str, Any], timeout_s: float) -> None:
    """Makes sure that all ranks were told the same; unlike `doctor.check_agreement`, all ranks fail if one differs. Call it on all ranks.

    Args:
        store: common to all ranks.
        world: who this rank is.
        topic: what the facts are about; asked once a store.
        facts: values by name that survive JSON.
        timeout_s: how long to wait for the other ranks.

    Raises:
        RankFailure: a rank did not come.
        LaunchError: facts differ; named with both values.
    """
    answers = RoundAgreement(store, world, timeout_s, topic).answers(facts)
    if found := _difference([answer["facts"] for answer in answers]):
        raise LaunchError(f"{topic}: {found}; start all ranks with the same code, configuration and plan")


def _difference(facts: list[dict[str, Any]]) -> str:
    """Says in what a rank differs from rank 0; "" where none does."""
    first = facts[0]
    for rank, theirs in enumerate(facts):
        if theirs != first:
            names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
            shown = "; ".join(f"{name} is {theirs.get(name)!r} there and {first.get(name)!r} on rank 0" for name in names[:_SHOWN])
            return f"rank {rank} differs from rank 0: {shown}"
    return ""


def _shown(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
