"""Layer 2, in process: every compiled op gives the bits of its plain PyTorch reference, for any tables, bags and optimizer.

What breaks otherwise: a row read or updated wrongly at some dim, bag shape or id type that the benchmarks do not use.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.ops.batches import BagBatch, batches, optimizers, tables
from torchrec_kstep.errors import DataError
from torchrec_kstep.ops import kernels, reference
from torchrec_kstep.ops.batch import Dedup
from torchrec_kstep.ops.reference import ReferenceGroup
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec, SgdSpec

DTYPES = {"f32": torch.float32, "i32": torch.int32}


def both_groups(batch: BagBatch, optimizer: OptimizerSpec, layout: str = "auto") -> tuple[RowGroup, ReferenceGroup]:
    return RowGroup.in_dram(batch.tables, optimizer, layout), ReferenceGroup(batch.tables, optimizer)


def both_dedups(batch: BagBatch, out_of_range: str = "error") -> tuple[Dedup, Dedup]:
    arguments = (batch.ids, batch.offsets, batch.table_of_feature, [table.num_rows for table in batch.tables], out_of_range)
    return kernels.dedup(*arguments), reference.dedup(*arguments)


def assert_same_rows(group: RowGroup, expected: ReferenceGroup) -> None:
    for table, spec in enumerate(group.tables):
        for field in expected.optimizer.record_fields(spec.dim):
            actual = group.read(table, torch.arange(spec.num_rows), field.name)
            assert torch.equal(actual, expected.present_fields(table)[field.name]), f"table {table} field {field.name}"


def set_steps(group: RowGroup, expected: ReferenceGroup, lr: float, step: int) -> None:
    group.set_step(lr, step)
    expected.set_step(lr, step)


@given(data=st.data(), mode=st.sampled_from(("error", "clamp", "ignore")), bad_ids=st.booleans())
def test_dedup(data: st.DataObject, mode: str, bad_ids: bool) -> None:
    batch = data.draw(batches(data.draw(tables()), bad_ids=bad_ids))
    limits = torch.tensor([table.num_rows for table in batch.tables])
    feature = torch.repeat_interleave(torch.arange(batch.offsets.numel() - 1), batch.offsets.diff()) // batch.batch_size
    limit = limits[torch.tensor(batch.table_of_feature)][feature]
    is_bad = (batch.ids < 0) | (batch.ids >= limit)
    if mode == "error" and bool(is_bad.any()):
        with pytest.raises(DataError, match=f"id {int(batch.ids[is_bad][0])} at position"):
            kernels.dedup(batch.ids, batch.offsets, batch.table_of_feature, limits.tolist(), mode)
        return
    actual, expected = both_dedups(batch, mode)
    for name in Dedup._fields:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert int(actual.num_bad.sum()) == int(is_bad.sum())


@given(data=st.data(), pooling=st.sampled_from(("sum", "mean")), mode=st.sampled_from(("clamp", "ignore")))
def test_pooled_forward(data: st.DataObject, pooling: str, mode: str) -> None:
    batch = data.draw(batches(data.draw(tables()), bad_ids=True))
    group, expected_group = both_groups(batch, SgdSpec(1.0))
    dedup, expected_dedup = both_dedups(batch, mode)
    arguments = (batch.table_of_feature, batch.table_dims, pooling)
    anchor = torch.empty(0)
    actual = kernels.pooled_lookup(group.handle, anchor, batch.weights, batch.offsets, dedup, *arguments)
    expected = reference.pooled_lookup(expected_group, anchor, batch.weights, batch.offsets, expected_dedup, *arguments)
    assert actual.shape == (batch.batch_size, batch.columns)
    assert torch.equal(actual, expected)


@given(data=st.data(), mode=st.sampled_from(("clamp", "ignore")), deferred=st.booleans())
def test_sequence_forward_and_backward(data: st.DataObject, mode: str, deferred: bool) -> None:
    batch = data.draw(batches(data.draw(tables()), weighted=False, bad_ids=True))
    group, expected_group = both_groups(batch, data.draw(optimizers()))
    group.set_deferred(deferred)
    dedup, expected_dedup = both_dedups(batch, mode)
    arguments = (batch.table_of_feature, batch.table_dims)
    anchor = torch.empty(0, requires_grad=True)
    set_steps(group, expected_group, 0.1, 1)
    actual = kernels.sequence_lookup(group.handle, anchor, batch.offsets, dedup, *arguments)
    expected = reference.sequence_lookup(expected_group, anchor, batch.offsets, expected_dedup, *arguments)
    assert torch.equal(actual, expected)
    grad = torch.randn(actual.numel(), generator=torch.Generator().manual_seed(3))
    actual.backward(grad)
    reference.sequence_backward(expected_group, grad, batch.offsets, expected_dedup, *arguments)
    if deferred:
        group.apply(group.take_pending())
    assert_same_rows(group, expected_group)


@given(
    data=st.data(),
    pooling=st.sampled_from(("sum", "mean")),
    mode=st.sampled_from(("clamp", "ignore")),
    layout=st.sampled_from(("direct", "packed")),
    num_steps=st.integers(1, 3),
    isa=st.sampled_from(("auto", "avx2")),
)
@settings(max_examples=150)
def test_training_steps(data: st.DataObject, pooling: str, mode: str, layout: str, num_steps: int, isa: str) -> None:
    """Several fused steps: outputs, gradients of the weights, and every field of every row."""
    torch.ops.kstep.select_isa(isa)
    group_tables = data.draw(tables())
    optimizer = data.draw(optimizers())
    first = data.draw(batches(group_tables))
    group, expected_group = both_groups(first, optimizer, layout)
    for step in range(1, num_steps + 1):
        batch = data.draw(batches(group_tables, bad_ids=True))
        set_steps(group, expected_group, optimizer.lr / step, step)
        dedup, expected_dedup = both_dedups(batch, mode)
        arguments = (batch.table_of_feature, batch.table_dims, pooling)
        weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
        anchor = torch.empty(0, requires_grad=True)
        out = kernels.pooled_lookup(group.handle, anchor, weights, batch.offsets, dedup, *arguments)
        expected_out = reference.pooled_lookup(expected_group, anchor, batch.weights, batch.offsets, expected_dedup, *arguments)
        assert torch.equal(out, expected_out)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
        out.backward(grad)
        weight_grad = reference.pooled_backward(
            expected_group, grad, batch.weights, batch.offsets, expected_dedup, *arguments, batch.weights is not None
        )
        if weights is not None:
            assert weights.grad is not None
            assert torch.equal(weights.grad, weight_grad)
        assert anchor.grad is None
        assert_same_rows(group, expected_group)
    torch.ops.kstep.select_isa("auto")


@given(data=st.data(), num_parts=st.integers(1, 4))
def test_merged_gradients(data: st.DataObject, num_parts: int) -> None:
    """Deferred micro-batches: the sum of their gradients, and the update from it."""
    group_tables = data.draw(tables())
    optimizer = data.draw(optimizers())
    parts = [data.draw(batches(group_tables)) for _ in range(num_parts)]
    group, expected_group = both_groups(parts[0], optimizer)
    group.set_deferred(True)
    expected_group.is_deferred = True
    set_steps(group, expected_group, optimizer.lr, 1)
    for index, batch in enumerate(parts):
        out = group.pooled(batch.ids, batch.offsets, batch.table_of_feature, batch.weights)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(index))
        out.backward(grad)
        reference.pooled_backward(
            expected_group,
            grad,
            batch.weights,
            batch.offsets,
            both_dedups(batch)[1],
            batch.table_of_feature,
            batch.table_dims,
            "sum",
            False,
        )
    assert group.num_pending == num_parts
    merged = group.take_pending()
    expected = reference.merge_row_gradients(expected_group.pending, group.table_dims)
    for name in merged._fields:
        assert torch.equal(getattr(merged, name), getattr(expected, name)), name
    compiled_merge = kernels.merge_row_gradients(expected_group.pending, group.table_dims)
    assert all(torch.equal(a, b) for a, b in zip(compiled_merge, expected, strict=True))
    norms, expected_norms = group.row_norms(merged), reference.row_norms(expected_group, expected)
    assert all(torch.equal(a, b) for a, b in zip(norms, expected_norms, strict=True))
    num_rows = merged.counts.numel()
    scales = torch.rand(num_rows, generator=torch.Generator().manual_seed(num_rows)) if data.draw(st.booleans()) else None
    group.apply(merged, scales)
    reference.apply_row_gradients(expected_group, expected, scales)
    assert group.num_pending == 0
    assert_same_rows(group, expected_group)


@given(
    rows=st.lists(st.integers(0, 2**48 - 1), max_size=20),
    seed=st.integers(0, 2**63 - 1),
    table_id=st.integers(0, 2**32 - 1),
    first_column=st.integers(0, 3000),
    dim=st.integers(1, 200),
    kind=st.sampled_from(("zero", "uniform", "normal")),
)
def test_initial_values(rows: list[int], seed: int, table_id: int, first_column: int, dim: int, kind: str) -> None:
    arguments = (torch.tensor(rows, dtype=torch.int64), seed, table_id, first_column, dim, kind, -0.25, 0.75)
    assert torch.equal(kernels.initial_values(*arguments), reference.initial_values(*arguments))


@given(data=st.data())
def test_fields_are_read_and_written(data: st.DataObject) -> None:
    batch = data.draw(batches(data.draw(tables(max_tables=1))))
    optimizer = data.draw(optimizers())
    group, expected_group = both_groups(batch, optimizer)
    num_rows, dim = batch.tables[0].num_rows, batch.tables[0].dim
    field = data.draw(st.sampled_from(optimizer.record_fields(dim)))
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, num_rows - 1), max_size=30))), dtype=torch.int64)
    values = torch.arange(rows.numel() * field.width).view(rows.numel(), field.width).to(DTYPES[field.dtype])
    kernels.prefetch_rows(group.handle, rows, torch.tensor([0, rows.numel()]))
    reference.prefetch_rows(expected_group, rows, torch.tensor([0, rows.numel()]))
    kernels.write_rows(group.handle, 0, rows, field.name, values)
    reference.write_rows(expected_group, 0, rows, field.name, values)
    arguments = (0, rows, field.name, field.width, DTYPES[field.dtype])
    assert torch.equal(kernels.read_rows(group.handle, *arguments), reference.read_rows(expected_group, *arguments))
    assert_same_rows(group, expected_group)
