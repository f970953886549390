"""Ranks agree before they exchange: through the job's store and with a deadline, not by a collective.

Collectives cannot ask such questions: ranks that differ in what they are about to do would hang in them, or abort.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from torchrec_kstep.errors import DivergenceError, MergeError, RankFailure
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
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._store.set(self._key(number, self._world.rank), json.dumps({"facts": dict(facts), "ill": ill}))
        answers = self._answers(number, facts)
        if number:  # all ranks have come here, so nobody reads the last question any more
            self._store.delete_key(self._key(number - 1, self._world.rank))
        for rank, answer in enumerate(answers):
            if answer["ill"]:
                raise DivergenceError(f"rank {rank}: {answer['ill']}; nothing was merged, the last checkpoint is intact")
        first = answers[0]["facts"]
        for rank, answer in enumerate(answers):
            theirs = answer["facts"]
            if theirs != first:
                names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
                shown = "; ".join(f"{name} is {theirs.get(name)!r} there and {first.get(name)!r} on rank 0" for name in names[:_SHOWN])
                raise MergeError(
                    f"ranks cannot merge: rank {rank} differs from rank 0: {shown}. All ranks must take the same number of steps with the "
                    "same k and plan, and flush together; give all ranks equally many batches"
                )

    def _answers(self, number: int, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Waits for the answers of all ranks."""
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


def _shown(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
