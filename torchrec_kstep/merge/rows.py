"""RowMerger: merge rounds between processes, in place or beside training."""

import threading
from collections.abc import Sequence
from typing import Any

from torchrec_kstep.merge.replica import ReplicaRows
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.transport import Transport, drive
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.row_group import RowGroup


class RowMerger:
    """Merges the rows of this rank with the same shards of the other replicas.

    In place, training waits::

        merger = RowMerger(groups, MergeSpec(k=20), ProcessGroupTransport(merge_group, timeout_s=300))
        ...                                              # 20 steps
        report = merger.merge(round_index=0, num_local_steps=20)

    Beside training, rows are corrected some steps late::

        merger.begin(round_index=0, num_local_steps=20)
        ...                                              # some steps
        report = merger.finish(num_steps_late=3)

    All methods but properties are collective in the merge group. Rows of all replicas hold the same bits after each `merge`;
    after `finish`, the same bits but for what each replica trained since `begin`.
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        spec: MergeSpec,
        transport: Transport,
        num_shard_rows: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Makes sure that the replicas hold the same shards, and begins to keep bases; call it before the first step.

        Args:
            groups: rows of this rank.
            spec: the way to merge.
            transport: joins the replicas; nobody else may use it.
            num_shard_rows: per group and table, rows of the shard; None: shards are whole tables.

        Raises:
            ConfigError: rows do not record touches as the spec needs it.
            MergeError: replicas differ, or one is late.
        """
        self._rows = ReplicaRows(groups, spec, transport.index, transport.num_replicas, num_shard_rows)
        self._transport = transport
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._finished: RoundReport | None = None
        drive(self._rows.agree(), transport)

    @property
    def spec(self) -> MergeSpec:
        """The way to merge."""
        return self._rows.spec

    @property
    def is_pending(self) -> bool:
        """Whether a round was begun and is not finished."""
        return self._rows.is_pending or self._finished is not None

    @property
    def is_arrived(self) -> bool:
        """Whether `finish` would not have to wait; for information only, replicas may differ."""
        return self._thread is None or not self._thread.is_alive()

    def merge(self, round_index: int, num_local_steps: int, is_full: bool = False, step: int | None = None) -> RoundReport:
        """Merges what was touched since the last round, in place.

        Args:
            round_index: counts all rounds from 0.
            num_local_steps: steps of this replica since the round before; replicas may differ, the largest counts.
            is_full: merge all fields whatever their period, so that replicas are equal, e.g. before a snapshot.
            step: steps that the optimizer has done, which corrects the bias of frozen Adam's v_hat under global bias correction;
                None: the step that was set last.

        Raises:
            DivergenceError: on all replicas, if one has NaN or infinity in a row.
            MergeError: a replica is gone or late.
        """
        assert not self.is_pending, "finish the round that is under way first"
        return drive(self._rows.merge(round_index, num_local_steps, is_full, step), self._transport)

    def begin(self, round_index: int, num_local_steps: int, is_full: bool = False, step: int | None = None) -> None:
        """Sets aside what was touched and exchanges it in a thread; training may go on. Arguments as in `merge`.

        The first round of `row_states="auto"`, which decides what later ones send, is merged in place.
        """
        assert not self.is_pending, "finish the round that is under way first"
        if self._rows.is_undecided:
            self._finished = self.merge(round_index, num_local_steps, is_full, step)
            return
        self._rows.detach(round_index, num_local_steps, is_full, step)
        self._failure = None
        self._thread = threading.Thread(target=self._exchange, name="merge-round", daemon=True)
        self._thread.start()

    def finish(self, num_steps_late: int = 0) -> RoundReport:
        """Waits for the round that was begun and corrects the rows by it.

        Args:
            num_steps_late: steps since `begin`, for the report.

        Raises:
            DivergenceError: as in `merge`.
            MergeError: as in `merge`.
        """
        assert self.is_pending, "no round was begun"
        if self._finished is not None:
            report, self._finished = self._finished, None
            return report
        self._join()
        if self._failure is not None:
            raise self._failure
        return self._rows.correct(num_steps_late)

    def reset(self) -> None:
        """Forgets what was touched since the last round without merging it, e.g. after loading a snapshot. Not collective.

        A round under way is waited for and dropped.
        """
        self._join()
        self._finished = None
        self._rows.reset()

    def close(self) -> None:
        """Waits until no thread of this object runs, at most as long as the transport waits. Not collective."""
        self._join()

    def state_dict(self) -> dict[str, Any]:
        """Returns what rounds remember beyond the rows; taken after a full round."""
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`, before the first step."""
        self._rows.load_state_dict(state)

    def _exchange(self) -> None:
        try:
            drive(self._rows.exchange(), self._transport)
        except BaseException as error:  # handed to the thread that waits in `finish`
            self._failure = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
