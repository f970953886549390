"""The rows of one replica as its merge rounds see them: which fields are due, what was touched, how a result is applied.

Rounds are generators of exchanges (`transport`); nothing here waits for anybody.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchrec_kstep.errors import ConfigError, MergeError
from torchrec_kstep.merge.bucket_merge import Arrived, Packing, Party, TableRound, by_group
from torchrec_kstep.merge.layout import WEIGHT, MergedTable, Tracker, geometry, lay_out, trackers_of
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.rounds import TrackerRound
from torchrec_kstep.merge.transport import Exchange, Rounds, exchanged
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops import merge as ops
from torchrec_kstep.ops import messages
from torchrec_kstep.ops.batch import Contributions
from torchrec_kstep.ops.message_layout import Layout
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec

# Rows that replicas compare after a round: of each piece that arrives, and at most.
_COMPARED_PER_PIECE, _COMPARED = 8, 256


@dataclass
class PendingRound:
    """A round that was collected and is not applied yet.

    Attributes:
        report: what it tells so far.
        step: steps that the optimizer had done when it was collected.
        collected: per tracker that is due, what its tables contribute, by index of the table.
        num_steps: local steps since the last round of each of those trackers.
        arrived: what the exchange brought.
    """

    report: RoundReport
    step: int | None
    collected: list[tuple[Tracker, "_CollectedRows"]] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    arrived: list[tuple[Tracker, Arrived]] = field(default_factory=list)


class ReplicaRows:
    """One replica's part in merge rounds. Every replica must call the same methods in the same order."""

    def __init__(
        self,
        groups: Sequence[RowGroup],
        spec: MergeSpec,
        index: int,
        num_replicas: int,
        num_shard_rows: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Begins to keep the bases that rounds need; rows must not be touched yet.

        Args:
            groups: rows of this rank; the other ranks of the merge group have the same shards in the same order.
            spec: the way to merge.
            index: which replica this is.
            num_replicas: how many there are; one has nothing to merge.
            num_shard_rows: per group and table, rows of the shard; None: shards are whole tables.

        Raises:
            ConfigError: rows do not record touches as the spec needs it.
        """
        self.spec = spec
        self.party = Party(spec, index, num_replicas)
        self.tables = lay_out(groups, num_shard_rows)
        self.trackers = trackers_of(spec)
        self._groups = tuple(groups)
        self._num_steps = [0] * len(self.trackers)  # since the last round of each tracker
        self._sends_moments: dict[str, bool] = {}  # what `auto` chose, by name of the table
        self._fingerprint = 0  # of some rows right after the last round in place
        self._pending: PendingRound | None = None
        if num_replicas > 1:
            self._check_trackers()
            for table in self.tables:
                self._track(table)

    @property
    def is_pending(self) -> bool:
        """Whether a round was detached and is not corrected yet."""
        return self._pending is not None

    @property
    def is_undecided(self) -> bool:
        """Whether `auto` has yet to see a round of about k steps."""
        return self.spec.row_states == "auto" and not self._sends_moments and bool(self.tables) and self.party.num_replicas > 1

    def agree(self) -> Rounds[None]:
        """Makes sure that all replicas hold the same shards and merge alike.

        Raises:
            MergeError: on all replicas, naming those that differ.
        """
        num_replicas = self.party.num_replicas
        own = torch.frombuffer(bytearray(geometry(self.tables, self.spec, num_replicas)), dtype=torch.uint8)
        told = yield from exchanged(Exchange("agreement on shards", [own] * num_replicas, [own.numel()] * num_replicas))
        others = [replica for replica, theirs in enumerate(told) if not torch.equal(theirs, told[0])]
        if others:
            raise MergeError(
                f"replicas {others} hold other shards, records or merge settings than replica 0 in this position of the plan (this is "
                f"replica {self.party.index}); all replicas need one plan, one optimizer and one MergeSpec"
            )

    def merge(self, round_index: int, num_local_steps: int, is_full: bool = False, step: int | None = None) -> Rounds[RoundReport]:
        """Merges what was touched, bucket by bucket, in place.

        Args:
            round_index: counts all rounds from 0; the same on all replicas.
            num_local_steps: steps of this replica since the round before.
            is_full: also merge moments whose period has not passed, so that replicas are equal.
            step: steps that the optimizer has done, which corrects the bias of v_hat under global bias correction.
        """
        assert self._pending is None, "a detached round must be corrected first"
        report = self._begin(round_index, num_local_steps)
        for tracker in self._due(round_index, is_full):
            if self.party.num_replicas == 1:
                self._count_alone(tracker, report)
                self._end(tracker)
                continue
            source, sink = _TouchedRows(tracker, self.spec), _Applier(tracker, self.spec, report, step)
            exchange = TrackerRound(self.party, tracker, round_index, report, source, sink)
            num_touched = yield from exchange.run(self._tables_of(tracker), self._num_steps[tracker.index], self._fingerprint)
            self._end(tracker)
            if tracker.index == 0:
                self._fingerprint = sink.fingerprint()
            if tracker.index == 0 and self.is_undecided and 2 * exchange.num_steps >= self.spec.k:
                self._decide(num_touched)
        return report

    def detach(self, round_index: int, num_local_steps: int, is_full: bool = False, step: int | None = None) -> None:
        """Sets aside what was touched, so that training may go on; arguments as in `merge`. Exchanges nothing.

        Contributions of all touched rows are copied; they, not a bucket, bound the memory of a round beside training.
        """
        assert self._pending is None, "a detached round must be corrected first"
        assert not self.is_undecided, "the first round of `auto` is merged in place"
        pending = PendingRound(self._begin(round_index, num_local_steps), step)
        for tracker in self._due(round_index, is_full):
            if self.party.num_replicas == 1:
                self._count_alone(tracker, pending.report)
                self._end(tracker)
                continue
            with pending.report.timed("collect"):
                pending.collected.append((tracker, _CollectedRows(self._tables_of(tracker), _TouchedRows(tracker, self.spec))))
            pending.num_steps.append(self._num_steps[tracker.index])
            for table in self.tables:
                if tracker.index < table.num_trackers:
                    table.group.detach_touched(table.table, tracker.index)
            self._num_steps[tracker.index] = 0
        self._pending = pending

    def exchange(self) -> Rounds[None]:
        """Exchanges what was detached; may run in a thread beside training."""
        pending = self._pending
        assert pending is not None
        for (tracker, source), num_steps in zip(pending.collected, pending.num_steps, strict=True):
            sink = _Collector(tracker, pending.arrived)
            rounds = TrackerRound(self.party, tracker, pending.report.round_index, pending.report, source, sink)
            yield from rounds.run(self._tables_of(tracker), num_steps, self._fingerprint)
            source.forget()

    def correct(self, num_steps_late: int) -> RoundReport:
        """Applies what the exchange brought to rows that may have moved since; tells of the round.

        Args:
            num_steps_late: steps since `detach`, for the report.
        """
        pending = self._pending
        assert pending is not None
        pending.report.num_steps_late = num_steps_late
        for tracker, arrived in pending.arrived:
            _Applier(tracker, self.spec, pending.report, pending.step)(arrived)
        for tracker, _ in pending.collected:
            self._clear(tracker)
        self._fingerprint = 0  # rows go on from different steps, so there is nothing to compare
        self._pending = None
        return pending.report

    def reset(self) -> None:
        """Forgets what was touched since the last round, and a round that is under way, without merging."""
        if self._pending is not None:
            for tracker, _ in self._pending.collected:
                self._clear(tracker)
            self._pending = None
        for tracker in self.trackers:
            self._clear(tracker)
        self._num_steps = [0] * len(self.trackers)
        self._fingerprint = 0

    def state_dict(self) -> dict[str, dict[str, bool]]:
        """Returns what rounds remember of earlier ones right after a full round: the tables whose moments `auto` sends."""
        return {"sends_moments": dict(self._sends_moments)}

    def load_state_dict(self, state: dict[str, dict[str, bool]]) -> None:
        """Restores `state_dict`; rows must not be touched."""
        self._sends_moments = dict(state["sends_moments"])
        for table in self.tables:
            self._track(table)

    def _check_trackers(self) -> None:
        for table in self.tables:
            num_needed = len(self.trackers) if table.moments() else 1
            if table.num_trackers < num_needed:
                raise ConfigError(
                    f"table {table.name!r}: its rows keep {table.num_trackers} sets of touches, and {num_needed} are needed (one per "
                    f"period of weights and moments); give its optimizer touches='count' and num_trackers={num_needed}"
                )
            optimizer = table.optimizer
            is_apart = self.spec.row_states != "weights" and self.spec.m_period_rounds != self.spec.v_period_rounds
            if is_apart and isinstance(optimizer, AdamSpec) and table.has_row_step and not optimizer.step_per_moment:
                raise ConfigError(
                    f"table {table.name!r}: m and v are merged at different periods, but its rows count their steps for both alike, so a "
                    "moment could arrive before its count; give its optimizer step_per_moment=True"
                )

    def _track(self, table: MergedTable) -> None:
        """Keeps bases of the fields that are merged of a table."""
        for tracker in self.trackers:
            fields = tracker.fields_of(table)
            if not self._sends_moments.get(table.name, True) and WEIGHT in fields:
                fields = (WEIGHT,)
            if fields and table.group.tracked_fields(table.table, tracker.index) != fields:
                table.group.track(tracker.index, fields, [table.table])

    def _tables_of(self, tracker: Tracker) -> list[tuple[MergedTable, tuple[str, ...]]]:
        """Returns the tables that a tracker merges, with their fields."""
        found = []
        for table in self.tables:
            fields = table.group.tracked_fields(table.table, tracker.index)
            if fields and (tracker.index == 0 or self._sends_moments.get(table.name, True)):
                found.append((table, fields))
        return found

    def _begin(self, round_index: int, num_local_steps: int) -> RoundReport:
        self._num_steps = [steps + num_local_steps for steps in self._num_steps]
        report = RoundReport(round_index, num_local_steps, self.party.num_replicas)
        report.base_bytes = sum(group.base_bytes for group in self._groups)
        for table in self.tables:
            for surplus in range(len(self.trackers), table.num_trackers):  # nobody else would ever forget their touched rows
                table.group.clear_touched(table.table, surplus)
        return report

    def _due(self, round_index: int, is_full: bool) -> list[Tracker]:
        return [tracker for tracker in self.trackers if is_full or (round_index + 1) % tracker.period_rounds == 0]

    def _count_alone(self, tracker: Tracker, report: RoundReport) -> None:
        """Reports what a single replica touched."""
        for table in self.tables if tracker.index == 0 else ():
            count = table.group.touched_rows(table.table).numel() if table.num_trackers else 0
            report.num_own_rows[table.name] += count
            report.num_union_rows[table.name] += count

    def _end(self, tracker: Tracker) -> None:
        """Begins the next interval of a tracker."""
        self._clear(tracker)
        self._num_steps[tracker.index] = 0

    def _clear(self, tracker: Tracker) -> None:
        for table in self.tables:
            if tracker.index < table.num_trackers:
                table.group.clear_touched(table.table, tracker.index)

    def _decide(self, num_touched: torch.Tensor) -> None:
        """Chooses, alike on all replicas, the tables whose moments are sent from now on."""
        for table, counts in zip(self.tables, num_touched.T.to(torch.float64), strict=True):
            share = float(counts.mean()) / max(1, table.num_shard_rows)
            self._sends_moments[table.name] = share >= self.spec.auto_share
            self._track(table)


class _TouchedRows:
    """Rows as they are now."""

    def __init__(self, tracker: Tracker, spec: MergeSpec) -> None:
        self._tracker = tracker
        self._spec = spec

    def rows(self, table: MergedTable) -> torch.Tensor:
        return table.group.touched_rows(table.table, self._tracker.index)

    def contributions(self, table: MergedTable) -> Contributions:
        return ops.collect(table.group, table.table, self.rows(table), self._spec.moments, self._tracker.index)

    def pack(self, tables: Sequence[TableRound], rows: Sequence[torch.Tensor], request: Packing) -> int:
        first_bad = []
        for group, positions in by_group(tables):
            bad = messages.pack(
                group,
                [tables[position].table.table for position in positions],
                [rows[position] for position in positions],
                request.formats.some(positions),
                [salt for position in positions for salt in request.salts[position]],
                [tables[position].table.first_key for position in positions],
                request.max_count,
                request.layout.some(positions),
                request.message,
                self._spec.moments,
                self._tracker.index,
            )
            if bad >= 0:
                first_bad.append(positions[bad])
        return min(first_bad, default=-1)


class _CollectedRows:
    """Contributions that were taken before training went on."""

    def __init__(self, tables: Sequence[tuple[MergedTable, tuple[str, ...]]], source: _TouchedRows) -> None:
        self._rows = {table.index: source.rows(table) for table, _ in tables}
        self._contributions = {table.index: source.contributions(table) for table, _ in tables}

    def rows(self, table: MergedTable) -> torch.Tensor:
        return self._rows[table.index]

    def contributions(self, table: MergedTable) -> Contributions:
        return self._contributions[table.index]

    def pack(self, tables: Sequence[TableRound], rows: Sequence[torch.Tensor], request: Packing) -> int:
        """`rows` are pieces of all that were touched."""
        pieces = [self._piece(form.table, own) for form, own in zip(tables, rows, strict=True)]
        salts = [salt for own in request.salts for salt in own]
        first_keys = [form.table.first_key for form in tables]
        return messages.pack_contributions(
            rows, pieces, request.formats, salts, first_keys, request.max_count, request.layout, request.message
        )

    def forget(self) -> None:
        """Gives the memory back."""
        self._contributions.clear()

    def _piece(self, table: MergedTable, rows: torch.Tensor) -> Contributions:
        whole = self._contributions[table.index]
        begin = int(torch.searchsorted(self._rows[table.index], rows[0])) if rows.numel() else 0
        piece = slice(begin, begin + rows.numel())
        return Contributions(whole.counts[piece], {name: values[piece] for name, values in whole.values.items()})


class _Applier:
    """Writes what arrives into the rows."""

    def __init__(self, tracker: Tracker, spec: MergeSpec, report: RoundReport, step: int | None) -> None:
        self._tracker = tracker
        self._spec = spec
        self._report = report
        self._step = step
        self._compared: list[tuple[MergedTable, torch.Tensor]] = []

    def __call__(self, arrived: Arrived) -> None:
        with self._report.timed("apply"):
            layout = Layout.apart(arrived.formats, arrived.counts)
            for group, positions in by_group(arrived.tables):
                applied = messages.apply(
                    group,
                    [arrived.tables[position].table.table for position in positions],
                    arrived.messages,
                    arrived.formats.some(positions),
                    layout.some(positions),
                    self._spec.moments,
                    self._tracker.index,
                    self._step,
                )
                self._report.num_rows_read += applied.num_rows_read
                self._report.add_drift(applied.distance, applied.way)
            self._compare(arrived, layout)

    def fingerprint(self) -> int:
        """Returns 63 bits of the weights of some rows of this round, the same rows on all replicas."""
        found = hashlib.blake2b(digest_size=8)
        for table, rows in self._compared:
            found.update(table.group.read(table.table, rows).numpy().tobytes())
        return int.from_bytes(found.digest()) >> 1

    def _compare(self, arrived: Arrived, layout: Layout) -> None:
        """Chooses rows for the fingerprint: the first few of each table and owner, until there are enough."""
        for message, counts, begins in zip(arrived.messages, arrived.counts.tolist(), layout.begins.tolist(), strict=True):
            for form, count, begin in zip(arrived.tables, counts, begins, strict=True):
                if len(self._compared) * _COMPARED_PER_PIECE >= _COMPARED:
                    return
                if count:
                    end = begin + min(count, _COMPARED_PER_PIECE) * form.down.row_id_type.itemsize
                    self._compared.append((form.table, message[begin:end].clone().view(form.down.row_id_type).to(torch.int64)))


class _Collector:
    """Keeps what arrives."""

    def __init__(self, tracker: Tracker, arrived: list[tuple[Tracker, Arrived]]) -> None:
        self._tracker = tracker
        self._arrived = arrived

    def __call__(self, arrived: Arrived) -> None:
        self._arrived.append((self._tracker, arrived))
