"""Layer 2, in process: the ops of a merge round give the bits of their plain PyTorch reference, and all replicas end alike.

What breaks otherwise: replicas that drift apart by a bit after each round, rows merged wrongly at some dim, touch pattern or
policy, and a second moment below zero, whose root is a NaN in the next step.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.ops.batches import DIMS
from torchrec_kstep.errors import DataError
from torchrec_kstep.ops import merge, reference, reference_merge
from torchrec_kstep.ops.batch import Contributions, Merged, MergeForm, MergePolicy, RowGradients, TableSpec, Wire
from torchrec_kstep.ops.reference import ReferenceGroup
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec, BiasCorrection

FORMS: tuple[MergeForm, ...] = ("renew", "delta")
POLICIES: tuple[MergePolicy, ...] = ("union", "touched", "mean")
WIRES: tuple[Wire, ...] = ("fp32", "bf16", "int8")
NUM_ROWS = 12
PATTERNS = ("none", "all", "own", "some")  # which rows a replica touches in a step


@dataclass
class Replica:
    """A compiled group beside its reference; both make the same steps."""

    group: RowGroup
    expected: ReferenceGroup
    step: int = 0

    def touch(self, rows: torch.Tensor, seed: int) -> None:
        self.step += 1
        grads = torch.randn(rows.numel() * self.group.tables[0].dim, generator=torch.Generator().manual_seed(seed))
        counts = torch.ones(rows.numel(), dtype=torch.int32)
        gradients = RowGradients(rows, torch.tensor([0, rows.numel()]), counts, grads)
        self.group.set_step(0.1, self.step)
        self.expected.lr, self.expected.step = 0.1, self.step
        self.group.apply(gradients)
        reference.apply_row_gradients(self.expected, gradients)

    def assert_same(self) -> None:
        assert torch.equal(self.group.touched_rows(0), self.expected.touched_rows(0))
        for name, values in self.expected.fields[0].items():
            torch.testing.assert_close(self.group.read(0, torch.arange(NUM_ROWS), name), values, rtol=0, atol=0, equal_nan=True, msg=name)


@st.composite
def replicas(draw: st.DrawFn, fields: tuple[str, ...] = ()) -> list[Replica]:
    table = TableSpec("t", NUM_ROWS, draw(st.sampled_from(DIMS)), 3, 5, "uniform", -0.5, 0.5)
    betas = draw(st.sampled_from(((0.9, 0.999), (0.0, 0.5))))
    is_row, frozen = draw(st.booleans()), draw(st.booleans())
    optimizer = AdamSpec(
        0.1,
        touches="count",
        betas=betas,
        bias_correction="row" if is_row else "global",
        step_per_moment=is_row and draw(st.booleans()),
        frozen=frozen,
        amsgrad=frozen and draw(st.booleans()),
        num_trackers=2,
    )
    fields = fields or draw(st.sampled_from((("weight",), ("weight", "m", "v"), ("v", "weight"), ("m",))))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        made.append(
            Replica(RowGroup.in_dram([table], optimizer, draw(st.sampled_from(("direct", "packed")))), ReferenceGroup([table], optimizer))
        )
        made[-1].group.track(0, fields)
        made[-1].expected.track(0, fields)
    return made


def make_steps(data: st.DataObject, all_replicas: list[Replica], num_steps: int) -> None:
    for index, replica in enumerate(all_replicas):
        pattern = data.draw(st.sampled_from(PATTERNS))
        for _ in range(num_steps):
            seed = data.draw(st.integers(0, 2**31))
            rows = torch.arange(NUM_ROWS)
            if pattern == "none":
                rows = rows[:0]
            elif pattern == "own":
                rows = rows[index :: len(all_replicas)].contiguous()
            elif pattern == "some":
                rows = rows[torch.rand(NUM_ROWS, generator=torch.Generator().manual_seed(seed)) < 0.4]
            replica.touch(rows, seed)


def collect_all(all_replicas: list[Replica], form: MergeForm, tracker: int = 0) -> list[Contributions]:
    contributions = []
    for replica in all_replicas:
        rows = replica.group.touched_rows(0, tracker)
        actual = merge.collect(replica.group, 0, rows, form, tracker)
        expected = reference_merge.collect(replica.expected, 0, rows, form, tracker)
        assert torch.equal(actual.counts, expected.counts)
        for name, values in expected.values.items():
            assert torch.equal(actual.values[name], values), name
            assert name != "v" or form == "delta" or not bool((values < 0).any())
        some = rows[::2].contiguous()
        assert torch.equal(merge.collect(replica.group, 0, some, form, tracker).counts, actual.counts[::2])
        contributions.append(actual)
    return contributions


def reduce_all(
    rows: list[torch.Tensor], sent: list[Contributions], form: MergeForm, policy: MergePolicy, num_steps: int, dtype: torch.dtype
) -> Merged:
    keys = [part.to(dtype) for part in rows]
    arguments = (keys, [part.counts for part in sent], [part.values for part in sent], form, policy, num_steps, len(sent))
    actual, expected = merge.reduce(*arguments), reference_merge.reduce(*arguments)
    assert actual.rows.dtype == dtype
    assert torch.equal(actual.rows, expected.rows)
    assert torch.equal(actual.u_real, expected.u_real)
    for name, values in expected.values.items():
        assert torch.equal(actual.values[name], values), name
    return actual


def apply_all(all_replicas: list[Replica], merged: Merged, form: MergeForm, num_pieces: int, tracker: int = 0) -> None:
    for replica in all_replicas:
        for piece in range(num_pieces):
            mine = slice(piece, None, num_pieces)
            values = {name: value[mine].contiguous() for name, value in merged.values.items()}
            part = Merged(merged.rows[mine].contiguous(), merged.u_real[mine].contiguous(), values)
            assert merge.apply(replica.group, 0, part, form, tracker) == 0
            reference_merge.apply(replica.expected, 0, part, form, tracker)
        replica.group.clear_touched(0, tracker)
        replica.expected.clear_touched(0, tracker)
        replica.assert_same()
        if "v" in replica.expected.fields[0]:
            assert not bool((replica.expected.fields[0]["v"] < 0).any())


def assert_all_alike(all_replicas: list[Replica]) -> None:
    first = all_replicas[0].group
    tracked = [name for tracker in range(2) for name in first.tracked_fields(0, tracker)]
    names = [*tracked, *reference_merge.step_fields(all_replicas[0].expected.optimizer, tracked), "touches"]
    if "v" in tracked and "v_hat" in all_replicas[0].expected.fields[0]:
        names.append("v_hat")
    for replica in all_replicas[1:]:
        for name in names:
            rows = torch.arange(NUM_ROWS)
            assert torch.equal(replica.group.read(0, rows, name), first.read(0, rows, name)), name


@given(
    data=st.data(),
    form=st.sampled_from(FORMS),
    policy=st.sampled_from(POLICIES),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    num_rounds=st.integers(1, 2),
    num_pieces=st.integers(1, 3),
    num_threads=st.sampled_from((1, 3)),
)
@settings(max_examples=80)
def test_rounds(
    data: st.DataObject, form: MergeForm, policy: MergePolicy, dtype: torch.dtype, num_rounds: int, num_pieces: int, num_threads: int
) -> None:
    all_replicas = data.draw(replicas())
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for _ in range(num_rounds):
        num_steps = data.draw(st.sampled_from((1, 3)))
        make_steps(data, all_replicas, num_steps)
        for replica in all_replicas:
            replica.assert_same()
        rows = [replica.group.touched_rows(0) for replica in all_replicas]
        merged = reduce_all(rows, collect_all(all_replicas, form), form, policy, num_steps, dtype)
        apply_all(all_replicas, merged, form, num_pieces)
        assert_all_alike(all_replicas)
        assert all(replica.group.base_bytes == 0 for replica in all_replicas)
    torch.set_num_threads(threads_before)


@given(data=st.data(), form=st.sampled_from(FORMS), policy=st.sampled_from(POLICIES), num_pieces=st.integers(1, 2))
@settings(max_examples=60)
def test_rounds_that_training_does_not_wait_for(data: st.DataObject, form: MergeForm, policy: MergePolicy, num_pieces: int) -> None:
    """The first round is applied after further steps; after the next, which is waited for, all replicas are alike again."""
    all_replicas = data.draw(replicas())
    make_steps(data, all_replicas, 2)
    rows = [replica.group.touched_rows(0) for replica in all_replicas]
    merged = reduce_all(rows, collect_all(all_replicas, form), form, policy, 2, torch.int64)
    for replica in all_replicas:
        replica.group.detach_touched(0)
        replica.expected.detach_touched(0)
        replica.assert_same()
    make_steps(data, all_replicas, data.draw(st.integers(0, 2)))
    apply_all(all_replicas, merged, form, num_pieces)
    make_steps(data, all_replicas, 1)
    rows = [replica.group.touched_rows(0) for replica in all_replicas]
    merged = reduce_all(rows, collect_all(all_replicas, form), form, policy, 3, torch.int64)
    apply_all(all_replicas, merged, form, 1)
    assert_all_alike(all_replicas)


@given(data=st.data(), form=st.sampled_from(FORMS), policy=st.sampled_from(POLICIES))
@settings(max_examples=40)
def test_moments_in_a_period_of_their_own(data: st.DataObject, form: MergeForm, policy: MergePolicy) -> None:
    """Weights in each of three rounds, moments in the second and third only: their tracker counts over both intervals."""
    all_replicas = data.draw(replicas(fields=("weight",)))
    for replica in all_replicas:
        replica.group.track(1, ("m", "v"))
        replica.expected.track(1, ("m", "v"))
    for due in ((0,), (0, 1), (0, 1)):
        make_steps(data, all_replicas, 2)
        for tracker in due:
            rows = [replica.group.touched_rows(0, tracker) for replica in all_replicas]
            merged = reduce_all(rows, collect_all(all_replicas, form, tracker), form, policy, 4, torch.int64)
            apply_all(all_replicas, merged, form, 1, tracker)
    assert_all_alike(all_replicas)


# ---- wire --------------------------------------------------------------------------------------------------------------


@st.composite
def wire_values(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.sampled_from((0, 1, 3, 600))), draw(st.sampled_from((1, 2, 5, 16, 33, 64, 255, 256, 257, 1000))))
    values = torch.randn(shape, generator=generator) * draw(st.sampled_from((0.0, 1e-38, 1e-3, 1.0, 3e38)))
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan")])
    if draw(st.booleans()) and values.numel():
        at = torch.randint(0, values.numel(), (5,), generator=generator)
        values.view(-1)[at] = special[torch.randint(0, len(special), (5,), generator=generator)]
    return values


@given(values=wire_values(), wire=st.sampled_from(WIRES), salt=st.integers(0, 2**64 - 1), dtype=st.sampled_from((torch.int32, torch.int64)))
def test_wire(values: torch.Tensor, wire: Wire, salt: int, dtype: torch.dtype) -> None:
    rows = (torch.arange(values.shape[0]) * 7).to(dtype)
    encoded = merge.encode(values, wire, rows, salt)
    assert encoded.shape == (values.shape[0], merge.row_bytes(wire, values.shape[1]))
    assert torch.equal(encoded, reference_merge.encode(values, wire, rows, salt))
    decoded = merge.decode(encoded, wire, values.shape[1])
    expected = reference_merge.decode(encoded, wire, values.shape[1])
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    is_bad = ~torch.isfinite(values).all(dim=1)
    assert torch.equal(~torch.isfinite(decoded).all(dim=1), is_bad), "finite rows stay finite, others do not look healthy"
    good = ~is_bad
    if wire == "fp32":
        assert torch.equal(decoded[good], values[good])
    elif wire == "bf16":
        torch.testing.assert_close(decoded[good], values[good], rtol=2**-7, atol=2**-133)
    else:
        unit = values.abs().amax(dim=1, keepdim=True) / 127 if values.numel() else values
        assert bool(((decoded - values).abs() <= unit * 1.001 + 2.0**-120)[good].all())
    if values.shape[0] == 600:  # a subset in another message has the same bytes
        assert torch.equal(merge.encode(values[100:400], wire, rows[100:400], salt), encoded[100:400])


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_rounding_is_unbiased_and_repeats(wire: Wire) -> None:
    """Over rows, over salts and over columns the mean of what arrives is what was sent; the noise of neighbours is independent."""
    values = torch.tensor([[0.1, -0.7, 0.30001, 1.0, -0.001, 0.0]]).expand(20_000, 6).contiguous()
    rows = torch.arange(20_000)
    unit = 1 / 127 if wire == "int8" else 2.0**-8
    for salts in ([5], range(1, 4)):
        decoded = torch.cat([merge.decode(merge.encode(values, wire, rows, salt), wire, 6) for salt in salts]).to(torch.float64)
        error = decoded - values[0].to(torch.float64)
        assert bool((error.mean(dim=0).abs() < 5 * unit / 2 / len(decoded) ** 0.5).all())
        assert bool(error[:, 0].std() > 0)
        assert not error[:, [3, 5]].any(), "1 and 0 are representable in both"
        centred = error[:, [0, 1, 2]] - error[:, [0, 1, 2]].mean(dim=0)
        correlation = torch.corrcoef(centred.T)
        assert bool((correlation - torch.eye(3)).abs().max() < 5 / len(decoded) ** 0.5)
        after = torch.corrcoef(torch.stack([centred[:-1, 0], centred[1:, 0]]))[0, 1]
        assert abs(float(after)) < 5 / len(decoded) ** 0.5, "rows next to each other"
    first = merge.encode(values, wire, rows, 5)
    assert torch.equal(first, merge.encode(values, wire, rows, 5))
    assert not torch.equal(first, merge.encode(values, wire, rows, 6))


def test_salts_differ_in_every_part_and_order() -> None:
    salts = {merge.noise_salt(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (2**63, 1), (-1, 0)]}
    assert len(salts) == 9
    assert all(0 <= salt < 2**64 for salt in salts)


def test_the_second_moment_never_travels_as_int8() -> None:
    assert [merge.field_wire(field, "int8") for field in ("weight", "m", "v")] == ["int8", "int8", "bf16"]
    assert [merge.field_wire("v", wire) for wire in ("fp32", "bf16")] == ["fp32", "bf16"]


# ---- by hand -----------------------------------------------------------------------------------------------------------


def one_row(num_steps: int, tracked: tuple[str, ...] = ("weight", "m", "v")) -> Replica:
    table, optimizer = TableSpec("t", NUM_ROWS, 3), AdamSpec(0.1, touches="count", bias_correction="row")
    replica = Replica(RowGroup.in_dram([table], optimizer), ReferenceGroup([table], optimizer))
    replica.group.track(0, tracked)
    replica.expected.track(0, tracked)
    for seed in range(num_steps):
        replica.touch(torch.tensor([4]), seed)
    return replica


def test_policies_by_hand() -> None:
    """Two replicas, 20 steps: row 1 touched 5 and 10 times, row 2 by one replica, row 3 in every step by both."""
    rows = [torch.tensor([1, 2, 3]), torch.tensor([1, 3])]
    counts = [torch.tensor([5, 4, 20], dtype=torch.int32), torch.tensor([10, 20], dtype=torch.int32)]
    values = [{"weight": torch.full((len(part), 1), 3.0), "m": torch.full((len(part), 1), float(i))} for i, part in enumerate(rows)]
    for policy, u_real, change in (
        ("union", [12.5, 4.0, 20.0], [12.5 / 15 * 6, 3.0, 3.0]),
        ("touched", [7.5, 4.0, 20.0], [3.0, 3.0, 3.0]),
        ("mean", [7.5, 2.0, 20.0], [3.0, 1.5, 3.0]),
    ):
        merged = merge.reduce(rows, counts, values, "renew", policy, 20, 2)  # type: ignore[arg-type]  # names from a table
        assert merged.rows.tolist() == [1, 2, 3]
        torch.testing.assert_close(merged.u_real, torch.tensor(u_real))
        torch.testing.assert_close(merged.values["weight"][:, 0], torch.tensor(change))
        torch.testing.assert_close(merged.values["m"][:, 0], torch.tensor([10 / 15, 0.0, 0.5]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("form", FORMS)
def test_one_replica_keeps_what_it_had(form: MergeForm, policy: MergePolicy) -> None:
    replica = one_row(3)
    before = {name: replica.group.read(0, torch.tensor([4]), name) for name in ("weight", "m", "v", "step")}
    rows = replica.group.touched_rows(0)
    sent = merge.collect(replica.group, 0, rows, form)
    merge.apply(replica.group, 0, merge.reduce([rows], [sent.counts], [sent.values], form, policy, 7, 1), form)
    replica.group.clear_touched(0)
    for name, values in before.items():
        torch.testing.assert_close(replica.group.read(0, torch.tensor([4]), name), values, rtol=3e-5 if name == "v" else 1e-6, atol=1e-7)


def test_a_row_that_no_replica_kept_a_base_of_starts_from_its_initial_values() -> None:
    receiver = one_row(0)
    start = receiver.group.read(0, torch.tensor([7]))
    merged = Merged(torch.tensor([7]), torch.tensor([2.0]), {name: torch.ones(1, 3) for name in ("weight", "m", "v")})
    merge.apply(receiver.group, 0, merged)
    assert torch.equal(receiver.group.read(0, torch.tensor([7])), start + 1)
    torch.testing.assert_close(receiver.group.read(0, torch.tensor([7]), "m"), torch.full((1, 3), 1 - 0.9**2))
    assert receiver.group.read(0, torch.tensor([7]), "step").item() == 2


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("bias", ["global", "row"])
def test_frozen_adam_by_hand(bias: BiasCorrection, amsgrad: bool) -> None:
    """Two steps of gradient 1, a merge, a step of gradient 0.1: the denominator is that of the merge, not of the small gradient."""
    optimizer = AdamSpec(1.0, touches="count", bias_correction=bias, frozen=True, amsgrad=amsgrad)
    group = RowGroup.in_dram([TableSpec("t", 9, 1)], optimizer)
    group.track(0, ("weight", "m", "v"))
    row = torch.tensor([4])

    def update(step: int, grad: float) -> None:
        group.set_step(1.0, step)
        group.apply(RowGradients(row, torch.tensor([0, 1]), torch.ones(1, dtype=torch.int32), torch.tensor([grad])))

    def merged(step: int) -> float:
        sent = merge.collect(group, 0, row)
        merge.apply(group, 0, merge.reduce([row], [sent.counts], [sent.values], "renew", "union", 2, 1), step=step)
        group.clear_touched(0)
        return float(group.read(0, row, "v_hat"))

    update(1, 1.0)
    update(2, 1.0)
    assert group.read(0, row, "v_hat").item() == 0
    assert merged(2) == pytest.approx(1.0, rel=1e-4)
    before = float(group.read(0, row))
    update(3, 0.1)
    m_hat = (0.9 * (1 - 0.9**2) + 0.01) / (1 - 0.9**3)
    assert before - float(group.read(0, row)) == pytest.approx(m_hat, rel=1e-4), "divided by sqrt(max(1, 0.67))"
    expected = 1.0 if amsgrad else (0.999 * (1 - 0.999**2) + 0.001 * 0.01) / (1 - 0.999**3)
    assert merged(3) == pytest.approx(expected, rel=1e-3)


def test_without_tracking_an_update_counts_no_touch() -> None:
    replica, tracked = one_row(0), one_row(2)
    replica.group.set_tracking(False)
    for seed in range(2):
        replica.touch(torch.tensor([4]), seed)
    assert replica.group.touched_rows(0).tolist() == []
    assert not replica.group.read(0, torch.tensor([4]), "touches").any()
    assert torch.equal(replica.group.read(0, torch.tensor([4])), tracked.group.read(0, torch.tensor([4])))
    replica.group.set_tracking(True)
    replica.touch(torch.tensor([5]), 3)
    assert replica.group.touched_rows(0).tolist() == [5]
    with pytest.raises(DataError, match="end the merge round"):
        replica.group.set_tracking(False)


def test_what_a_merge_cannot_do_is_refused() -> None:
    replica = one_row(2)
    group, rows = replica.group, torch.tensor([4])
    with pytest.raises(DataError, match="touched already"):
        group.track(0, ["weight"])
    with pytest.raises(DataError, match="not all rows to collect were touched"):
        merge.collect(group, 0, torch.tensor([4, 5]))
    with pytest.raises(DataError, match="tracker 1, its record has 1 counters"):
        group.touched_rows(0, 1)
    with pytest.raises(DataError, match="cannot keep bases of"):
        one_row(0).group.track(0, ["weight", "step"])
    untracked = RowGroup.in_dram([TableSpec("t", 9, 2)], AdamSpec(0.1, touches="count"))
    with pytest.raises(DataError, match="keeps no bases"):
        merge.collect(untracked, 0, rows)
    sent = merge.collect(group, 0, rows)
    with pytest.raises(DataError, match="ascending"):
        merge.reduce([torch.tensor([4, 4])], [sent.counts.repeat(2)], [{"weight": torch.ones(2, 3)}], "delta", "union", 2, 1)
    with pytest.raises(DataError, match="touched at least once"):
        merge.reduce([rows], [sent.counts * 0], [sent.values], "delta", "union", 2, 1)
    merged = merge.reduce([rows], [sent.counts], [sent.values], "renew", "union", 2, 1)
    with pytest.raises(DataError, match="outside table"):
        merge.apply(group, 0, merged._replace(rows=torch.tensor([NUM_ROWS])))
    merge.apply(group, 0, merged)
    with pytest.raises(Exception, match="finish it with clear_touched"):
        replica.touch(rows, 9)
    group.clear_touched(0)
    replica.touch(rows, 9)
    group.detach_touched(0)
    with pytest.raises(Exception, match="detached before is still under way"):
        group.detach_touched(0)
