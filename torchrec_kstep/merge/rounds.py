"""One merge round of one tracker, as exchanges between replicas.

    opening   every replica tells how many rows of each table it touched
    samples   and, if one bucket will not do, some of its keys, so that all cut the same buckets
    counts    how many rows of each bucket and table it sends to each replica
    up        per bucket: what each row has newly learned goes to the row's owner
    down      the owner sums up in the order of replicas and tells every replica the same bytes

While one bucket travels the next is packed and the one before is summed up and applied. Nothing here knows where rows live
(`RowSource`) or when the result is applied (`Sink`).
"""

from collections.abc import Sequence

import torch

from torchrec_kstep.errors import MergeError
from torchrec_kstep.merge import message
from torchrec_kstep.merge.bucket_merge import BucketMerge, Party, RoundContext, RowSource, Sink, TableRound
from torchrec_kstep.merge.buckets import Bucket, BucketCutter
from torchrec_kstep.merge.layout import MergedTable, Tracker
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.transport import Arrival, Exchange, Rounds, Wait
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops import messages
from torchrec_kstep.units import MIB

# A round is cut into several buckets though one would fit, so that they overlap; not into ones that cost more in calls than in bytes.
_OVERLAPPED_BUCKETS, _SMALL_BUCKET_BYTES = 8, 16 * MIB


def table_round(spec: MergeSpec, table: MergedTable, fields: tuple[str, ...], num_steps: int) -> TableRound:
    """Says what travels of each row of a table whose `fields` are merged after `num_steps` steps."""
    return TableRound(table, *message.formats(spec, fields, table.dim, table.row_id_type, table.has_row_step, num_steps))


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
        context = self._context()
        told = yield from self._open(context, [num_steps, fingerprint, *(rows.numel() for rows in self._own_rows.values())])
        num_touched = told[:, 2:]
        self._refuse_unequal(told[:, 1])
        self.num_steps = max(1, int(told[:, 0].max()))
        if self._tracker.index == 0:
            for table, _ in tables:
                self._report.num_own_rows[table.name] += self._own_rows[table.index].numel()
        rounds = {table.index: table_round(self._spec, table, fields, self.num_steps) for table, fields in tables}
        cutter = self._cutter([rounds[table.index] for table, _ in tables], num_touched)
        buckets = cutter.cut((yield from self._sample(context, cutter)))
        if buckets:
            yield from self._merge((yield from self._prepare(buckets, rounds)))
        return num_touched

    def _context(self) -> RoundContext:
        return RoundContext(self._party, self._tracker, self._round_index, self.num_steps, self._report, self._source, self._sink)

    def _open(self, context: RoundContext, own: list[int]) -> Rounds[torch.Tensor]:
        """Returns `[N, numbers]` int64, what each replica told."""
        told = torch.tensor(own).view(torch.uint8)
        num_replicas = self._party.num_replicas
        parts = yield from self._exchanged(context.exchange("opening", [told] * num_replicas, [told.numel()] * num_replicas), "opening")
        return torch.stack([part.clone().view(torch.int64) for part in parts])

    def _refuse_unequal(self, fingerprints: torch.Tensor) -> None:
        others = (fingerprints != fingerprints[0]).nonzero()[:, 0].tolist()
        if others:
            raise MergeError(
                f"merge round {self._round_index}: after the round before, replicas {others} held other rows than replica 0 (this is "
                f"replica {self._party.index}); replicas must start from the same rows, and only training and rounds may change them"
            )

    def _cutter(self, tables: Sequence[TableRound], num_touched: torch.Tensor) -> BucketCutter:
        memory_bytes = [form.memory_bytes for form in tables]
        total_bytes = int((num_touched * torch.tensor(memory_bytes, dtype=torch.int64)).sum())
        overlapped_bytes = max(total_bytes // _OVERLAPPED_BUCKETS, _SMALL_BUCKET_BYTES)
        return BucketCutter([form.table for form in tables], memory_bytes, num_touched, min(self._spec.num_bucket_bytes, overlapped_bytes))

    def _sample(self, context: RoundContext, cutter: BucketCutter) -> Rounds[list[torch.Tensor]]:
        """Returns the keys that each replica names for the cutting."""
        num_replicas = self._party.num_replicas
        if cutter.is_one_bucket:
            return [torch.empty(0, dtype=torch.int64)] * num_replicas
        own = cutter.sample(self._party.index, list(self._own_rows.values())).view(torch.uint8)
        exchange = context.exchange("samples", [own] * num_replicas, [8 * number for number in cutter.num_samples()])
        parts = yield from self._exchanged(exchange, "samples")
        return [part.clone().view(torch.int64) for part in parts]

    def _prepare(self, buckets: Sequence[Bucket], rounds: dict[int, TableRound]) -> Rounds[list[BucketMerge]]:
        """Finds the rows of each bucket and their owners, and learns how many rows come from whom."""
        num_replicas = self._party.num_replicas
        context = self._context()
        with self._report.timed("collect"):
            rows = [[bucket.rows_of(table, self._own_rows[table.index]) for table in bucket.tables] for bucket in buckets]
            first_keys = [table.first_key for bucket in buckets for table in bucket.tables]
            counts_to = messages.owner_counts([piece for pieces in rows for piece in pieces], first_keys, num_replicas)
        headers = [message.pack_header(own) for own in counts_to]
        received = yield from self._exchanged(context.exchange("counts", headers, [header.numel() for header in headers]), "counts")
        counts_from = message.unpack_headers(received)
        widths = [len(bucket.tables) for bucket in buckets]
        to_others, from_others = (torch.split(counts, widths, 1) for counts in (counts_to, counts_from))
        self._report.num_buckets += len(buckets)
        return [
            BucketMerge(context, [rounds[table.index] for table in bucket.tables], pieces, sent.contiguous(), own.contiguous())
            for bucket, pieces, sent, own in zip(buckets, rows, to_others, from_others, strict=True)
        ]

    def _merge(self, buckets: Sequence[BucketMerge]) -> Rounds[None]:
        """Merges the buckets in turn, each a step behind the next one, so that something is always on its way."""
        up: dict[int, Arrival] = {}
        headers: dict[int, Arrival] = {}
        for place in range(len(buckets) + 2):
            if place < len(buckets):
                up[place] = yield from self._begun(buckets[place].pack(), "up")
            down = None
            if place >= 2:
                answer = buckets[place - 2].agree((yield from self._waited(headers.pop(place - 2), "down header")))
                if not isinstance(answer, Exchange):
                    for arrival in up.values():  # all replicas are on the way to the same error: leave nothing under way
                        yield from self._waited(arrival, "up")
                    raise buckets[place - 2].refuse(*answer)
                down = yield from self._begun(answer, "down")
            if 1 <= place <= len(buckets):
                received = yield from self._waited(up.pop(place - 1), "up")
                headers[place - 1] = yield from self._begun(buckets[place - 1].reduce(received), "down header")
                del received
            if down is not None:
                buckets[place - 2].deliver((yield from self._waited(down, "down")))

    def _exchanged(self, exchange: Exchange, phase: str) -> Rounds[list[torch.Tensor]]:
        return (yield from self._waited((yield from self._begun(exchange, phase)), phase))

    def _begun(self, exchange: Exchange, phase: str) -> Rounds[Arrival]:
        with self._report.timed(phase):
            arrival: Arrival = yield exchange
        return arrival

    def _waited(self, arrival: Arrival, phase: str) -> Rounds[list[torch.Tensor]]:
        with self._report.timed(phase):
            received: list[torch.Tensor] = yield Wait(arrival)
        return received
