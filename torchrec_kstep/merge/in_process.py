"""Replicas of one process that merge in lockstep: for studies and tests, with the code that runs between processes."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from torchrec_kstep.merge.replica import ReplicaRows
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.transport import Exchange, Rounds, Wait
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.row_group import RowGroup

Result = TypeVar("Result")


class Delivered:
    """What an exchange within a process brought."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        """Keeps the parts, by sender."""
        self._parts = parts

    def wait(self) -> list[torch.Tensor]:
        """See `Arrival`."""
        return self._parts


def run_in_lockstep(replicas: Sequence[Rounds[Result]]) -> list[Result]:
    """Runs the same rounds of all replicas, one request at a time, and returns their results by replica."""
    try:
        pending, results = _advance(replicas, [None] * len(replicas))
        while pending:
            pending, results = _advance(replicas, answers(pending))
        return results
    finally:
        for replica in replicas:
            replica.close()


def answers(requests: Sequence[Exchange | Wait]) -> list[Any]:
    """Answers what all replicas yielded at the same point of their rounds."""
    if all(isinstance(request, Wait) for request in requests):
        return [request.arrival.wait() for request in requests if isinstance(request, Wait)]
    exchanges = [request for request in requests if isinstance(request, Exchange)]
    phases = {exchange.phase for exchange in exchanges}
    assert len(exchanges) == len(requests), f"replicas are not in step: some wait, others are at {phases}"
    assert len(phases) == 1, f"replicas are not in step: {phases}"
    delivered = []
    for receiver, own in enumerate(exchanges):
        parts = [exchange.parts[receiver] for exchange in exchanges]
        sizes = [part.numel() for part in parts]
        assert sizes == list(own.received_bytes), f"{own.phase}: sizes {sizes} were not expected"
        delivered.append(Delivered(parts))
    return delivered


def _advance(replicas: Sequence[Rounds[Result]], given: Sequence[Any]) -> tuple[list[Exchange | Wait], list[Result]]:
    """Lets each replica come to its next request, or to its end."""
    pending: list[Exchange | Wait] = []
    results: list[Result] = []
    for replica, answer in zip(replicas, given, strict=True):
        try:
            pending.append(next(replica) if answer is None else replica.send(answer))
        except StopIteration as end:
            results.append(end.value)
    assert not (pending and results), f"replicas are not in step: {len(results)} ended, {len(pending)} did not"
    return pending, results


class InProcessMerger:
    """`RowMerger` for all replicas of one process."""

    def __init__(self, replicas: Sequence[Sequence[RowGroup]], spec: MergeSpec) -> None:
        """Takes the row groups of each replica; errors as of `RowMerger`."""
        self._rows = [ReplicaRows(groups, spec, index, len(replicas)) for index, groups in enumerate(replicas)]
        self._finished: list[RoundReport] = []
        run_in_lockstep([rows.agree() for rows in self._rows])

    def merge(self, round_index: int, num_local_steps: int, is_full: bool = False, step: int | None = None) -> list[RoundReport]:
        """Merges all replicas; returns a report of each."""
        return run_in_lockstep([rows.merge(round_index, num_local_steps, is_full, step) for rows in self._rows])

    def begin(self, round_index: int, num_local_steps: int, is_full: bool = False, step: int | None = None) -> None:
        """Sets aside what all replicas touched, and exchanges it; as `RowMerger.begin`."""
        if self._rows[0].is_undecided:
            self._finished = self.merge(round_index, num_local_steps, is_full, step)
            return
        for rows in self._rows:
            rows.detach(round_index, num_local_steps, is_full, step)
        run_in_lockstep([rows.exchange() for rows in self._rows])

    def finish(self, num_steps_late: int = 0) -> list[RoundReport]:
        """Corrects the rows of all replicas by the round that was begun; returns a report of each."""
        reports, self._finished = self._finished, []
        return reports or [rows.correct(num_steps_late) for rows in self._rows]

    def reset(self) -> None:
        """Forgets what was touched since the last round."""
        for rows in self._rows:
            rows.reset()
