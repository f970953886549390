"""How bytes get from replica to replica.

A round is a generator: it yields an `Exchange` to begin one, and a `Wait` when it needs what the other replicas addressed to it.
So the same code runs over a process group (`drive`) and, for studies, for many replicas in lockstep within one process
(`in_process`); and between the two a round does something useful.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from torchrec_kstep.errors import MergeError
from torchrec_kstep.ops import messages
from torchrec_kstep.units import format_bytes, format_seconds

Result = TypeVar("Result")
_MAX_TAG = 1 << 30


@dataclass(frozen=True)
class Exchange:
    """Each replica hands a part to each, itself included; answered by an `Arrival`.

    Attributes:
        phase: what is exchanged, for messages and counters.
        parts: N tensors `[bytes]` uint8, by receiver; they must not change until the arrival was waited for.
        received_bytes: N sizes of what each replica hands to this one; known beforehand, so that no size has to be asked for.
    """

    phase: str
    parts: Sequence[torch.Tensor]
    received_bytes: Sequence[int]


class Arrival(Protocol):
    """What an exchange will bring."""

    def wait(self) -> list[torch.Tensor]:
        """Returns N tensors `[bytes]` uint8, by sender, once they are there and this replica's own parts are sent.

        Raises:
            MergeError: a replica is gone, or later than the deadline.
        """


@dataclass(frozen=True)
class Wait:
    """Asks for what an exchange brings; answered by N tensors."""

    arrival: Arrival


Rounds = Generator[Exchange | Wait, Any, Result]


def exchanged(exchange: Exchange) -> Rounds[list[torch.Tensor]]:
    """Exchanges with nothing to do meanwhile."""
    arrival = yield exchange
    received: list[torch.Tensor] = yield Wait(arrival)
    return received


class Transport(Protocol):
    """Joins the replicas of a merge group.

    Attributes:
        index: which replica this is.
        num_replicas: how many there are.
    """

    @property
    def index(self) -> int: ...  # noqa: D102 - described above

    @property
    def num_replicas(self) -> int: ...  # noqa: D102 - described above

    def begin(self, exchange: Exchange) -> Arrival:
        """Begins an exchange; every replica begins the same ones in the same order.

        Raises:
            MergeError: a replica is gone.
        """


def drive(rounds: Rounds[Result], transport: Transport) -> Result:
    """Runs a generator of exchanges to its end and returns its result. Collective."""
    try:
        request = next(rounds)
        while True:
            answer = transport.begin(request) if isinstance(request, Exchange) else request.arrival.wait()
            request = rounds.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        rounds.close()


class ProcessGroupTransport:
    """Replicas that are processes: each exchange is a send to and a receive from every other replica, straight from and to its bytes.

    Give it a group of its own: a round may run in a thread beside training, and a group that missed a deadline is lost.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Takes the merge group of this rank; `timeout_s` bounds each wait."""
        self.group = group
        self.timeout_s = timeout_s
        self.index = group.rank()
        self.num_replicas = group.size()
        self._tag = 0

    def begin(self, exchange: Exchange) -> Arrival:
        """See `Transport`."""
        self._tag = (self._tag + 1) % _MAX_TAG
        return _Posted(self, exchange, self._tag)


class _Posted:
    """Sends and receives that are under way."""

    def __init__(self, transport: ProcessGroupTransport, exchange: Exchange, tag: int) -> None:
        self._transport = transport
        self._exchange = exchange
        own = transport.index
        sizes = [0 if replica == own else size for replica, size in enumerate(exchange.received_bytes)]
        received = messages.empty(sum(sizes))
        self._parts = list(torch.split(received, sizes))
        self._parts[own] = exchange.parts[own]  # nobody needs a copy of it
        others = [replica for replica in range(transport.num_replicas) if replica != own]
        self._works: list[dist.Work] = []
        try:
            for replica in others:
                if self._parts[replica].numel():
                    self._add(dist.irecv(self._parts[replica], group=transport.group, tag=tag, group_src=replica))
            for replica in others:
                if exchange.parts[replica].numel():
                    self._add(dist.isend(exchange.parts[replica], group=transport.group, tag=tag, group_dst=replica))
        except RuntimeError as error:
            raise self._failure(error) from error

    def wait(self) -> list[torch.Tensor]:
        """See `Arrival`."""
        deadline_s = time.monotonic() + self._transport.timeout_s
        try:
            for work in self._works:
                work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))
        except RuntimeError as error:
            raise self._failure(error) from error
        self._works.clear()
        return self._parts

    def _add(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is not in the merge group"
        self._works.append(work)

    def _failure(self, error: RuntimeError) -> MergeError:
        transport = self._transport
        num_bytes = sum(part.numel() for part in self._exchange.parts)
        return MergeError(
            f"merge round, {self._exchange.phase}: replica {transport.index} of {transport.num_replicas} (ranks "
            f"{dist.get_process_group_ranks(transport.group)}) could not exchange {format_bytes(num_bytes)} within "
            f"{format_seconds(transport.timeout_s)}: {error}. Another rank failed or is late; its own message tells. Training continues "
            "from the last checkpoint"
        )
