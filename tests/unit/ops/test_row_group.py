"""Layer 1: what a user of the ops relies on, case by case, against PyTorch's own modules or by hand.

The bits for arbitrary inputs are compared in tests/property/ops.
"""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from torchrec_kstep.errors import DataError
from torchrec_kstep.ops import kernels, reference
from torchrec_kstep.ops.batch import RowGradients, TableSpec, shard_name
from torchrec_kstep.ops.row_group import DramLayout, RowGroup
from torchrec_kstep.optim_spec import AdamSpec, CowClip, RowwiseAdagradSpec, SgdSpec


def bags(*lists: list[int], dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0] + [len(bag) for bag in lists])
    return torch.tensor([row for bag in lists for row in bag], dtype=dtype), lengths.cumsum(0)


def numbered(num_rows: int, dim: int = 2, optimizer: SgdSpec | AdamSpec | None = None, layout: DramLayout = "auto") -> RowGroup:
    """One table whose row r is filled with r + 1."""
    group = RowGroup.in_dram([TableSpec("t", num_rows, dim)], optimizer or SgdSpec(lr=1.0), layout)
    group.set_step(1.0, 1)
    rows = torch.arange(min(num_rows, 100))
    group.write(0, rows, (rows[:, None] + 1).to(torch.float32).expand(-1, dim))
    return group


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_forward_and_gradients_are_those_of_embedding_bag(pooling: str) -> None:
    """Empty bags first, in the middle and last; duplicates inside and across bags; gradient of the weights."""
    ids, offsets = bags([], [1, 2, 2], [], [3], [9, 1], [])
    group = numbered(10, dim=5)
    module = torch.nn.EmbeddingBag.from_pretrained(group.read(0, torch.arange(10)), freeze=False, mode=pooling)
    grad = torch.randn(6, 5)
    expected = module(ids, offsets[:-1])
    expected.backward(grad)
    out = group.pooled(ids, offsets, [0], pooling=pooling)  # type: ignore[arg-type]  # a parameter of the test
    torch.testing.assert_close(out, expected)
    out.backward(grad)
    assert module.weight.grad is not None
    torch.testing.assert_close(group.read(0, torch.arange(10)), (module.weight - module.weight.grad).detach())


def test_gradient_of_the_weights_is_that_of_embedding_bag() -> None:
    ids, offsets = bags([], [1, 2, 2], [3], [9, 1], [])
    group = numbered(10, dim=19)
    table = torch.randn(10, 19)
    group.write(0, torch.arange(10), table)
    module = torch.nn.EmbeddingBag.from_pretrained(table, mode="sum", freeze=True)
    ours, theirs = (torch.linspace(-1, 1, 6).requires_grad_() for _ in range(2))
    grad = torch.randn(5, 19)
    module(ids, offsets[:-1], per_sample_weights=theirs).backward(grad)
    group.pooled(ids, offsets, [0], weights=ours).backward(grad)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_mean_of_empty_bags_is_zero_and_touches_no_row() -> None:
    ids, offsets = bags([], [1, 2], [], [3], [])
    group = numbered(5, optimizer=AdamSpec(lr=1.0))
    out = group.pooled(ids, offsets, [0], pooling="mean")
    assert out[:, 0].tolist() == [0.0, 2.5, 0.0, 4.0, 0.0]
    out.backward(torch.full_like(out, float("nan")).index_fill(0, torch.tensor([1, 3]), 1.0))
    rows = group.read(0, torch.arange(5))
    assert not rows.isnan().any()
    assert torch.equal(rows[[0, 4]], torch.tensor([[1.0, 1.0], [5.0, 5.0]]))


