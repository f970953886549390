"""CowClip against its definition in numpy, and against the rule of the same name elsewhere. Layer: unit, property."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.errors import DataError
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim.cowclip import cow_clip
from torchrec_kstep.optim_spec import CowClip, SgdSpec


def by_definition(weight: np.ndarray, grad: np.ndarray, counts: np.ndarray, r: float, zeta: float) -> np.ndarray:
    """Row by row, in float64, as the paper's algorithm 1 reads."""
    result = grad.astype(np.float64)
    for row in range(len(grad)):
        bound = max(np.linalg.norm(weight[row].astype(np.float64)), r * np.sqrt(weight.shape[1]) * zeta)
        limit = r * max(counts[row], 1) * bound
        norm = np.linalg.norm(result[row])
        result[row] *= limit / max(norm, limit) if limit > 0 or norm > 0 else 1.0
    return result


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, dim = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 3, 16, 65]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [10.0 ** draw(st.integers(-4, 1)) for _ in range(2)]
    weight, grad = (size * random.standard_normal((rows, dim)) for size in sizes)
    weight[random.random(rows) < 0.2] = 0.0
    grad[random.random(rows) < 0.2] = 0.0
    return weight.astype(np.float32), grad.astype(np.float32), random.integers(0, 5, rows)


@given(tables(), st.sampled_from([1.0, 0.5, 1e-2]), st.sampled_from([0.0, 1e-5, 1e-2]))
def test_it_equals_its_definition(table: tuple[np.ndarray, np.ndarray, np.ndarray], r: float, zeta: float) -> None:
    weight, grad, counts = table
    ours = cow_clip(*(torch.from_numpy(part) for part in table), CowClip(r, zeta)).numpy()
    np.testing.assert_allclose(ours, by_definition(weight, grad, counts, r, zeta), rtol=1e-6, atol=1e-9)


@given(tables(), st.lists(st.integers(0, 11), min_size=1, max_size=40), st.sampled_from([1.0, 1e-2]), st.sampled_from([0.0, 1e-5, 1e-2]))
def test_the_fused_kernel_equals_the_definition(
    table: tuple[np.ndarray, np.ndarray, np.ndarray], ids: list[int], r: float, zeta: float
) -> None:
    """Random batches with repeated ids, absent ids and rows of zeros; SGD shows the clipped gradient itself."""
    weight, grad, _ = table
    rows = np.array(ids) % len(weight)
    group = RowGroup.in_dram([TableSpec("t", len(weight), weight.shape[1])], SgdSpec(lr=1.0, clip=CowClip(r, zeta)))
    group.set_step(1.0, 1)
    every = torch.arange(len(weight))
    group.write(0, every, torch.from_numpy(weight))
    out = group.pooled(torch.from_numpy(rows), torch.arange(len(rows) + 1), [0])
    upstream = torch.from_numpy(grad[rows])
    out.backward(upstream)
    counts = np.bincount(rows, minlength=len(weight))
    summed = np.zeros(weight.shape, np.float64)
    np.add.at(summed, rows, upstream.numpy().astype(np.float64))
    expected = weight - np.where(counts[:, None] > 0, by_definition(weight, summed.astype(np.float32), counts, r, zeta), 0.0)
    largest = max(float(np.abs(values).max()) for values in (expected, summed, grad))
    np.testing.assert_allclose(group.read(0, every).numpy(), expected, rtol=0, atol=1e-6 * largest)


def test_it_is_not_the_rule_that_fbgemm_calls_cowclip() -> None:
    """FBGEMM's bound is `counter * max(coef ||w||, lower)` with a counter that runs over all steps, and no `sqrt(dim)`.

    Two batches of one row, with 2 and then 1 occurrences: here the second limit is half of the first, there 1.5 times it.
    """
    zeta = 1.0
    group = RowGroup.in_dram([TableSpec("t", 1, 4)], SgdSpec(lr=1e-12, clip=CowClip(zeta=zeta)))  # the row stays where it is
    every, moved, counter, theirs = torch.arange(1), [], 0, []
    for step, occurrences in enumerate((2, 1), start=1):
        group.set_step(1e-12, step)
        before = group.read(0, every).double()
        out = group.pooled(torch.zeros(occurrences, dtype=torch.int64), torch.arange(occurrences + 1), [0])
        out.backward(torch.full_like(out, 100.0))
        moved.append((before - group.read(0, every).double()).norm().item() / 1e-12)
        counter += occurrences
        theirs.append(counter * zeta)
    assert moved == pytest.approx([2 * 2.0, 1 * 2.0], rel=1e-3)  # count * sqrt(4) * zeta
    assert theirs == [2.0, 3.0]


@pytest.mark.parametrize(
    ("weight", "grad", "counts"), [((3, 2), (3, 3), (3,)), ((3, 2), (3, 2), (2,)), ((6,), (6,), (6,)), ((3, 2), (3, 2), (3, 1))]
)
def test_shapes_that_do_not_fit_are_refused(weight: tuple[int, ...], grad: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="expected weight and grad"):
        cow_clip(torch.zeros(weight), torch.zeros(grad), torch.zeros(counts))
