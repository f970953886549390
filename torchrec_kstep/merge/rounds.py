"""One merge round of one tracker, as exchanges between replicas.

    opening   every replica tells how many rows of each table it touched
    samples   and, if one bucket will not do, some of its keys, so that all cut the same buckets
    up        per bucket: what each row has newly learned goes to the row's owner
    down      the owner sums up in the order of replicas and tells every replica the same bytes

Nothing here knows where rows live (`RowSource`) or when the result is applied (`Sink`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from torchrec_kstep.errors import DivergenceError, MergeError
from torchrec_kstep.merge import message
from torchrec_kstep.merge.buckets import Bucket, BucketCutter
from torchrec_kstep.merge.layout import WEIGHT, MergedTable, Tracker, owners
from torchrec_kstep.merge.message import Format
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.transport import Exchange, Rounds
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops import merge as ops
from torchrec_kstep.ops.batch import Contributions

_NOT_FINITE = -1  # in place of a number of rows: one of them holds NaN or infinity
_DRIFT_ROWS = 64  # compared per table and bucket, all of one owner: owners are hashes, so those are a fair sample
_DRIFT_OWNER = 0
_COPIES = 4  # a bucket's rows exist about so often at a time: collected, encoded, received, decoded
_UP, _DOWN = "up", "down"


class Arrived(NamedTuple):
    """Merged changes of some rows of one table, as they travelled.

    Attributes:
        rows: `[n]` int32 or int64, ascending.
        union_touches: `[n]` float32, or None where no moment needs them.
        fields: by name, `[n, bytes of a row]` uint8.
    """

    rows: torch.Tensor
    union_touches: torch.Tensor | None
    fields: dict[str, torch.Tensor]


class RowSource(Protocol):
    """What this replica touched since the last round of a tracker."""

    def rows(self, table: MergedTable) -> torch.Tensor:
        """Returns the touched rows, ascending `[n]` int64."""

    def collect(self, table: MergedTable, rows: torch.Tensor) -> Contributions:
        """Returns what is new in some of the touched rows, ascending."""


class Sink(Protocol):
    """Takes what was merged, with the same bytes on all replicas."""

    def __call__(self, table: MergedTable, arrived: Arrived) -> None:
        """Takes some rows of a table; over a round, each row of the union comes once."""


@dataclass(frozen=True)
class Party:
    """Who merges how.

    Attributes:
        spec: the way to merge.
        index: this replica.
        num_replicas: all of them.
    """

    spec: MergeSpec
    index: int
    num_replicas: int


class TableRound(NamedTuple):
    """How one table takes part in a round.

    Attributes:
        table: the table.
        fields: what is sent of its rows.
        up: format to the owner.
        down: format from the owner.
    """

    table: MergedTable
    fields: tuple[str, ...]
    up: Format
    down: Format

    @property
    def memory_bytes(self) -> int:
        """Memory that one touched row takes while its bucket is merged."""
        return _COPIES * (4 * self.table.dim * len(self.fields) + 8 + 4)


def table_round(spec: MergeSpec, table: MergedTable, fields: tuple[str, ...], num_steps: int) -> TableRound:
    """Says what travels of each row of a table whose `fields` are merged after `num_steps` steps."""
    return TableRound(table, fields, *message.formats(spec, fields, table.dim, table.row_id_type, table.has_row_step, num_steps))


class TrackerRound:
    """The exchanges of one round of one tracker."""

    def __init__(self, party: Party, tracker: Tracker, round_index: int, report: RoundReport, source: RowSource, sink: Sink) -> None:
        """Prepares a round."""
        self._party = party
        self._spec = party.spec
        self._tracker = tracker
        self._round_index = round_index
        self._report = report
        self._source = source
        self._sink = sink
        self.num_steps = 1  # of the replica that did most; known once `run` has ended
        self._own_rows: dict[int, torch.Tensor] = {}

    def run(self, tables: Sequence[tuple[MergedTable, tuple[str, ...]]], num_steps: int, fingerprint: int) -> Rounds[torch.Tensor]:
        """Merges what was touched and returns `[N, T]` int64, rows touched by replica and table.

        Args:
            tables: those that the tracker knows, in the order of their keys, and which of their fields it has.
            num_steps: local steps of this replica since the tracker's last round; the largest of the replicas' counts.
            fingerprint: of rows after the round before, which must be the same on all replicas.

        Raises:
            MergeError: on all replicas, if their rows differed after the round before.
            DivergenceError: on all replicas, if one has NaN or infinity in a row; buckets before that one are merged.
        """
        with self._report.timed("collect"):
            self._own_rows = {table.index: self._source.rows(table) for table, _ in tables}
        told = yield from self._open([num_steps, fingerprint, *(rows.numel() for rows in self._own_rows.values())])
        num_touched = told[:, 2:]
        self._refuse_unequal(told[:, 1])
        self.num_steps = max(1, int(told[:, 0].max()))
        if self._tracker.index == 0:
            for table, _ in tables:
                self._report.num_own_rows[table.name] += self._own_rows[table.index].numel()
        rounds = {table.index: table_round(self._spec, table, fields, self.num_steps) for table, fields in tables}
        memory_bytes = [form.memory_bytes for form in rounds.values()]
        cutter = BucketCutter([table for table, _ in tables], memory_bytes, num_touched, self._spec.num_bucket_bytes)
        for bucket in cutter.cut((yield from self._sample(cutter))):
            yield from self._merge_bucket(bucket, [rounds[table.index] for table in bucket.tables])
        return num_touched

    def _open(self, own: list[int]) -> Rounds[torch.Tensor]:
        """Returns `[N, numbers]` int64, what each replica told."""
        told = torch.tensor(own).view(torch.uint8)
        num_replicas = self._party.num_replicas
        parts = yield from self._exchange("opening", [told] * num_replicas, [told.numel()] * num_replicas)
        return torch.stack([part.clone().view(torch.int64) for part in parts])

    def _refuse_unequal(self, fingerprints: torch.Tensor) -> None:
        others = (fingerprints != fingerprints[0]).nonzero()[:, 0].tolist()
        if others:
            raise MergeError(
                f"merge round {self._round_index}: after the round before, replicas {others} held other rows than replica 0 (this is "
                f"replica {self._party.index}); replicas must start from the same rows, and only training and rounds may change them"
            )

    def _sample(self, cutter: BucketCutter) -> Rounds[list[torch.Tensor]]:
        """Returns the keys that each replica names for the cutting."""
        num_replicas = self._party.num_replicas
        if cutter.is_one_bucket:
            return [torch.empty(0, dtype=torch.int64)] * num_replicas
        own = cutter.sample(self._party.index, list(self._own_rows.values())).view(torch.uint8)
        parts = yield from self._exchange("samples", [own] * num_replicas, [8 * number for number in cutter.num_samples()])
        return [part.clone().view(torch.int64) for part in parts]

    def _merge_bucket(self, bucket: Bucket, rounds: Sequence[TableRound]) -> Rounds[None]:
        self._report.num_buckets += 1
        num_replicas = self._party.num_replicas
        drift: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        counts, messages = self._pack_up(bucket, rounds, drift)
        up, down = [form.up for form in rounds], [form.down for form in rounds]
        received = yield from self._exchange_messages(_UP, up, rounds, counts, messages)
        del messages
        with self._report.timed("reduce"):
            merged_counts, merged = self._reduce(rounds, received)
        del received
        arrived = yield from self._exchange_messages(_DOWN, down, rounds, [merged_counts] * num_replicas, [merged] * num_replicas)
        for owner, (table_counts, whole) in enumerate(arrived):
            for form, count, part in zip(rounds, table_counts, message.split_tables(whole, down, table_counts), strict=True):
                if count:
                    self._deliver(form, count, part, drift.get(form.table.index) if owner == _DRIFT_OWNER else None)

    def _pack_up(
        self, bucket: Bucket, rounds: Sequence[TableRound], drift: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Returns rows per receiver and table, and the message to each receiver; keeps some changes by table in `drift`."""
        num_replicas = self._party.num_replicas
        counts: list[list[int]] = [[] for _ in range(num_replicas)]
        pieces: list[list[torch.Tensor]] = [[] for _ in range(num_replicas)]
        for form in rounds:
            rows = bucket.rows_of(form.table, self._own_rows[form.table.index])
            with self._report.timed("collect"):
                found = self._source.collect(form.table, rows)
            if not all(_is_finite(values) for values in found.values.values()):
                for receiver in range(num_replicas):
                    counts[receiver].append(_NOT_FINITE)
                continue
            with self._report.timed("encode"):
                touches = found.counts.clamp(max=self.num_steps)
                encoded = [self._encode(form.table, field, found.values[field], rows, _UP) for field in form.fields]
                owner = owners(form.table, rows, num_replicas)
                for receiver in range(num_replicas):
                    mine = (owner == receiver).nonzero()[:, 0]
                    counts[receiver].append(mine.numel())
                    if receiver == _DRIFT_OWNER and WEIGHT in form.fields and mine.numel():
                        some = mine[:: max(1, mine.numel() // _DRIFT_ROWS)]
                        drift[form.table.index] = rows[some], found.values[WEIGHT][some]
                    pieces[receiver] += form.up.pack(rows[mine], touches[mine], [values.index_select(0, mine) for values in encoded])
        return counts, [_joined(own) for own in pieces]

    def _reduce(self, rounds: Sequence[TableRound], received: Sequence[tuple[list[int], torch.Tensor]]) -> tuple[list[int], torch.Tensor]:
        """Sums up the rows that this replica owns; returns rows per table and the message about them."""
        by_sender = [message.split_tables(whole, [form.up for form in rounds], counts) for counts, whole in received]
        merged_counts: list[int] = []
        pieces: list[torch.Tensor] = []
        for position, form in enumerate(rounds):
            rows, touches, values = [], [], []
            for (counts, _), parts in zip(received, by_sender, strict=True):
                sender_rows, sender_touches, encoded = form.up.unpack(parts[position], counts[position])
                rows.append(sender_rows)
                touches.append(
                    torch.ones(counts[position], dtype=torch.int32) if sender_touches is None else sender_touches.to(torch.int32)
                )
                values.append({field: self._decode(form.table, field, data) for field, data in zip(form.fields, encoded, strict=True)})
            merged = ops.reduce(rows, touches, values, self._spec.moments, self._spec.row_merge, self.num_steps, self._party.num_replicas)
            merged_counts.append(merged.rows.numel())
            encoded = [self._encode(form.table, field, merged.values[field], merged.rows, _DOWN) for field in form.fields]
            pieces += form.down.pack(merged.rows, merged.u_real, encoded)
        return merged_counts, _joined(pieces)

    def _deliver(self, form: TableRound, count: int, part: torch.Tensor, drift: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Hands the rows of one table from one owner to the sink; `drift`: some of this replica's rows and their changes."""
        rows, union_touches, encoded = form.down.unpack(part, count)
        arrived = Arrived(rows, union_touches, dict(zip(form.fields, encoded, strict=True)))
        if self._tracker.index == 0:
            self._report.num_union_rows[form.table.name] += count
        if drift is not None:
            self._measure_drift(form.table, arrived, *drift)
        with self._report.timed("apply"):
            self._sink(form.table, arrived)

    def _measure_drift(self, table: MergedTable, arrived: Arrived, rows: torch.Tensor, own_change: torch.Tensor) -> None:
        """Compares; every row of this replica is among those that arrive from its owner."""
        places = torch.searchsorted(arrived.rows, rows.to(arrived.rows.dtype))
        change = self._decode(table, WEIGHT, arrived.fields[WEIGHT].index_select(0, places))
        self._report.add_drift(float((change - own_change).abs().sum()), float(own_change.abs().sum()))

    def _encode(self, table: MergedTable, field: str, values: torch.Tensor, rows: torch.Tensor, leg: str) -> torch.Tensor:
        """Noise depends on all that tells one rounding from another, so a round repeats bit for bit."""
        place = (self._round_index, table.index, self._tracker.fields.index(field), self._tracker.index)
        salt = ops.noise_salt(self._spec.seed, *place, leg == _DOWN, self._party.index)
        return ops.encode(values, ops.field_wire(field, self._spec.wire), rows, salt)

    def _decode(self, table: MergedTable, field: str, encoded: torch.Tensor) -> torch.Tensor:
        return ops.decode(encoded, ops.field_wire(field, self._spec.wire), table.dim)

    def _exchange_messages(
        self,
        leg: str,
        formats: Sequence[Format],
        rounds: Sequence[TableRound],
        counts: Sequence[Sequence[int]],
        messages: Sequence[torch.Tensor],
    ) -> Rounds[list[tuple[list[int], torch.Tensor]]]:
        """Sends a header and a message to each replica; returns rows per table and the message of each."""
        headers = [message.pack_header(own) for own in counts]
        replies = yield from self._exchange(f"{leg} header", headers, [header.numel() for header in headers])
        received = [message.unpack_header(reply) for reply in replies]
        self._refuse_not_finite(rounds, received)
        sizes = [sum(form.num_bytes(count) for form, count in zip(formats, own, strict=True)) for own in received]
        parts = yield from self._exchange(leg, messages, sizes)
        return list(zip(received, parts, strict=True))

    def _refuse_not_finite(self, rounds: Sequence[TableRound], received: Sequence[Sequence[int]]) -> None:
        for replica, counts in enumerate(received):
            for form, count in zip(rounds, counts, strict=True):
                if count == _NOT_FINITE:
                    detail = self._not_finite_row(form.table) if replica == self._party.index else "its rank names the row"
                    raise DivergenceError(
                        f"merge round {self._round_index}: table {form.table.name!r} of replica {replica} has NaN or infinity in rows it "
                        f"trained since the last round ({detail}); nothing of them was merged. Lower the learning rate, or clip"
                    )

    def _not_finite_row(self, table: MergedTable) -> str:
        """Names one of this replica's rows that cannot be merged."""
        rows = self._own_rows[table.index]
        for field, values in self._source.collect(table, rows).values.items():
            bad = (~torch.isfinite(values)).any(dim=1).nonzero()[:, 0]
            if bad.numel():
                return f"{bad.numel()} of {rows.numel()} rows, first row {int(rows[bad[0]])}, field {field!r}"
        return "seen in the difference to the last round only"

    def _exchange(self, phase: str, parts: Sequence[torch.Tensor], received_bytes: Sequence[int]) -> Rounds[list[torch.Tensor]]:
        """Exchanges, counting bytes to and from other replicas, and time."""
        own = self._party.index
        self._report.sent_bytes[phase] += sum(part.numel() for replica, part in enumerate(parts) if replica != own)
        self._report.received_bytes[phase] += sum(size for replica, size in enumerate(received_bytes) if replica != own)
        with self._report.timed(phase):
            return (yield Exchange(f"{phase} of {', '.join(self._tracker.fields)}", parts, received_bytes))


def _is_finite(values: torch.Tensor) -> bool:
    """A sum is much faster than a look at each value, and finite only if all are; where it overflows, each is looked at."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)