@pytest.mark.parametrize("layout", ["direct", "packed"])
@pytest.mark.parametrize("mode", ["error", "clamp", "ignore"])
@pytest.mark.parametrize("bad", [10, 11, -1, 2**31, 2**40, -(2**63), 2**63 - 1])
def test_an_id_out_of_range_does_what_the_mode_says(layout: DramLayout, mode: str, bad: int) -> None:
    """Only 9 is valid in a table of 10; the neighbours of the bad id and the next table stay as they are."""
    ids, offsets = bags([9, bad], [bad], [0])
    group = RowGroup.in_dram([TableSpec("t", 10, 1), TableSpec("next", 10, 1, 1)], SgdSpec(lr=1.0), layout)
    for table in range(2):
        group.write(table, torch.arange(10), torch.arange(1.0, 11.0)[:, None])
    group.set_step(1.0, 1)
    if mode == "error":
        with pytest.raises(DataError, match=rf"id {bad} at position 1 of feature 0 is outside \[0, 10\) of table 0; 2 ids"):
            group.pooled(ids, offsets, [0], out_of_range="error")
        return
    batch = group.dedup(ids, offsets, [0], mode)  # type: ignore[arg-type]  # a parameter of the test
    assert batch.num_bad.tolist() == [2, 0]
    out = group.pooled_of(batch, offsets, [0], pooling="mean")
    nearest = 0 if bad < 0 else 9
    expected = [(10 + nearest + 1) / 2, nearest + 1, 1] if mode == "clamp" else [10, 0, 1]
    assert out[:, 0].tolist() == expected
    out.sum().backward()
    moved = torch.zeros(10)
    moved.index_add_(0, torch.tensor([9, 0]), torch.tensor([0.5 if mode == "clamp" else 1.0, 1.0]))
    if mode == "clamp":
        moved[nearest] += 1.5
    assert torch.equal(group.read(0, torch.arange(10))[:, 0], torch.arange(1.0, 11.0) - moved)
    assert torch.equal(group.read(1, torch.arange(10))[:, 0], torch.arange(1.0, 11.0))


def test_int32_ids_give_the_rows_of_int64_ids() -> None:
    group = numbered(50)
    lists = ([1, 49], [0], [], [49, 49])
    outs = [group.pooled(*bags(*lists, dtype=dtype), [0]) for dtype in (torch.int32, torch.int64)]
    assert torch.equal(*outs)
    with pytest.raises(TypeError, match="expected int64 or int32"):
        group.pooled(bags(*lists)[0].to(torch.float32), bags(*lists)[1], [0])


@pytest.mark.parametrize("num_rows", [3_000_000_000, 2**47])
def test_ids_beyond_32_bits_are_not_cut(num_rows: int) -> None:
    group = numbered(num_rows)
    far = [2**31 - 1, 2**31, 2**31 + 5, num_rows - 1]
    group.write(0, torch.tensor(far), torch.arange(100.0, 104.0)[:, None].expand(-1, 2))
    out = group.pooled(*bags(far, [far[1]], [5]), [0])
    assert out[:, 0].tolist() == [100 + 101 + 102 + 103, 101, 6]
    out.sum().backward()
    assert group.read(0, torch.tensor(far))[:, 0].tolist() == [99, 99, 101, 102]
    same_low_bits = torch.tensor([row for row in (5 + 2**32, 2**31 + 2**32) if row < num_rows], dtype=torch.int64)
    assert not group.read(0, same_low_bits).any()


