"""Typed wrappers of the compiled ops: one function per op, with its name and argument order.

All tensors are on the CPU and contiguous unless said otherwise. `group` is the handle of a row group (`RowGroup.handle`).
The functions of `torchrec_kstep.ops.reference` are the same ops in plain PyTorch. All of them may be called from any
thread; calls on one group are serialised, and the interpreter lock is released while a kernel runs.
"""

from collections.abc import Sequence

import torch

from torchrec_kstep.ops import _library
from torchrec_kstep.ops._errors import kernel_errors
from torchrec_kstep.ops.batch import INIT_CODES, OUT_OF_RANGE_CODES, POOLING_CODES, Dedup, InitKind, OutOfRange, Pooling, RowGradients


def dedup(
    ids: torch.Tensor, offsets: torch.Tensor, table_of_feature: Sequence[int], num_rows: Sequence[int], out_of_range: OutOfRange
) -> Dedup:
    """Sorts the ids of a batch into unique rows per table.

    Args:
        ids: `[N]` int64 or int32, feature after feature, bag after bag.
        offsets: `[F * B + 1]` int64; bag b of feature f is `ids[offsets[f * B + b] : offsets[f * B + b + 1]]`.
        table_of_feature: `[F]` table that each feature reads.
        num_rows: `[T]` rows of each table.
        out_of_range: for an id below 0 or not below its table's rows: "error" refuses the batch, "clamp" reads the nearest
            valid row (0 or the last), "ignore" treats the id as absent. "clamp" and "ignore" are counted in `num_bad`.

    Raises:
        DataError: an id is out of range and `out_of_range` is "error", or the offsets are not those of the ids.
    """
    _library.load()
    with kernel_errors():
        return Dedup(*torch.ops.kstep.dedup(ids, offsets, table_of_feature, num_rows, OUT_OF_RANGE_CODES[out_of_range]))


def pooled_lookup(
    group: int,
    anchor: torch.Tensor,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
    pooling: Pooling,
) -> torch.Tensor:
    """Pools each bag: `sum_i weight_i * row_i`, divided by the number of its valid ids for "mean"; zeros for an empty bag.

    Differentiable in `weights`. The backward also updates the rows (fused) or keeps their summed gradients in the group
    (deferred); it needs `anchor` to require a gradient, which it never receives.

    Args:
        group: handle of the row group.
        anchor: `[0]` float32.
        weights: `[N]` float32 weight of each id, or None for ones.
        offsets: as in `dedup`.
        batch: result of `dedup` on this batch.
        table_of_feature: as in `dedup`.
        table_dims: `[T]` columns of each table.
        pooling: "sum" or "mean".

    Returns:
        `[B, sum of the features' dims]` float32, features side by side.
    """
    with kernel_errors():
        result: torch.Tensor = torch.ops.kstep.pooled_lookup(
            group, anchor, weights, offsets, *batch[:5], table_of_feature, table_dims, POOLING_CODES[pooling]
        )
    return result


def pooled_backward(
    group: int,
    grad: torch.Tensor,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
    pooling: Pooling,
    needs_weight_grad: bool,
) -> torch.Tensor:
    """Gradient of `pooled_lookup`: updates the rows or keeps their summed gradients, as the group is set.

    A row's gradient is summed over its occurrences in ascending position: the same bits for any number of threads.

    Args:
        group: handle of the row group.
        grad: `[B, columns]` float32, any strides.
        weights: as in `pooled_lookup`.
        offsets: as in `pooled_lookup`.
        batch: as in `pooled_lookup`.
        table_of_feature: as in `pooled_lookup`.
        table_dims: as in `pooled_lookup`.
        pooling: as in `pooled_lookup`.
        needs_weight_grad: compute the gradient of `weights`, with the rows as they are before this update.

    Returns:
        `[N]` float32 gradient of the weights, `[0]` if not needed.
    """
    with kernel_errors():
        result: torch.Tensor = torch.ops.kstep.pooled_backward(
            group, grad, weights, offsets, *batch[:5], table_of_feature, table_dims, POOLING_CODES[pooling], needs_weight_grad
        )
    return result


