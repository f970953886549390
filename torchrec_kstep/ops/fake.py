"""Fake kernels: the shape and dtype of each op's result, for tracing and export."""

from collections.abc import Sequence

import torch

from torchrec_kstep.ops.batch import WIRE_CODES

_OptionalTensor = torch.Tensor | None


def register() -> None:
    """Registers a fake kernel for every op; the library must be loaded."""
    for name, function in (
        ("dedup", _dedup),
        ("pooled_lookup", _pooled_lookup),
        ("pooled_backward", _pooled_backward),
        ("sequence_lookup", _sequence_lookup),
        ("sequence_backward", _nothing),
        ("merge_row_gradients", _merge_row_gradients),
        ("apply_row_gradients", _nothing),
        ("row_norms", _row_norms),
        ("read_rows", _read_rows),
        ("write_rows", _nothing),
        ("prefetch_rows", _nothing),
        ("initial_values", _initial_values),
        ("merge_collect", _merge_collect),
        ("merge_reduce", _merge_reduce),
        ("merge_apply", _merge_apply),
        ("wire_encode", _wire_encode),
        ("wire_decode", _wire_decode),
        ("empty_message", _empty_message),
        ("merge_owner_counts", _merge_owner_counts),
        ("merge_pack", _first_bad),
        ("merge_pack_contributions", _first_bad),
        ("merge_reduce_messages", _merge_reduce_messages),
        ("merge_apply_messages", _merge_apply_messages),
    ):
        torch.library.register_fake(f"kstep::{name}", function)


def _nothing(*_arguments: object) -> None:
    return None


def _dedup(
    ids: torch.Tensor, offsets: torch.Tensor, table_of_feature: Sequence[int], num_rows: Sequence[int], out_of_range: int
) -> tuple[torch.Tensor, ...]:
    del table_of_feature, out_of_range
    context = torch.library.get_ctx()
    num_unique, num_valid = context.new_dynamic_size(), context.new_dynamic_size()
    narrow = torch.int32
    return (
        offsets.new_empty(num_unique),
        offsets.new_empty(len(num_rows) + 1),
        offsets.new_empty(num_unique + 1, dtype=narrow),
        offsets.new_empty(num_valid, dtype=narrow),
        offsets.new_empty(ids.numel(), dtype=narrow),
        offsets.new_empty(len(num_rows)),
    )


def _pooled_lookup(
    group: int,
    anchor: torch.Tensor,
    weights: _OptionalTensor,
    offsets: torch.Tensor,
    unique_rows: torch.Tensor,
    table_offsets: torch.Tensor,
    row_offsets: torch.Tensor,
    positions: torch.Tensor,
    inverse: torch.Tensor,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
    pooling: int,
) -> torch.Tensor:
    del group, weights, unique_rows, table_offsets, row_offsets, positions, inverse, pooling
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    return anchor.new_empty(batch_size, sum(table_dims[table] for table in table_of_feature))


def _pooled_backward(
    group: int,
    grad: torch.Tensor,
    weights: _OptionalTensor,
    offsets: torch.Tensor,
    unique_rows: torch.Tensor,
    table_offsets: torch.Tensor,
    row_offsets: torch.Tensor,
    positions: torch.Tensor,
    inverse: torch.Tensor,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
    pooling: int,
    needs_weight_grad: bool,
) -> torch.Tensor:
    del group, weights, offsets, unique_rows, table_offsets, row_offsets, positions, table_of_feature, table_dims, pooling
    return grad.new_empty(inverse.numel() if needs_weight_grad else 0)


def _sequence_lookup(
    group: int,
    anchor: torch.Tensor,
    offsets: torch.Tensor,
    unique_rows: torch.Tensor,
    table_offsets: torch.Tensor,
    row_offsets: torch.Tensor,
    positions: torch.Tensor,
    inverse: torch.Tensor,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
) -> torch.Tensor:
    del group, offsets, unique_rows, table_offsets, row_offsets, positions
    dims = {table_dims[table] for table in table_of_feature}
    if len(dims) == 1:
        return anchor.new_empty(inverse.numel() * dims.pop())
    return anchor.new_empty(torch.library.get_ctx().new_dynamic_size())


def _merge_row_gradients(
    unique_rows: Sequence[torch.Tensor],
    table_offsets: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    table_dims: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    del table_dims
    context = torch.library.get_ctx()
    num_unique, num_floats = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        unique_rows[0].new_empty(num_unique),
        torch.empty_like(table_offsets[0]),
        counts[0].new_empty(num_unique),
        grads[0].new_empty(num_floats),
    )


def _row_norms(
    group: int, unique_rows: torch.Tensor, table_offsets: torch.Tensor, counts: torch.Tensor, grads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    del group, table_offsets, counts
    return grads.new_empty(unique_rows.numel()), grads.new_empty(unique_rows.numel())


def _read_rows(group: int, table: int, rows: torch.Tensor, field: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    del group, table, field
    return rows.new_empty(rows.numel(), width, dtype=dtype)


def _initial_values(
    rows: torch.Tensor, seed: int, table_id: int, first_column: int, dim: int, kind: int, a: float, b: float
) -> torch.Tensor:
    del seed, table_id, first_column, kind, a, b
    return rows.new_empty(rows.numel(), dim, dtype=torch.float32)


def _merge_collect(
    group: int, table: int, tracker: int, rows: torch.Tensor, form: int, num_fields: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    del group, table, tracker, form
    return rows.new_empty(rows.numel(), dtype=torch.int32), rows.new_empty(num_fields, rows.numel(), dim, dtype=torch.float32)


def _merge_reduce(
    rows: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    is_averaged: Sequence[bool],
    policy: int,
    num_steps: int,
    num_replicas: int,
) -> tuple[torch.Tensor, ...]:
    del counts, policy, num_steps, num_replicas
    num_rows = torch.library.get_ctx().new_dynamic_size()
    first = values[0]
    return rows[0].new_empty(num_rows), first.new_empty(num_rows), first.new_empty(len(is_averaged), num_rows, first.shape[1])


def _merge_apply(
    group: int, table: int, tracker: int, rows: torch.Tensor, u_real: torch.Tensor, values: Sequence[torch.Tensor], form: int, step: int
) -> int:
    del group, table, tracker, rows, u_real, values, form, step
    return 0


def _wire_encode(values: torch.Tensor, wire: int, rows: torch.Tensor, salt: int) -> torch.Tensor:
    del rows, salt
    row_bytes = 2 * values.shape[1] if wire == WIRE_CODES["bf16"] else 4 + values.shape[1]
    return values.new_empty(values.shape[0], row_bytes, dtype=torch.uint8)


def _wire_decode(encoded: torch.Tensor, wire: int, dim: int) -> torch.Tensor:
    del wire
    return encoded.new_empty(encoded.shape[0], dim, dtype=torch.float32)


def _empty_message(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _merge_owner_counts(rows: Sequence[torch.Tensor], first_keys: Sequence[int], num_replicas: int) -> torch.Tensor:
    del first_keys
    return rows[0].new_empty(num_replicas, len(rows))


def _first_bad(*_arguments: object) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _merge_reduce_messages(messages: Sequence[torch.Tensor], counts: torch.Tensor, *_numbers: object) -> tuple[torch.Tensor, torch.Tensor]:
    num_bytes = torch.library.get_ctx().new_dynamic_size()
    return messages[0].new_empty(num_bytes), counts.new_empty(counts.shape[1])


def _merge_apply_messages(*_arguments: object) -> tuple[int, float, float]:
    return 0, 0.0, 0.0
