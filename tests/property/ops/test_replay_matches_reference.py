"""Layer 2, in process: rows that were absent from batches decay as the plain reference says, bit for bit, and as dense Adam does.

What breaks otherwise: a row is shown without the steps it missed, makes one of them twice or at another step's rate, or a lookup
that only reads changes what training computes.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.ops.batches import BagBatch, batches, tables
from torchrec_kstep.ops import _library, kernels, reference
from torchrec_kstep.ops.batch import RowGradients, TableSpec
from torchrec_kstep.ops.reference import ReferenceGroup
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec, CowClip, OptimizerSpec, RowwiseAdagradSpec, SgdSpec


@st.composite
def replaying(draw: st.DrawFn) -> OptimizerSpec:
    common = {
        "l2": draw(st.sampled_from((1e-5, 1e-2, 0.5))),
        "clip": draw(st.sampled_from((None, CowClip(), CowClip(ratio=0.6, zeta=1e-2)))),
        "l2_absent_rows": "replay",
        "l2_replay_max_steps": draw(st.sampled_from((0, 0, 1, 5))),
    }
    kind = draw(st.sampled_from(("sgd", "adam", "adam_row", "adagrad")))
    lr = draw(st.sampled_from((1e-3, 0.1, 1.0)))
    if kind == "sgd":
        return SgdSpec(lr, **common)
    if kind == "adagrad":
        return RowwiseAdagradSpec(lr, **common)
    is_row = kind == "adam_row"
    return AdamSpec(
        lr,
        betas=draw(st.sampled_from(((0.9, 0.999), (0.0, 0.5)))),
        eps=draw(st.sampled_from((1e-8, 1e-2))),
        bias_correction="row" if is_row else "global",
        step_per_moment=is_row and draw(st.booleans()),
        **common,
    )


class Pair:
    """The compiled group and the reference, one step after the other."""

    def __init__(self, group_tables: list[TableSpec], optimizer: OptimizerSpec, layout: str) -> None:
        self.group, self.expected = RowGroup.in_dram(group_tables, optimizer, layout), ReferenceGroup(group_tables, optimizer)
        self.lr, self.step = optimizer.lr, 0

    def go_on(self, rates: list[float]) -> None:
        """Begins so many steps without a batch, each with its factor on the rate."""
        for factor in rates:
            self.step += 1
            self.group.set_step(self.lr * factor, self.step)
            self.expected.set_step(self.lr * factor, self.step)

    def look_up(self, batch: BagBatch, pooling: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
        out = self.group.pooled(batch.ids, batch.offsets, batch.table_of_feature, weights, pooling)
        arguments = (batch.offsets, self._dedup(batch), batch.table_of_feature, batch.table_dims, pooling)
        assert torch.equal(out, reference.pooled_lookup(self.expected, torch.empty(0), batch.weights, *arguments))
        return out, weights

    def update(self, batch: BagBatch, pooling: str, deferred: bool) -> None:
        out, weights = self.look_up(batch, pooling)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(self.step))
        self.group.set_deferred(deferred)
        out.backward(grad)
        if deferred:
            gradients = self.group.take_pending()
            expected = reference.row_norms(self.expected, gradients)
            assert all(torch.equal(a, b) for a, b in zip(self.group.row_norms(gradients), expected, strict=True))
            self.group.apply(gradients)
        arguments = (batch.offsets, self._dedup(batch), batch.table_of_feature, batch.table_dims, pooling)
        weight_grad = reference.pooled_backward(self.expected, grad, batch.weights, *arguments, weights is not None)
        if weights is not None:
            assert weights.grad is not None
            assert torch.equal(weights.grad, weight_grad)

    def assert_same(self) -> None:
        for table, spec in enumerate(self.group.tables):
            rows = torch.arange(spec.num_rows)
            present = self.expected.present_fields(table)
            for name, values in present.items():
                assert torch.equal(self.group.read(table, rows, name), values), f"table {table} field {name}"

    def _dedup(self, batch: BagBatch) -> reference.Dedup:
        limits = [table.num_rows for table in batch.tables]
        return reference.dedup(batch.ids, batch.offsets, batch.table_of_feature, limits, "error")


@given(
    data=st.data(),
    pooling=st.sampled_from(("sum", "mean")),
    layout=st.sampled_from(("direct", "packed")),
    isa=st.sampled_from(("auto", "avx2")),
)
@settings(max_examples=50, deadline=None)
def test_any_touches_and_rates(data: st.DataObject, pooling: str, layout: str, isa: str) -> None:
    _library.load()
    torch.ops.kstep.select_isa(isa)
    group_tables = data.draw(tables())
    pair = Pair(group_tables, data.draw(replaying()), layout)
    for _ in range(data.draw(st.integers(1, 4))):
        gap = data.draw(st.sampled_from((1, 1, 2, 7, 70)))
        is_constant = data.draw(st.booleans())
        pair.go_on([1.0 if is_constant else 1.0 / (1 + i % 5) for i in range(gap)])
        pair.look_up(data.draw(batches(group_tables)), pooling)  # as an evaluation: what follows must not notice
        pair.update(data.draw(batches(group_tables)), pooling, deferred=data.draw(st.booleans()))
    pair.go_on([1.0, 0.5])
    pair.assert_same()
    torch.ops.kstep.select_isa("auto")


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_sequences_and_written_rows(data: st.DataObject) -> None:
    group_tables = data.draw(tables(max_tables=1))
    optimizer = data.draw(replaying())
    pair = Pair(group_tables, optimizer, "auto")
    pair.go_on([1.0])
    pair.update(data.draw(batches(group_tables)), "sum", deferred=False)
    pair.go_on([1.0, 0.5, 0.25])
    dim, num_rows = group_tables[0].dim, group_tables[0].num_rows
    rows = torch.arange(0, num_rows, 2)
    name = data.draw(st.sampled_from([field.name for field in optimizer.state_fields(dim) if field.dtype == "f32"] + ["weight"]))
    values = torch.rand(rows.numel(), pair.group.field(0, name).width)
    pair.group.write(0, rows, values, name)
    reference.write_rows(pair.expected, 0, rows, name, values)
    pair.go_on([1.0] * 3)
    batch = data.draw(batches(group_tables, weighted=False))
    arguments = (batch.offsets, pair._dedup(batch), batch.table_of_feature, batch.table_dims)
    actual = pair.group.sequence(batch.ids, batch.offsets, batch.table_of_feature)
    assert torch.equal(actual, reference.sequence_lookup(pair.expected, torch.empty(0), *arguments))
    pair.assert_same()


@pytest.mark.parametrize("bias_correction", ["global", "row"])
@pytest.mark.parametrize("dim", [1, 10, 16, 64, 100])
@pytest.mark.parametrize("l2", [1e-4, 1e-1])
def test_equals_dense_adam(bias_correction: str, dim: int, l2: float) -> None:
    """`torch.optim.Adam(weight_decay=l2)` over the whole table, where most rows have gradient zero in most steps."""
    num_rows, num_steps = 200, 50
    table = TableSpec("t", num_rows, dim, init="uniform", init_a=-0.05, init_b=0.05)
    spec = AdamSpec(1e-2, l2=l2, bias_correction=bias_correction, l2_absent_rows="replay")  # type: ignore[arg-type]  # one of the two
    group = RowGroup.in_dram([table], spec)
    weight = torch.nn.Parameter(group.read(0, torch.arange(num_rows)))
    adam = torch.optim.Adam([weight], lr=1e-2, weight_decay=l2)
    generator = torch.Generator().manual_seed(dim)
    for step in range(1, num_steps + 1):
        lr = 1e-2 if step < 20 else 1e-2 / step
        group.set_step(lr, step)
        adam.param_groups[0]["lr"] = lr
        rows = torch.randperm(num_rows, generator=generator)[: int(torch.randint(0, 12, (1,), generator=generator))].sort().values
        assert torch.allclose(group.read(0, rows), weight.detach()[rows], rtol=0, atol=1e-6)
        grads = torch.randn(rows.numel(), dim, generator=generator)
        weight.grad = torch.zeros_like(weight).index_copy(0, rows, grads)
        adam.step()
        counts = torch.ones(rows.numel(), dtype=torch.int32)
        group.apply(RowGradients(rows, torch.tensor([0, rows.numel()]), counts, grads.flatten()))
    group.set_step(1e-2, num_steps + 1)
    state = adam.state[weight]
    for name, expected in (("weight", weight.detach()), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
        assert torch.allclose(group.read(0, torch.arange(num_rows), name), expected, rtol=1e-5, atol=1e-6), name


def test_reading_materialises_nothing_and_lookups_leave_no_trace() -> None:
    table = TableSpec("t", 50, 8, init="normal", init_b=0.1)
    group = RowGroup.in_dram([table], AdamSpec(1e-2, l2=1e-2, l2_absent_rows="replay"))
    group.set_step(1e-2, 1)
    initial = group.read(0, torch.arange(50))
    group.set_step(1e-2, 101)
    decayed = group.read(0, torch.arange(50))
    assert bool((decayed.norm(dim=1) < initial.norm(dim=1)).all())
    out = group.pooled(torch.arange(50), torch.arange(51), [0])
    assert torch.equal(out.detach(), decayed)
    assert group.counters()["t"]["materialised_rows"] == 0
    group.set_step(1e-2, 1)
    assert torch.equal(group.read(0, torch.arange(50)), initial)


def test_a_row_decays_to_exactly_zero_and_costs_nothing_from_then_on() -> None:
    """Ten million steps of absence: denormal numbers never end, and would take minutes."""
    table = TableSpec("t", 4, 16, init="uniform", init_a=0.5, init_b=1.0)
    group = RowGroup.in_dram([table], AdamSpec(1e-3, l2=1e-5, l2_absent_rows="replay"))
    group.set_step(1e-3, 10_000_000)
    for name in ("weight", "m", "v"):
        assert not bool(group.read(0, torch.arange(4), name).any()), name


def test_a_bound_on_the_replay_lets_a_row_stand_still_after_it() -> None:
    rows = torch.arange(5)
    bounded, exact = (
        RowGroup.in_dram(
            [TableSpec("t", 5, 4, init="uniform", init_a=0.5, init_b=1.0)],
            AdamSpec(1e-2, l2=1e-2, l2_absent_rows="replay", l2_replay_max_steps=bound),
        )
        for bound in (30, 0)
    )
    for step in (21, 31, 500):
        bounded.set_step(1e-2, step)
        exact.set_step(1e-2, min(step, 31))
        assert torch.equal(bounded.read(0, rows), exact.read(0, rows)), step


def test_merging_is_refused() -> None:
    tables_of_group = [TableSpec("t", 5, 4)]
    native = RowGroup.in_dram(tables_of_group, AdamSpec(1e-2, l2=1e-2, touches="count"))
    assert native.touched_rows(0).numel() == 0
    options = AdamSpec(1e-2, l2=1e-2, l2_absent_rows="replay").kernel_options()
    source = torch.classes.kstep.RowSource.dram(
        ["t"], [0], [5], [4], ["weight:f32:4,m:f32:4,v:f32:4,last_step:i32:1,touches:i32:1"], ["zero"], [0.0], [0.0], [0], [0], 0
    )
    with pytest.raises(ValueError, match="cannot be merged"):
        torch.classes.kstep.RowGroup(source, "adam", options)
    assert kernels.read_rows(native.handle, 0, torch.arange(5), "weight", 4, torch.float32).shape == (5, 4)