def sequence_lookup(
    group: int,
    anchor: torch.Tensor,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
) -> torch.Tensor:
    """Reads the row of each id, without pooling; zeros for an ignored id. Arguments as in `pooled_lookup`.

    Returns:
        float32, flat: the `dim` floats of each id in the order of the ids; `view(N, dim)` where all dims are equal.
    """
    with kernel_errors():
        result: torch.Tensor = torch.ops.kstep.sequence_lookup(group, anchor, offsets, *batch[:5], table_of_feature, table_dims)
    return result


def sequence_backward(
    group: int,
    grad: torch.Tensor,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
) -> None:
    """Gradient of `sequence_lookup`, as `pooled_backward`; `grad` has the shape of its result."""
    with kernel_errors():
        torch.ops.kstep.sequence_backward(group, grad, offsets, *batch[:5], table_of_feature, table_dims)


def merge_row_gradients(parts: Sequence[RowGradients], table_dims: Sequence[int]) -> RowGradients:
    """Adds up the gradients of micro-batches or replicas, row by row in the order of `parts`; counts are added too."""
    _library.load()
    with kernel_errors():
        columns = [[part[field] for part in parts] for field in range(4)]
        return RowGradients(*torch.ops.kstep.merge_row_gradients(*columns, table_dims))


def apply_row_gradients(group: int, gradients: RowGradients, scales: torch.Tensor | None = None) -> None:
    """Updates the rows from summed gradients, with the same bits as a fused backward that sums the same numbers.

    Args:
        group: handle of the row group.
        gradients: of its tables.
        scales: `[U]` float32 factor of each row's gradient (L2 included), in place of the optimizer's own clip.
    """
    with kernel_errors():
        torch.ops.kstep.apply_row_gradients(group, *gradients, scales)


def row_norms(group: int, gradients: RowGradients) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the squared norm of each row's gradient (L2 included) and of its weights, both `[U]` float32.

    A clip by norm of rows whose columns are divided over ranks adds these up over the ranks, and gives `apply_row_gradients`
    the factors.
    """
    with kernel_errors():
        grad_squares, weight_squares = torch.ops.kstep.row_norms(group, *gradients)
    return grad_squares, weight_squares


def read_rows(group: int, table: int, rows: torch.Tensor, field: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[n, width]` of one field of the records of `rows` (`[n]` int64, strictly ascending). Never materialises a row."""
    with kernel_errors():
        result: torch.Tensor = torch.ops.kstep.read_rows(group, table, rows, field, width, dtype)
    return result


def write_rows(group: int, table: int, rows: torch.Tensor, field: str, values: torch.Tensor) -> None:
    """Overwrites one field of the records of `rows` (`[n]` int64, strictly ascending) by `values` (`[n, width]`)."""
    with kernel_errors():
        torch.ops.kstep.write_rows(group, table, rows, field, values)


def prefetch_rows(group: int, unique_rows: torch.Tensor, table_offsets: torch.Tensor) -> None:
    """Says which rows (as in `Dedup`) the next batches will read. A hint: it never changes a result."""
    with kernel_errors():
        torch.ops.kstep.prefetch_rows(group, unique_rows, table_offsets)


def initial_values(
    rows: torch.Tensor, seed: int, table_id: int, first_column: int, dim: int, kind: InitKind, a: float, b: float
) -> torch.Tensor:
    """Returns `[n, dim]` float32, the weights that never-touched `rows` (`[n]` int64) have: see `TableSpec` for the arguments."""
    _library.load()
    with kernel_errors():
        result: torch.Tensor = torch.ops.kstep.initial_values(rows, seed, table_id, first_column, dim, INIT_CODES[kind], a, b)
    return result
