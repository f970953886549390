"""Row gradients summed over replicas: the exchange of true synchronous training, k = 1.

Every row has an owner among the replicas. A replica sends the gradients that its step summed to the owners; they add them up
in the order of the replicas and send sums and counts back to all, so that all apply the same bits.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchrec_kstep.ops.batch import RowGradients
from torchrec_kstep.ops.row_group import RowGroup


class GradientExchange:
    """Exchanges the pending gradients of row groups, whose order is the same on all ranks of `process_group`."""

    def __init__(self, groups: Sequence[RowGroup], process_group: dist.ProcessGroup) -> None:
        """Keeps the groups and the ranks that hold the same shards."""
        self._groups = groups
        self._process_group = process_group
        self._num_replicas = dist.get_world_size(process_group)
        self._dims = [dim for group in groups for dim in group.table_dims]
        self.num_bytes_sent = 0  # by this rank to other replicas

    def exchange(self) -> list[RowGradients]:
        """Takes the pending gradients of every group and returns their mean over replicas, counts summed. Collective."""
        if not self._groups:  # then no rank of the process group has any: they hold the same shards
            return []
        own = [_Rows(*table) for group in self._groups for table in _tables(group)]
        received = self._send([_owned(table, replica, self._num_replicas) for replica in range(self._num_replicas) for table in own])
        summed = [_sum(received[table :: len(own)], dim, 1.0 / self._num_replicas) for table, dim in enumerate(self._dims)]
        returned = self._send(summed * self._num_replicas)
        merged = [_join(returned[table :: len(own)]) for table in range(len(own))]
        gradients, begin = [], 0
        for group in self._groups:
            tables = merged[begin : begin + len(group.tables)]
            begin += len(tables)
            gradients.append(_gradients(tables))
        return gradients

    def _send(self, tables: list["_Rows"]) -> list["_Rows"]:
        """Sends tables, those for replica 0 first, and returns what came, that of replica 0 first."""
        num_tables = len(self._dims)
        sizes = torch.tensor([len(table.rows) for table in tables], dtype=torch.int64)
        sizes_in = torch.empty_like(sizes)
        dist.all_to_all_single(sizes_in, sizes, group=self._process_group)
        num_in = sizes_in.view(self._num_replicas, num_tables)
        num_out = sizes.view(self._num_replicas, num_tables)
        dims = torch.tensor(self._dims, dtype=torch.int64)
        rows = self._move([table.rows for table in tables], num_out.sum(1), num_in.sum(1))
        counts = self._move([table.counts for table in tables], num_out.sum(1), num_in.sum(1))
        grads = self._move([table.grads.reshape(-1) for table in tables], (num_out * dims).sum(1), (num_in * dims).sum(1))
        found, first, first_value = [], 0, 0
        for index, num_rows in enumerate(sizes_in.tolist()):
            dim = self._dims[index % num_tables]
            last, last_value = first + num_rows, first_value + num_rows * dim
            found.append(_Rows(rows[first:last], counts[first:last], grads[first_value:last_value].view(num_rows, dim)))
            first, first_value = last, last_value
        return found

    def _move(self, parts: list[torch.Tensor], num_out: torch.Tensor, num_in: torch.Tensor) -> torch.Tensor:
        """One all-to-all of parts that lie in the order of their receivers."""
        sent = torch.cat(parts)
        received = torch.empty(int(num_in.sum()), dtype=sent.dtype)
        dist.all_to_all_single(received, sent, num_in.tolist(), num_out.tolist(), group=self._process_group)
        own = int(num_out[dist.get_rank(self._process_group)])
        self.num_bytes_sent += (sent.numel() - own) * sent.element_size()
        return received


class _Rows:
    """Rows of one table with their gradients.

    Attributes:
        rows: `[n]` int64 ascending.
        counts: `[n]` int32, occurrences.
        grads: `[n, dim]` float32.
    """

    def __init__(self, rows: torch.Tensor, counts: torch.Tensor, grads: torch.Tensor) -> None:
        self.rows = rows
        self.counts = counts
        self.grads = grads


def _tables(group: RowGroup) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Takes the pending gradients of a group, table by table; empty ones where no backward has run."""
    if not group.num_pending:
        return [(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), torch.empty(0, dim)) for dim in group.table_dims]
    pending = group.take_pending()
    bounds = pending.table_offsets.tolist()
    return [
        (rows, pending.counts[bounds[table] : bounds[table + 1]], grads)
        for table, (rows, grads) in enumerate(pending.per_table(group.table_dims))
    ]


def _owned(table: _Rows, replica: int, num_replicas: int) -> _Rows:
    """Returns the rows whose owner a replica is."""
    mine = (table.rows % num_replicas) == replica
    return _Rows(table.rows[mine], table.counts[mine], table.grads[mine])


def _sum(parts: Sequence[_Rows], dim: int, scale: float) -> _Rows:
    """Adds up gradients of the same rows in the order of the parts, and multiplies the sums."""
    rows = torch.unique(torch.cat([part.rows for part in parts]))
    counts, grads = torch.zeros(len(rows), dtype=torch.int32), torch.zeros(len(rows), dim)
    for part in parts:
        index = torch.searchsorted(rows, part.rows)
        counts.index_add_(0, index, part.counts)
        grads.index_add_(0, index, part.grads)
    return _Rows(rows, counts, grads * scale)


def _join(parts: Sequence[_Rows]) -> _Rows:
    """Joins rows of different owners, ascending."""
    rows, order = torch.cat([part.rows for part in parts]).sort()
    return _Rows(rows, torch.cat([part.counts for part in parts])[order], torch.cat([part.grads for part in parts])[order])


def _gradients(tables: Sequence[_Rows]) -> RowGradients:
    """Lays the tables of a group end to end."""
    offsets = torch.tensor([0, *(len(table.rows) for table in tables)], dtype=torch.int64).cumsum(0)
    return RowGradients(
        torch.cat([table.rows for table in tables]),
        offsets,
        torch.cat([table.counts for table in tables]),
        torch.cat([table.grads.reshape(-1) for table in tables]),
    )
