"""Value types that the ops exchange."""

from typing import Literal, NamedTuple

import torch

Pooling = Literal["sum", "mean"]
OutOfRange = Literal["error", "clamp", "ignore"]
InitKind = Literal["zero", "uniform", "normal"]
MergeForm = Literal["renew", "delta"]
MergePolicy = Literal["union", "touched", "mean"]
Wire = Literal["fp32", "bf16", "int8"]

# The compiled ops know these choices by number.
POOLING_CODES: dict[Pooling, int] = {"sum": 0, "mean": 1}
OUT_OF_RANGE_CODES: dict[OutOfRange, int] = {"error": 0, "clamp": 1, "ignore": 2}
INIT_CODES: dict[InitKind, int] = {"zero": 0, "uniform": 1, "normal": 2}
FORM_CODES: dict[MergeForm, int] = {"renew": 0, "delta": 1}
POLICY_CODES: dict[MergePolicy, int] = {"union": 0, "touched": 1, "mean": 2}
WIRE_CODES: dict[Wire, int] = {"fp32": 0, "bf16": 1, "int8": 2}

IGNORED_POSITION = -1
MAX_ROWS = 1 << 48  # of a table: row ids share 64 bits with the number of the table


class Dedup(NamedTuple):
    """The ids of a batch as unique rows per table. N ids, U unique rows, T tables; all on the CPU.

    Attributes:
        unique_rows: `[U]` int64, table after table, strictly ascending inside a table.
        table_offsets: `[T + 1]` int64, where each table's rows begin in `unique_rows`.
        row_offsets: `[U + 1]` int32, where each row's occurrences begin in `positions`.
        positions: int32, indices into the ids, ascending for each row; `[N]` less the ignored ids.
        inverse: `[N]` int32, the row of each id as an index into `unique_rows`; -1 for an ignored id.
        num_bad: `[T]` int64, ids that were out of range.
    """

    unique_rows: torch.Tensor
    table_offsets: torch.Tensor
    row_offsets: torch.Tensor
    positions: torch.Tensor
    inverse: torch.Tensor
    num_bad: torch.Tensor


class RowGradients(NamedTuple):
    """Gradients summed per unique row.

    Attributes:
        unique_rows: `[U]` int64, as in `Dedup`.
        table_offsets: `[T + 1]` int64, as in `Dedup`.
        counts: `[U]` int32, occurrences of the row in the batch.
        grads: float32, flat: the `dim` floats of each row, one row after the other.
    """

    unique_rows: torch.Tensor
    table_offsets: torch.Tensor
    counts: torch.Tensor
    grads: torch.Tensor

    def per_table(self, table_dims: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views for each table: row ids `[U_t]` and gradients `[U_t, dim]`."""
        bounds = self.table_offsets.tolist()
        views, begin = [], 0
        for table, dim in enumerate(table_dims):
            num_rows = bounds[table + 1] - bounds[table]
            rows = self.unique_rows[bounds[table] : bounds[table + 1]]
            views.append((rows, self.grads[begin : begin + num_rows * dim].view(num_rows, dim)))
            begin += num_rows * dim
        return views


class TableSpec(NamedTuple):
    """One table, or one shard of it, of a row group.

    Attributes:
        name: for messages and in stores; that of a shard by columns is `shard_name` of its table.
        num_rows: ids are in `[0, num_rows)`; at most `MAX_ROWS`.
        dim: columns of this shard, 1 to 2048.
        table_id: part of the key of the initial values; the same for all shards of a table.
        seed: key of the initial values.
        init: how a row starts: "zero", "uniform" or "normal".
        init_a: uniform: lower bound; normal: mean.
        init_b: uniform: upper bound; normal: standard deviation.
        first_column: which column of the whole table is column 0 of this shard.
    """

    name: str
    num_rows: int
    dim: int
    table_id: int = 0
    seed: int = 0
    init: InitKind = "zero"
    init_a: float = 0.0
    init_b: float = 0.0
    first_column: int = 0

    @property
    def whole_table(self) -> str:
        """Name of the table that this is a shard of, which is what settings by table go by."""
        return self.name.removesuffix(_columns(self.first_column, self.dim))


def shard_name(table: str, first_column: int, dim: int) -> str:
    """Names the shard of a table that has some of its columns, e.g. `user[8:16]`."""
    return table + _columns(first_column, dim)


def _columns(first: int, count: int) -> str:
    return f"[{first}:{first + count}]"


class Contributions(NamedTuple):
    """What one replica knows of rows that it touched since the last merge round. n rows, as they were asked for.

    Attributes:
        counts: `[n]` int32, c: the replica's updates of each row, at least 1.
        values: per field `[n, dim]` float32: weights as their change since the base; moments as `MergeForm` says.
    """

    counts: torch.Tensor
    values: dict[str, torch.Tensor]


class Merged(NamedTuple):
    """What the owner of rows makes of all replicas' contributions. U rows, the union of what the replicas touched.

    Attributes:
        rows: `[U]` int64 or int32, strictly ascending.
        u_real: `[U]` float32, u: the touches that the merged row stands for.
        values: per field `[U, dim]` float32: the change of the weights; moments as `MergeForm` says.
    """

    rows: torch.Tensor
    u_real: torch.Tensor
    values: dict[str, torch.Tensor]
