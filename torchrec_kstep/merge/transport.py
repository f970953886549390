"""How bytes get from replica to replica.

A round is a generator: it yields `Exchange`s and is sent what the other replicas addressed to it. So the same code runs over
a process group (`drive`) and, for studies, for many replicas in lockstep within one process (`in_process`).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from torchrec_kstep.errors import MergeError
from torchrec_kstep.units import format_bytes, format_seconds

Result = TypeVar("Result")


@dataclass(frozen=True)
class Exchange:
    """Each replica hands a part to each, itself included.

    Attributes:
        phase: what is exchanged, for messages and counters.
        parts: N tensors `[bytes]` uint8, by receiver.
        received_bytes: N sizes of what each replica hands to this one; known beforehand, so that no size has to be asked for.
    """

    phase: str
    parts: Sequence[torch.Tensor]
    received_bytes: Sequence[int]


Rounds = Generator[Exchange, list[torch.Tensor], Result]


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

    def exchange(self, exchange: Exchange) -> list[torch.Tensor]:
        """Returns N tensors `[bytes]` uint8, by sender. Collective.

        Raises:
            MergeError: a replica is gone, or later than the deadline.
        """


def drive(rounds: Rounds[Result], transport: Transport) -> Result:
    """Runs a generator of exchanges to its end and returns its result. Collective."""
    try:
        exchange = next(rounds)
        while True:
            exchange = rounds.send(transport.exchange(exchange))
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        rounds.close()


class ProcessGroupTransport:
    """Replicas that are processes: one all-to-all per exchange.

    Give it a group of its own: a round may run in a thread beside training, and a group that missed a deadline is lost.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Takes the merge group of this rank; `timeout_s` bounds each exchange."""
        self._group = group
        self._timeout_s = timeout_s
        self.index = group.rank()
        self.num_replicas = group.size()

    def exchange(self, exchange: Exchange) -> list[torch.Tensor]:
        """See `Transport`."""
        sent_bytes = [part.numel() for part in exchange.parts]
        received_bytes = list(exchange.received_bytes)
        received = torch.empty(sum(received_bytes), dtype=torch.uint8)
        try:
            work = dist.all_to_all_single(received, torch.cat(list(exchange.parts)), received_bytes, sent_bytes, self._group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise MergeError(
                f"merge round, {exchange.phase}: replica {self.index} of {self.num_replicas} (ranks "
                f"{dist.get_process_group_ranks(self._group)}) could not exchange {format_bytes(sum(sent_bytes))} within "
                f"{format_seconds(self._timeout_s)}: {error}. Another rank failed or is late; its own message tells. Training continues "
                "from the last checkpoint"
            ) from error
        return list(torch.split(received, received_bytes))
