"""Layer 2, in process: whole merge messages hold the bytes of their plain PyTorch reference, and applying them gives its bits.

What breaks otherwise: a fused pass that rounds, orders or counts otherwise than its parts, so that replicas or transports drift
apart; a row sent to a replica that does not own it.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_kstep.errors import DataError
from torchrec_kstep.ops import merge, messages, reference, reference_messages
from torchrec_kstep.ops.batch import MergeForm, MergePolicy, RowGradients, TableSpec, Wire
from torchrec_kstep.ops.message_layout import Format, Formats, Layout
from torchrec_kstep.ops.reference import ReferenceGroup
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec

FORMS: tuple[MergeForm, ...] = ("renew", "delta")
POLICIES: tuple[MergePolicy, ...] = ("union", "touched", "mean")
WIRES: tuple[Wire, ...] = ("fp32", "bf16", "int8")
NUM_REPLICAS = 3
NUM_ROWS = (40, 7, 90)
FIRST_KEYS = (0, 40, 47)
NUM_STEPS = 3


@dataclass
class Round:
    """Tables of three replicas with touched rows, compiled and as reference, and how they are merged."""

    groups: list[RowGroup]
    expected: list[ReferenceGroup]
    form: MergeForm
    policy: MergePolicy
    up: Formats
    down: Formats

    def salts(self, replica: int, is_down: bool) -> list[int]:
        return [merge.noise_salt(replica, int(is_down), place) for place in range(len(self.up.wires))]

    def rows(self, replica: int) -> list[torch.Tensor]:
        return [self.groups[replica].touched_rows(table) for table in range(len(NUM_ROWS))]


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    dims = [draw(st.sampled_from((1, 3, 8, 17, 64))) for _ in NUM_ROWS]
    tables = [
        TableSpec(f"t{index}", size, dim, index, 5, "uniform", -0.5, 0.5)
        for index, (size, dim) in enumerate(zip(NUM_ROWS, dims, strict=True))
    ]
    optimizer = AdamSpec(0.1, touches="count", bias_correction="row")
    fields = draw(st.sampled_from((("weight",), ("weight", "m", "v"), ("v",))))
    wire = draw(st.sampled_from(WIRES))
    wires = tuple(merge.field_wire(name, wire) for name in fields)
    id_type = draw(st.sampled_from((torch.int32, torch.int64)))
    count_type = draw(st.sampled_from((torch.uint8, torch.int16, torch.int32, None)))
    down_type = draw(st.sampled_from((torch.float32, None)))
    groups, expected = [], []
    for replica in range(NUM_REPLICAS):
        group, reference_group = RowGroup.in_dram(tables, optimizer), ReferenceGroup(tables, optimizer)
        for either in (group, reference_group):
            either.track(0, fields)
        share = draw(st.sampled_from((0.0, 0.3, 1.0)))
        for step in range(NUM_STEPS):
            train(group, reference_group, share, 100 * replica + step, step + 1)
        groups.append(group)
        expected.append(reference_group)
    up = Formats([Format(id_type, count_type, dim, fields, wires) for dim in dims])
    down = Formats([Format(id_type, down_type, dim, fields, wires) for dim in dims])
    return Round(groups, expected, draw(st.sampled_from(FORMS)), draw(st.sampled_from(POLICIES)), up, down)


def train(group: RowGroup, expected: ReferenceGroup, share: float, seed: int, step: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    rows = [(torch.rand(table.num_rows, generator=noise) < share).nonzero()[:, 0] for table in group.tables]
    bounds = torch.tensor([0, *(own.numel() for own in rows)]).cumsum(0)
    grads = torch.cat([torch.randn(own.numel() * dim, generator=noise) for own, dim in zip(rows, group.table_dims, strict=True)])
    gradients = RowGradients(torch.cat(rows), bounds, torch.ones(int(bounds[-1]), dtype=torch.int32), grads)
    group.set_step(0.1, step)
    group.apply(gradients)
    expected.lr, expected.step = 0.1, step
    reference.apply_row_gradients(expected, gradients)


def packed(round_: Round, replica: int, layout: Layout) -> list[torch.Tensor]:
    """Packs by all three ways, and returns the message to each replica."""
    rows = round_.rows(replica)
    arguments = (rows, round_.up, round_.salts(replica, False), FIRST_KEYS, 2, layout)
    made = [torch.full((sum(layout.sizes),), fill, dtype=torch.uint8) for fill in (1, 2, 0)]
    tables = range(len(NUM_ROWS))
    collected = [merge.collect(round_.groups[replica], table, own, round_.form) for table, own in zip(tables, rows, strict=True)]
    told = [
        messages.pack(round_.groups[replica], tables, *arguments, made[0], round_.form),
        messages.pack_contributions(rows, collected, *arguments[1:], made[1]),
        reference_messages.pack(round_.expected[replica], tables, *arguments, made[2], round_.form),
    ]
    assert told == [-1] * 3
    assert torch.equal(made[0], made[2]), "fused"
    assert torch.equal(made[1], made[2]), "of contributions"
    return list(torch.split(made[0], layout.sizes))


@given(round_=rounds(), num_threads=st.sampled_from((1, 3)), is_late=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_round_of_messages(round_: Round, num_threads: int, is_late: bool) -> None:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    sent, counts = [], []
    for replica in range(NUM_REPLICAS):
        owned = messages.owner_counts(round_.rows(replica), FIRST_KEYS, NUM_REPLICAS)
        assert torch.equal(owned, reference_messages.owner_counts(round_.rows(replica), FIRST_KEYS, NUM_REPLICAS))
        counts.append(owned)
        sent.append(packed(round_, replica, Layout.joined(round_.up, owned)))
    merged, merged_counts = [], []
    for owner in range(NUM_REPLICAS):
        received = [parts[owner] for parts in sent]
        own_counts = torch.stack([owned[owner] for owned in counts])
        arguments = (
            received,
            own_counts,
            round_.up,
            round_.down,
            round_.salts(owner, True),
            round_.form,
            round_.policy,
            NUM_STEPS,
            NUM_REPLICAS,
        )
        message, num_rows = messages.reduce(*arguments)
        expected, expected_rows = reference_messages.reduce(*arguments)
        assert torch.equal(num_rows, expected_rows)
        assert torch.equal(message, expected)
        merged.append(message)
        merged_counts.append(num_rows)
    layout = Layout.apart(round_.down, torch.stack(merged_counts))
    assert layout.sizes == [message.numel() for message in merged]
    tables = list(range(len(NUM_ROWS)))
    for replica, (group, expected_group) in enumerate(zip(round_.groups, round_.expected, strict=True)):
        if is_late:
            for table in tables:
                group.detach_touched(table)
                expected_group.detach_touched(table)
            train(group, expected_group, 0.5, 1000 + replica, NUM_STEPS + 1)
        told = messages.apply(group, tables, merged, round_.down, layout, round_.form)
        expected_told = reference_messages.apply(expected_group, tables, merged, round_.down, layout, round_.form)
        assert told.num_rows_read == 0
        assert told.distance == pytest.approx(expected_told.distance, rel=1e-5)
        assert told.way == pytest.approx(expected_told.way, rel=1e-5)
        for table in tables:
            group.clear_touched(table)
            expected_group.clear_touched(table)
            for name, values in expected_group.fields[table].items():
                actual = group.read(table, torch.arange(NUM_ROWS[table]), name)
                torch.testing.assert_close(actual, values, rtol=0, atol=0, equal_nan=True, msg=f"{table}.{name}")
    torch.set_num_threads(threads_before)


@pytest.mark.parametrize("wire", WIRES)
def test_the_first_table_that_is_not_finite_is_told(wire: Wire) -> None:
    tables = [TableSpec(f"t{index}", 50, 4, index) for index in range(3)]
    group = RowGroup.in_dram(tables, AdamSpec(0.1, touches="count", bias_correction="row"))
    group.track(0, ("weight",))
    rows = torch.arange(30)
    bounds = torch.tensor([0, 30, 60, 90])
    group.set_step(0.1, 1)
    group.apply(RowGradients(rows.repeat(3), bounds, torch.ones(90, dtype=torch.int32), torch.ones(90 * 4)))
    formats = Formats([Format(torch.int32, None, 4, ("weight",), (wire,))] * 3)
    layout = Layout.joined(formats, messages.owner_counts([rows] * 3, (0, 50, 100), 2))

    def told() -> int:
        return messages.pack(group, range(3), [rows] * 3, formats, [1, 2, 3], (0, 50, 100), 1, layout, messages.empty(sum(layout.sizes)))

    assert told() == -1
    for table, value in ((2, float("nan")), (1, float("-inf"))):
        group.write(table, rows[29:], torch.full((1, 4), value))
        assert told() == table


def test_what_messages_cannot_hold_is_refused() -> None:
    table = TableSpec("t", 50, 4)
    group = RowGroup.in_dram([table], AdamSpec(0.1, touches="count", bias_correction="row"))
    group.track(0, ("weight",))
    rows = torch.arange(30)
    group.set_step(0.1, 1)
    group.apply(RowGradients(rows, torch.tensor([0, 30]), torch.ones(30, dtype=torch.int32), torch.ones(30 * 4)))
    formats = Formats([Format(torch.int32, torch.uint8, 4, ("weight",), ("bf16",))])
    counts = messages.owner_counts([rows], (0,), 2)
    layout = Layout.joined(formats, counts)
    buffer = torch.zeros(sum(layout.sizes), dtype=torch.uint8)
    with pytest.raises(DataError, match="rows were announced, it owns"):
        messages.pack(group, [0], [rows], formats, [1], (0,), 1, Layout.joined(formats, counts.flip(0)), buffer)
    with pytest.raises(DataError, match="expected it inside"):
        messages.pack(group, [0], [rows], formats, [1], (0,), 1, layout, buffer[:-8])
    with pytest.raises(DataError, match="not all rows to collect were touched"):
        messages.pack(
            group, [0], [rows + 20], formats, [1], (0,), 1, Layout.joined(formats, messages.owner_counts([rows + 20], (0,), 2)), buffer
        )
    other = Formats([Format(torch.int32, torch.uint8, 5, ("weight",), ("bf16",))])
    wide = Layout.joined(other, counts)
    with pytest.raises(DataError, match="1 tracked fields of dim 4, not 1 of dim 5"):
        messages.pack(group, [0], [rows], other, [1], (0,), 1, wide, torch.zeros(sum(wide.sizes), dtype=torch.uint8))
    messages.pack(group, [0], [rows], formats, [1], (0,), 1, layout, buffer)
    parts = torch.split(buffer, layout.sizes)
    down = Formats([Format(torch.int32, None, 4, ("weight",), ("bf16",))])
    with pytest.raises(DataError, match="a message of"):
        messages.reduce([parts[0][:-8]], counts[:1], formats, down, [1], "renew", "union", 1, 2)
    with pytest.raises(DataError, match="touched at least once"):
        messages.reduce([torch.zeros_like(parts[0])], counts[:1], formats, down, [1], "renew", "union", 1, 2)
    message, merged_counts = messages.reduce([parts[0]], counts[:1], formats, down, [1], "renew", "union", 1, 2)
    beyond = message.clone()
    beyond[0:4] = torch.tensor([60], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(DataError, match=r"outside table|ascending"):
        messages.apply(group, [0], [beyond], down, Layout.apart(down, merged_counts[None]))
