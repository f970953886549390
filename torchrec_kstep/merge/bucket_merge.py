"""One bucket of a merge round: packed by every replica, summed up by the owners of its rows, applied by all.

Each step works on all tables of the bucket at once and ends with an exchange, so that several buckets can be on their way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from torchrec_kstep.errors import DivergenceError
from torchrec_kstep.merge import message
from torchrec_kstep.merge.layout import MergedTable, Tracker
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.transport import Exchange
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops import merge as ops
from torchrec_kstep.ops import messages
from torchrec_kstep.ops.batch import Contributions
from torchrec_kstep.ops.message_layout import Format, Formats, Layout
from torchrec_kstep.ops.row_group import RowGroup

_ALL_FINITE = -1  # in place of the position of a table
_COPIES = 4  # a bucket's rows exist about so often at a time: packed and received, up and down, of buckets that overlap


class TableRound(NamedTuple):
    """How one table takes part in a round.

    Attributes:
        table: the table.
        up: format to the owner.
        down: format from the owner.
    """

    table: MergedTable
    up: Format
    down: Format

    @property
    def memory_bytes(self) -> int:
        """Memory that one touched row takes while its bucket is merged."""
        return _COPIES * (4 * self.table.dim * len(self.up.fields) + 8 + 4)


class Arrived(NamedTuple):
    """Merged changes of some rows of several tables, as they travelled.

    Attributes:
        tables: T tables.
        formats: of the messages.
        messages: by owner.
        counts: `[N, T]` int64, rows of each table in each message.
    """

    tables: Sequence[TableRound]
    formats: Formats
    messages: Sequence[torch.Tensor]
    counts: torch.Tensor


class RowSource(Protocol):
    """What this replica touched since the last round of a tracker."""

    def rows(self, table: MergedTable) -> torch.Tensor:
        """Returns the touched rows, ascending `[n]` int64."""

    def contributions(self, table: MergedTable) -> Contributions:
        """Returns what is new in all touched rows."""

    def pack(self, tables: Sequence[TableRound], rows: Sequence[torch.Tensor], request: "Packing") -> int:
        """Packs what is new in some touched rows of each table, ascending; returns the first table that is not finite, or -1."""


class Sink(Protocol):
    """Takes what was merged, with the same bytes on all replicas."""

    def __call__(self, arrived: Arrived) -> None:
        """Takes some rows; over a round, each row of the union comes once."""


@dataclass(frozen=True)
class Packing:
    """How and where to pack.

    Attributes:
        formats: of the tables.
        salts: per table, those of its fields.
        max_count: touches beyond it travel as it.
        layout: of the message to each replica.
        message: the buffer of all messages.
    """

    formats: Formats
    salts: Sequence[Sequence[int]]
    max_count: int
    layout: Layout
    message: torch.Tensor


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


@dataclass(frozen=True)
class RoundContext:
    """What all buckets of a round share.

    Attributes:
        party: who merges how.
        tracker: which fields are merged.
        round_index: of the round.
        num_steps: local steps since the tracker's last round, of the replica that did most.
        report: is told what is done.
        source: what this replica touched.
        sink: takes what was merged.
    """

    party: Party
    tracker: Tracker
    round_index: int
    num_steps: int
    report: RoundReport
    source: RowSource
    sink: Sink

    def exchange(self, phase: str, parts: Sequence[torch.Tensor], received_bytes: Sequence[int]) -> Exchange:
        """Makes an exchange and counts bytes to and from other replicas."""
        own = self.party.index
        self.report.sent_bytes[phase] += sum(part.numel() for replica, part in enumerate(parts) if replica != own)
        self.report.received_bytes[phase] += sum(size for replica, size in enumerate(received_bytes) if replica != own)
        return Exchange(f"{phase} of {', '.join(self.tracker.fields)}", parts, received_bytes)


def by_group(tables: Sequence[TableRound]) -> Iterator[tuple[RowGroup, list[int]]]:
    """Yields each row group with the positions of its tables."""
    found: dict[int, tuple[RowGroup, list[int]]] = {}
    for position, form in enumerate(tables):
        found.setdefault(id(form.table.group), (form.table.group, []))[1].append(position)
    yield from found.values()


class BucketMerge:
    """The steps of one bucket: `pack`, `reduce`, `agree`, `deliver`; each but the last makes the exchange whose answer the next takes."""

    def __init__(
        self,
        context: RoundContext,
        tables: Sequence[TableRound],
        rows: Sequence[torch.Tensor],
        counts_to: torch.Tensor,
        counts_from: torch.Tensor,
    ) -> None:
        """Prepares a bucket.

        Args:
            context: of the round.
            tables: T tables with rows in the bucket, on any replica.
            rows: per table those that this replica touched.
            counts_to: `[N, T]` int64, how many of them each replica owns.
            counts_from: `[N, T]` int64, how many rows each replica sends to this one.
        """
        self._context = context
        self._tables = tables
        self._rows = rows
        self._counts_to = counts_to
        self._counts_from = counts_from
        self._up = Formats([form.up for form in tables])
        self._down = Formats([form.down for form in tables])
        self._first_bad = _ALL_FINITE
        self._merged = torch.empty(0, dtype=torch.uint8)
        self._counts = torch.empty(0, dtype=torch.int64)  # [N, T] of what the owners merged

    def pack(self) -> Exchange:
        """Packs what this replica contributes, for the owners of the rows."""
        context = self._context
        with context.report.timed("pack"):
            layout = Layout.joined(self._up, self._counts_to)
            buffer = messages.empty(sum(layout.sizes))
            request = Packing(self._up, self._salts(is_down=False), context.num_steps, layout, buffer)
            self._first_bad = context.source.pack(self._tables, self._rows, request)
            parts = torch.split(buffer, layout.sizes)
        return context.exchange("up", parts, Layout.apart(self._up, self._counts_from).sizes)

    def reduce(self, received: Sequence[torch.Tensor]) -> Exchange:
        """Sums up the rows that this replica owns, and tells how many they are and whether its own were finite."""
        context = self._context
        spec, num_replicas = context.party.spec, context.party.num_replicas
        with context.report.timed("reduce"):
            salts = [salt for own in self._salts(is_down=True) for salt in own]
            how = (spec.moments, spec.row_merge, context.num_steps, num_replicas)
            self._merged, merged_counts = messages.reduce(received, self._counts_from, self._up, self._down, salts, *how)
        header = message.pack_header([*merged_counts.tolist(), self._first_bad])
        return context.exchange("down header", [header] * num_replicas, [header.numel()] * num_replicas)

    def agree(self, headers: Sequence[torch.Tensor]) -> tuple[int, int] | Exchange:
        """Hands the sums to all replicas; or returns which replica and table are not finite, the same on all."""
        told = message.unpack_headers(headers)
        bad = told[:, -1].tolist()
        for replica, position in enumerate(bad):
            if position != _ALL_FINITE:
                return replica, position
        self._counts = told[:, :-1].contiguous()
        num_replicas = self._context.party.num_replicas
        return self._context.exchange("down", [self._merged] * num_replicas, Layout.apart(self._down, self._counts).sizes)

    def deliver(self, received: Sequence[torch.Tensor]) -> None:
        """Hands what all owners merged to the sink."""
        context = self._context
        if context.tracker.index == 0:
            for form, count in zip(self._tables, self._counts.sum(dim=0).tolist(), strict=True):
                context.report.num_union_rows[form.table.name] += count
        context.sink(Arrived(self._tables, self._down, received, self._counts))

    def refuse(self, replica: int, position: int) -> DivergenceError:
        """Returns what all replicas raise; the one that has the row names it."""
        context, table = self._context, self._tables[position].table
        detail = self._not_finite_row(table) if replica == context.party.index else "its rank names the row"
        return DivergenceError(
            f"merge round {context.round_index}: table {table.name!r} of replica {replica} has NaN or infinity in rows it trained since "
            f"the last round ({detail}); nothing of them was merged. Lower the learning rate, or clip"
        )

    def _not_finite_row(self, table: MergedTable) -> str:
        """Names one of this replica's rows that cannot be merged."""
        rows = self._context.source.rows(table)
        for field, values in self._context.source.contributions(table).values.items():
            bad = (~torch.isfinite(values)).any(dim=1).nonzero()[:, 0]
            if bad.numel():
                return f"{bad.numel()} of {rows.numel()} rows, first row {int(rows[bad[0]])}, field {field!r}"
        return "seen in the difference to the last round only"

    def _salts(self, is_down: bool) -> list[list[int]]:
        """Per table, salts of its fields. Noise depends on all that tells one rounding from another, so a round repeats bit for bit."""
        context = self._context
        spec, tracker = context.party.spec, context.tracker
        if spec.wire == "fp32":
            return [[0] * len(form.up.fields) for form in self._tables]

        def salt(form: TableRound, field: str) -> int:
            place = (context.round_index, form.table.index, tracker.fields.index(field), tracker.index)
            return ops.noise_salt(spec.seed, *place, is_down, context.party.index)

        return [[salt(form, field) for field in form.up.fields] for form in self._tables]
