"""Cuts a round into buckets: ranges of keys in which all replicas together touched a bounded number of bytes.

Replicas must cut alike though each knows its own rows only. Each tells how many rows it touched of each table; if that is
too much for one bucket, each also names some of its keys, evenly spaced by bytes, and all cut between the same of those.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_kstep.merge.layout import MergedTable

_SAMPLES_PER_BUCKET = 8  # and replica; the more, the fuller the buckets, and the more keys are named


@dataclass(frozen=True)
class Bucket:
    """A range of keys.

    Attributes:
        begin: first key.
        end: first key after it.
        tables: those with rows in it, on any replica.
    """

    begin: int
    end: int
    tables: tuple[MergedTable, ...]

    def rows_of(self, table: MergedTable, rows: torch.Tensor) -> torch.Tensor:
        """Returns the part of ascending `rows` of a table, a view, that lies in this bucket."""
        bounds = torch.tensor([self.begin - table.first_key, self.end - table.first_key])
        first, last = torch.searchsorted(rows, bounds).tolist()
        return rows[first:last]


class BucketCutter:
    """Cuts by what all replicas touched."""

    def __init__(self, tables: Sequence[MergedTable], row_bytes: Sequence[int], num_touched: torch.Tensor, bucket_bytes: int) -> None:
        """Decides how densely keys must be named.

        Args:
            tables: those that are merged, in the order of their keys.
            row_bytes: memory that a row of each takes in a bucket.
            num_touched: `[N, T]` int64, rows by replica and table.
            bucket_bytes: bound of a bucket; at least 8 of the largest rows per replica are taken all the same.
        """
        self._tables = tuple(tables)
        self._row_bytes = torch.tensor(list(row_bytes), dtype=torch.int64)
        self._num_touched = num_touched
        self._num_replicas = num_touched.shape[0]
        self._touched_bytes = num_touched * self._row_bytes  # [N, T]
        largest = max(row_bytes, default=1)
        self._bucket_bytes = max(bucket_bytes, _SAMPLES_PER_BUCKET * self._num_replicas * largest)
        self._spacing_bytes = self._bucket_bytes // (_SAMPLES_PER_BUCKET * self._num_replicas)

    @property
    def is_one_bucket(self) -> bool:
        """Whether nothing needs to be cut, hence no key be named."""
        return int(self._touched_bytes.sum()) <= self._bucket_bytes

    def num_samples(self) -> list[int]:
        """How many keys each replica names."""
        return [int(total) // self._spacing_bytes for total in self._touched_bytes.sum(dim=1)]

    def sample(self, replica: int, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns `[num_samples]` int64, the keys that this replica names.

        Args:
            replica: its index.
            rows: per table the rows it touched, ascending int64.
        """
        num_samples = self.num_samples()[replica]
        marks = (torch.arange(num_samples) + 1) * self._spacing_bytes - 1  # positions in bytes, one per spacing
        ends = self._touched_bytes[replica].cumsum(0)
        which = torch.searchsorted(ends, marks, right=True)
        keys = torch.empty(num_samples, dtype=torch.int64)
        for index, table in enumerate(self._tables):
            mine = which == index
            begin = int(ends[index]) - int(self._touched_bytes[replica, index])
            positions = (marks[mine] - begin) // self._row_bytes[index]
            keys[mine] = rows[index][positions] + table.first_key
        return keys

    def cut(self, samples: Sequence[torch.Tensor]) -> list[Bucket]:
        """Returns the buckets, the same on all replicas; none where nothing was touched.

        S keys named within a bucket stand for at most S + N spacings, for each replica may have nearly one more before its next
        key. A cut falls after one of several equal keys: the others, at most N - 1, are in the bucket too.

        Args:
            samples: the keys that each replica named; empty tensors where there is one bucket.
        """
        total = self._num_touched.sum(dim=0)
        touched = [table for table, count in zip(self._tables, total.tolist(), strict=True) if count]
        if not touched:
            return []
        named = torch.cat(list(samples)).sort().values
        per_bucket = (_SAMPLES_PER_BUCKET - 2) * self._num_replicas
        cuts = [int(key) + 1 for key in named[per_bucket - 1 :: per_bucket]]  # after a named key
        first, last = touched[0].first_key, touched[-1].first_key + touched[-1].num_rows
        edges = [first, *sorted({cut for cut in cuts if first < cut < last}), last]
        return [
            Bucket(begin, end, tuple(table for table in touched if table.first_key < end and begin < table.first_key + table.num_rows))
            for begin, end in itertools.pairwise(edges)
        ]