def test_a_feature_pair_that_shares_a_table_keeps_its_ids_apart() -> None:
    """33 ids against 1280 in one table: pooled outputs per feature, and one summed update."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat([torch.full((3,), 11), torch.tensor([400, 480, 400])])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 60, (int(offsets[-1]),), generator=generator)
    group = numbered(60, dim=3)
    out = group.pooled(ids, offsets, [0, 0])
    expected = torch.stack([(ids[offsets[bag] : offsets[bag + 1]] + 1).sum() for bag in range(6)]).view(2, 3).T.to(torch.float32)
    assert torch.equal(out[:, [0, 3]], expected)
    out.sum().backward()
    assert torch.equal(group.read(0, torch.arange(60))[:, 0], torch.arange(1.0, 61.0) - torch.bincount(ids, minlength=60))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_row_of_a_batch_does_not_depend_on_the_batch(rows: int) -> None:
    lists = [[[1], [2], [3]], [[4, 5], [], [6]]]
    group = numbered(10)
    whole = group.pooled(*bags(*lists[0], *lists[1]), [0, 0])
    part = group.pooled(*bags(*lists[0][:rows], *lists[1][:rows]), [0, 0])
    assert part.shape == (rows, 4)
    assert torch.equal(part, whole[:rows])


def test_a_batch_of_no_rows_and_no_ids() -> None:
    group = numbered(10)
    out = group.pooled(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), [0, 0])
    assert out.shape == (0, 4)
    out.sum().backward()
    empty = group.sequence(*bags([], []), [0])
    assert empty.shape == (0,)
    empty.sum().backward()


def test_one_table_of_each_kind_of_dim_in_one_group() -> None:
    dims = [1, 3, 4, 16, 1000, 1280, 2048]
    tables = [TableSpec(f"t{dim}", 20, dim, dim, init="uniform", init_a=-1, init_b=1) for dim in dims]
    group = RowGroup.in_dram(tables, SgdSpec(lr=1.0))
    ids, offsets = bags(*[[index, 19] for index in range(len(dims))])
    out = group.pooled(ids, offsets, range(len(dims)))
    expected = torch.cat([group.read(index, torch.tensor([index, 19])).sum(0) for index in range(len(dims))])
    assert torch.equal(out[0], expected)
    for dim in (0, 2049):
        with pytest.raises(DataError, match=f"dim {dim}, expected 1 to 2048"):
            RowGroup.in_dram([TableSpec("t", 20, dim)], SgdSpec(lr=1.0))


@pytest.mark.parametrize("strides", ["expanded", "transposed", "sliced"])
def test_gradients_of_any_strides(strides: str) -> None:
    make: dict[str, Callable[[], torch.Tensor]] = {
        "expanded": lambda: torch.ones(1, 2).expand(3, 2),
        "transposed": lambda: torch.ones(2, 3).T,
        "sliced": lambda: torch.ones(3, 9)[:, 2:4],
    }
    group = numbered(5)
    group.pooled(*bags([1], [2], [2]), [0]).backward(make[strides]())
    assert group.read(0, torch.arange(5))[:, 0].tolist() == [1, 1, 1, 4, 5]


# ---- update rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_correction", ["global", "row"])
def test_adam_on_a_rarely_seen_row_follows_the_documented_rule(bias_correction: str) -> None:
    """One row seen at steps 1, 2 and 50: lazy moments, and t = step (global) or number of updates (row), from 1."""
    spec = AdamSpec(lr=0.1, betas=(0.9, 0.99), eps=1e-6, bias_correction=bias_correction)  # type: ignore[arg-type]  # a parameter
    group = RowGroup.in_dram([TableSpec("t", 4, 3)], spec)
    grads = torch.tensor([[1.0, -2.0, 0.5], [0.1, 0.0, 3.0], [-1.0, 1.0, 1.0]])
    w = m = v = torch.zeros(3, dtype=torch.float64)
    for count, (step, grad) in enumerate(zip((1, 2, 50), grads, strict=True), 1):
        group.set_step(spec.lr, step)
        group.pooled(*bags([2]), [0]).backward(grad[None])
        t = step if bias_correction == "global" else count
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad.double() ** 2
        w = w - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
        torch.testing.assert_close(group.read(0, torch.tensor([2]))[0].double(), w, rtol=1e-6, atol=1e-7)
    assert torch.equal(group.read(0, torch.tensor([0, 1, 3])), torch.zeros(3, 3))


def test_adam_that_sees_every_row_each_step_is_dense_adam() -> None:
    table = torch.randn(6, 5)
    group = RowGroup.in_dram([TableSpec("t", 6, 5)], AdamSpec(lr=0.01))
    group.write(0, torch.arange(6), table)
    dense = torch.nn.Parameter(table.clone())
    optimizer = torch.optim.Adam([dense], lr=0.01)
    for step in range(1, 20):
        grad = torch.randn(6, 5)
        dense.grad = grad.clone()
        optimizer.step()
        group.set_step(0.01, step)
        group.pooled(*bags(*[[row] for row in range(6)]), [0]).backward(grad)
    torch.testing.assert_close(group.read(0, torch.arange(6)), dense.detach(), rtol=1e-5, atol=1e-6)


def test_rowwise_adagrad_by_hand() -> None:
    group = RowGroup.in_dram([TableSpec("t", 3, 2)], RowwiseAdagradSpec(lr=0.5, eps=1e-3))
    group.set_step(0.5, 1)
    group.pooled(*bags([1]), [0]).backward(torch.tensor([[3.0, 4.0]]))
    assert group.read(0, torch.tensor([1]), "sum").item() == 12.5
    expected = -0.5 / (12.5**0.5 + 1e-3) * torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(group.read(0, torch.tensor([1])), expected)


@pytest.mark.parametrize("zeta", [0.0, 0.01])
@pytest.mark.parametrize("occurrences", [1, 1000])
@pytest.mark.parametrize("size", [0.0, 0.5])
def test_cowclip_scales_with_the_count_and_lets_a_zero_row_move_by_zeta(zeta: float, occurrences: int, size: float) -> None:
    group = RowGroup.in_dram([TableSpec("t", 3, 4)], SgdSpec(lr=1.0, clip=CowClip(ratio=1.0, zeta=zeta)))
    group.set_step(1.0, 1)
    before = torch.full((1, 4), size)
    group.write(0, torch.tensor([1]), before)
    out = group.pooled(*bags(*[[1]] * occurrences), [0])
    out.backward(torch.full_like(out, 100.0))
    limit = occurrences * max(2 * size, 2 * zeta)  # sqrt(dim) is 2
    moved = before - group.read(0, torch.tensor([1]))
    assert moved.norm().item() == pytest.approx(min(limit, 200.0 * occurrences), rel=1e-5)
    assert torch.equal(group.read(0, torch.tensor([0, 2])), torch.zeros(2, 4))


def test_cowclip_counts_over_micro_batches_when_deferred() -> None:
    """Three micro-batches clipped as one batch, not each on its own."""
    clip = CowClip(ratio=1.0, zeta=0.01)
    whole, parts = (RowGroup.in_dram([TableSpec("t", 3, 4)], SgdSpec(lr=1.0, clip=clip)) for _ in range(2))
    for group in (whole, parts):
        group.set_step(1.0, 1)
        group.set_deferred(True)
    whole.pooled(*bags([1], [1], [1]), [0]).backward(torch.ones(3, 4))
    for _ in range(3):
        parts.pooled(*bags([1]), [0]).backward(torch.ones(1, 4))
    for group in (whole, parts):
        group.apply(group.take_pending())
    rows = torch.arange(3)
    assert torch.equal(whole.read(0, rows), parts.read(0, rows))
    assert whole.read(0, rows)[1].norm().item() == pytest.approx(3 * 0.02)


def test_exempt_tables_are_not_clipped_and_clipped_rows_are_counted() -> None:
    """First-order tables move by their whole gradient beside clipped ones in the same group (C56: a silent clip of everything)."""
    tables = [TableSpec("wide_a", 3, 4, table_id=0), TableSpec("a", 3, 4, table_id=1), TableSpec("b", 3, 4, table_id=2)]
    group = RowGroup.in_dram(tables, SgdSpec(lr=1.0, clip=CowClip(zeta=0.01, exempt=("wide_*", "b"))))
    group.set_step(1.0, 1)
    out = group.pooled(*bags([1], [1], [1], [2], [2], [2]), [0, 1, 2])
    out.backward(torch.ones(2, 12))
    moved = [-group.read(table, torch.tensor([1, 2])).norm(dim=1) for table in range(3)]
    counters = group.counters()
    assert torch.equal(moved[0], torch.tensor([-4.0, 0.0]))
    assert moved[1].tolist() == pytest.approx([-0.02, -0.02])
    assert torch.equal(moved[2], torch.tensor([0.0, -4.0]))
    assert (counters["a"]["updated_rows"], counters["a"]["clipped_rows"]) == (2, 2)
    assert "clipped_rows" not in counters["wide_a"]
    assert "clipped_rows" not in counters["b"]


def test_a_clip_over_column_shards_equals_the_clip_of_whole_rows() -> None:
    """Norms of the parts add up to those of the row; the factors made of them replace the clip of each part."""
    clip, lr, dim = CowClip(zeta=1e-2), 0.5, 24
    whole_table = TableSpec("t", 9, dim, 3, 5, "uniform", -0.02, 0.02)
    parts = [whole_table._replace(dim=16), whole_table._replace(dim=8, first_column=16)]
    rows, sizes = torch.tensor([1, 4, 7]), torch.tensor([[1e-3], [1.0], [9.0]])
    grads = torch.randn(3, dim, generator=torch.Generator().manual_seed(1)) * sizes
    counts, bounds = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 3])
    whole = RowGroup.in_dram([whole_table], SgdSpec(lr, l2=0.1, clip=clip))
    whole.set_step(lr, 1)
    whole.apply(RowGradients(rows, bounds, counts, grads.flatten()))

    groups = [RowGroup.in_dram([part], SgdSpec(lr, l2=0.1, clip=clip)) for part in parts]
    gradients = [RowGradients(rows, bounds, counts, piece.flatten()) for piece in grads.split([16, 8], dim=1)]
    norms = [group.row_norms(part) for group, part in zip(groups, gradients, strict=True)]
    grad_norm, weight_norm = ((norms[0][i] + norms[1][i]).sqrt() for i in range(2))
    limit = clip.ratio * counts * weight_norm.clamp(min=clip.ratio * dim**0.5 * clip.zeta)
    scales = (limit / grad_norm).clamp(max=1.0)
    assert scales[0] == 1
    assert bool((scales[1:] < 1).all())
    for group, part in zip(groups, gradients, strict=True):
        group.set_step(lr, 1)
        group.apply(part, scales)
    found = torch.cat([group.read(0, torch.arange(9)) for group in groups], dim=1)
    torch.testing.assert_close(found, whole.read(0, torch.arange(9)), rtol=1e-6, atol=1e-8)


def test_touched_rows_remember_their_base_until_cleared() -> None:
    group = RowGroup.in_dram([TableSpec("t", 9, 2), TableSpec("u", 9, 2, 1)], SgdSpec(lr=1.0, touches="base"))
    group.set_step(1.0, 1)
    for ids in ([5, 2], [5], [7]):
        out = group.pooled(*bags(*[[row] for row in ids]), [0])
        out.sum().backward()
    assert group.touched_rows(0).tolist() == [2, 5, 7]
    assert group.touched_rows(1).tolist() == []
    rows = torch.arange(9)
    assert group.read(0, rows, "touches")[:, 0].tolist() == [0, 0, 1, 0, 0, 2, 0, 1, 0]
    assert torch.equal(group.read(0, rows, "base"), torch.zeros(9, 2))
    group.clear_touched(0)
    assert group.touched_rows(0).tolist() == []
    group.pooled(*bags([5]), [0]).sum().backward()
    assert group.touched_rows(0).tolist() == [5]
    assert group.read(0, torch.tensor([5]), "base").tolist() == [[-2.0, -2.0]]
    assert group.read(0, torch.tensor([5])).tolist() == [[-3.0, -3.0]]


# ---- life of a group ---------------------------------------------------------------------------------------------------


def test_evaluation_needs_no_optimizer_and_materialises_nothing() -> None:
    table = TableSpec("t", 1000, 8, 3, 5, "normal", 0.0, 0.1)
    group = RowGroup.in_dram([table])
    ids, offsets = bags([999], [1, 2])
    with torch.no_grad():
        first, second = group.pooled(ids, offsets, [0]), group.pooled(ids, offsets, [0])
    assert torch.equal(first, second)
    assert torch.equal(first[:1], reference.initial_values(torch.tensor([999]), 5, 3, 0, 8, "normal", 0.0, 0.1))
    assert group.counters() == {"t": {"materialised_rows": 0.0, "materialised_bytes": 0.0}}
    group.set_step(1.0, 1)
    with pytest.raises(DataError, match="only be read"):
        group.pooled(ids, offsets, [0]).sum().backward()


def test_a_column_shard_starts_with_its_columns_of_the_whole_table() -> None:
    spec = TableSpec("t", 50, 40, 2, 9, "uniform", -1, 1)
    whole = RowGroup.in_dram([spec]).read(0, torch.arange(50))
    shard = RowGroup.in_dram([spec._replace(dim=17, first_column=13)]).read(0, torch.arange(50))
    assert torch.equal(shard, whole[:, 13:30])


def test_an_update_without_a_step_is_refused_and_changes_nothing() -> None:
    group = RowGroup.in_dram([TableSpec("t", 5, 2)], AdamSpec(lr=1.0))
    with pytest.raises(RuntimeError, match="set_step"):
        group.pooled(*bags([1]), [0]).sum().backward()
    assert group.counters()["t"]["materialised_rows"] == 0
    with pytest.raises(DataError, match="count from 1"):
        group.set_step(1.0, 0)


def test_pending_gradients_are_not_lost_silently() -> None:
    group = numbered(5)
    group.set_deferred(True)
    group.pooled(*bags([1]), [0]).sum().backward()
    with pytest.raises(RuntimeError, match="1 pending gradients would be lost"):
        group.set_deferred(False)
    group.take_pending()
    group.set_deferred(False)


def test_nothing_pending_is_an_update_of_no_row() -> None:
    group = numbered(5)
    group.set_deferred(True)
    gradients = group.take_pending()
    assert [gradients.unique_rows.numel(), gradients.counts.numel(), gradients.grads.numel()] == [0, 0, 0]
    before = group.read(0, torch.arange(5))
    group.apply(gradients)
    assert torch.equal(group.read(0, torch.arange(5)), before)


def test_a_backward_after_the_group_is_gone_says_so() -> None:
    group = numbered(5)
    out = group.pooled(*bags([1]), [0])
    del group
    with pytest.raises(DataError, match="is gone"):
        out.sum().backward()


def test_wrong_batches_are_refused_at_the_door() -> None:
    group = numbered(5)
    ids, offsets = bags([1], [2])
    batch = group.dedup(ids, offsets, [0])
    anchor = torch.empty(0)
    with pytest.raises(DataError, match="different batches"):
        kernels.pooled_lookup(group.handle, anchor, None, torch.tensor([0, 1, 1]), batch, [0], [2], "sum")
    with pytest.raises(DataError, match=r"table_dims\[0\] is 3"):
        kernels.pooled_lookup(group.handle, anchor, None, offsets, batch, [0], [3], "sum")
    with pytest.raises(DataError, match="weights has 1 elements, expected 2"):
        kernels.pooled_lookup(group.handle, anchor, torch.ones(1), offsets, batch, [0], [2], "sum")
    with pytest.raises(DataError, match="outside table 't'"):
        kernels.pooled_lookup(group.handle, anchor, None, offsets, batch._replace(unique_rows=torch.tensor([1, 5])), [0], [2], "sum")
    with pytest.raises(DataError, match="strictly ascending"):
        kernels.read_rows(group.handle, 0, torch.tensor([2, 2]), "weight", 2, torch.float32)
    with pytest.raises(DataError, match="no field 'm'"):
        kernels.read_rows(group.handle, 0, torch.tensor([2]), "m", 2, torch.float32)
    with pytest.raises(DataError, match="offsets decrease"):
        group.dedup(ids, torch.tensor([0, 2, 1, 2]), [0])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    tables = [TableSpec(f"t{index}", 3000, 24, index, init="uniform", init_a=-1, init_b=1) for index in range(3)]
    generator = torch.Generator().manual_seed(1)
    batch_size, features = 600, [0, 1, 2, 1]
    lengths = torch.randint(0, 6, (batch_size * 4,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = (torch.rand(int(offsets[-1]), generator=generator) ** 4 * 3000).to(torch.int64)  # skewed: many duplicates
    grad = torch.randn(batch_size, 96, generator=generator)
    results = []
    threads_before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            group = RowGroup.in_dram(tables, AdamSpec(lr=0.1, clip=CowClip(), bias_correction="row"))
            group.set_step(0.1, 1)
            out = group.pooled(ids, offsets, features, pooling="mean")
            out.backward(grad)
            results.append(torch.cat([out.flatten(), *(group.read(table, torch.arange(3000)).flatten() for table in range(3))]))
    finally:
        torch.set_num_threads(threads_before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_interpreter_runs_while_a_kernel_does() -> None:
    """A thread that counts makes progress during one long op, which it could not if the op held the interpreter lock."""
    group = RowGroup.in_dram([TableSpec("t", 200_000, 128, init="normal", init_b=1.0)])
    rows = torch.arange(200_000)
    ticks: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    other.start()
    begin = time.perf_counter()
    kernels.read_rows(group.handle, 0, rows, "weight", 128, torch.float32)
    end = time.perf_counter()
    is_done.set()
    other.join(timeout=10)
    assert sum(begin < moment < end for moment in ticks) >= 2, f"{end - begin} s without a tick"


def test_large_outputs_are_recycled_only_after_their_tensor_died() -> None:
    group = numbered(100, dim=64)
    ids, offsets = bags(*[[row % 100] for row in range(8192)])
    kept = group.pooled(ids, offsets, [0]).detach()
    for _ in range(8):
        group.pooled(ids.flip(0), offsets, [0])
    assert torch.equal(kept[:, 0], (ids + 1).to(torch.float32))


@pytest.mark.parametrize(("first_column", "dim"), [(0, 4), (4, 4), (8, 1)])
def test_a_shard_by_columns_goes_by_the_name_of_its_table(first_column: int, dim: int) -> None:
    """Otherwise a table that is exempt from the clip by its exact name would be clipped once its columns are cut."""
    shard = TableSpec(shard_name("user", first_column, dim), num_rows=3, dim=dim, first_column=first_column)
    assert (shard.name, shard.whole_table) == (f"user[{first_column}:{first_column + dim}]", "user")
    assert TableSpec("user[1:2]", num_rows=3, dim=dim, first_column=first_column).whole_table == "user[1:2]"  # a name, no columns of it


def test_exempt_tables_stay_exempt_when_their_columns_are_cut() -> None:
    tables = [TableSpec(shard_name(name, 4, 4), num_rows=2, dim=4, first_column=4) for name in ("clipped", "exempt")]
    group = RowGroup.in_dram(tables, SgdSpec(lr=1.0, clip=CowClip(ratio=1e-3, zeta=1e-3, exempt=("exempt",))))
    group.set_step(1.0, 1)
    ids, offsets = bags([0], [0])
    group.pooled(ids, offsets, [0, 1]).sum().backward()
    clipped, exempt = (group.read(index, torch.tensor([0])) for index in (0, 1))
    assert exempt.tolist() == [[-1.0] * 4]
    assert 0 > clipped.min() > -0.1
