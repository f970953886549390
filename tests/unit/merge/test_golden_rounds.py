"""Rounds computed by hand: two replicas, two rows, k=2, every policy and form.

Adam with both betas 0.5, lr 1 and a gradient that stays the same: every touch moves a weight by 1 against its gradient (the
corrected m is g, the corrected root of v is |g|), and after c touches from zero m = (1 - 0.5^c) g, v = (1 - 0.5^c) g^2.

    row 0: replica A touches it twice with g=1:  D=-2, m=0.75, v=0.75, new information 1 and 1
           replica B once with g=2:              D=-1, m=1, v=2, new information 2 and 4
    row 1: replica A touches it once with g=1:   D=-1, m=0.5, v=0.5, new information 1 and 1

    union:    row 0: u = 2 (1 - (1 - 2/2)(1 - 1/2)) = 2, a = 2/3; row 1: one sender, u = 1, a = 1
    touched:  row 0: u = 3/2, a = 1/2;                            row 1: u = 1, a = 1
    mean:     row 0: u = 3/2, a = 1/2;                            row 1: u = 1/2, a = 1/2
"""

import math
from dataclasses import replace

import pytest
import torch

from tests.merging import touch
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge_spec import MergeSpec, MomentMerge, RowMerge
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec

TABLE = TableSpec("t", 3, 1)  # starts at zero; row 2 is never touched
ADAM = AdamSpec(lr=1.0, betas=(0.5, 0.5), eps=1e-12, bias_correction="row", touches="count")
NEVER = (0.0, 0.0, 0.0, 0)

# weight, m, v, step of rows 0 and 1.
EXPECTED: dict[tuple[RowMerge, MomentMerge], list[tuple[float, float, float, int]]] = {
    ("union", "renew"): [(-2.0, 0.75 * 4 / 3, 0.75 * 2, 2), (-1.0, 0.5, 0.5, 1)],
    ("union", "delta"): [(-2.0, 2 / 3 * 1.75, 2 / 3 * 2.75, 2), (-1.0, 0.5, 0.5, 1)],
    ("touched", "renew"): [(-1.5, (1 - 0.5**1.5) * 4 / 3, (1 - 0.5**1.5) * 2, 2), (-1.0, 0.5, 0.5, 1)],
    ("touched", "delta"): [(-1.5, 0.875, 1.375, 2), (-1.0, 0.5, 0.5, 1)],
    ("mean", "renew"): [(-1.5, (1 - 0.5**1.5) * 4 / 3, (1 - 0.5**1.5) * 2, 2), (-0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.5), 1)],
    ("mean", "delta"): [(-1.5, 0.875, 1.375, 2), (-0.5, 0.25, 0.25, 1)],
}


def touch_rows(group: RowGroup, gradients: dict[int, float]) -> None:
    rows = sorted(gradients)
    touch(group, {0: (rows, torch.tensor([[gradients[row]] for row in rows]))}, lr=1.0)


def two_replicas(spec: MergeSpec) -> tuple[list[RowGroup], InProcessMerger]:
    groups = [RowGroup.in_dram([TABLE], ADAM) for _ in range(2)]
    return groups, InProcessMerger([[group] for group in groups], spec)


def first_interval(groups: list[RowGroup]) -> None:
    touch_rows(groups[0], {0: 1.0, 1: 1.0})
    touch_rows(groups[0], {0: 1.0})
    touch_rows(groups[1], {0: 2.0})


def assert_rows(group: RowGroup, expected: list[tuple[float, float, float, int]]) -> None:
    for column, field in enumerate(("weight", "m", "v", "step")):
        values = group.read(0, torch.arange(3), field)[:, 0].tolist()
        assert values == pytest.approx([row[column] for row in [*expected, NEVER]], rel=3e-7), field
    assert group.touched_rows(0).tolist() == []


@pytest.mark.parametrize(("row_merge", "moments"), EXPECTED)
def test_a_round_gives_the_numbers_of_the_hand_computation(row_merge: RowMerge, moments: MomentMerge) -> None:
    groups, merger = two_replicas(MergeSpec(k=2, row_merge=row_merge, moments=moments))
    first_interval(groups)
    merger.merge(0, 2)
    for group in groups:
        assert_rows(group, EXPECTED[row_merge, moments])


def test_the_round_after_starts_from_the_merged_rows() -> None:
    """Replica B alone touches row 0 once more with g=1: from m=1, v=1.5, step 2 to m=1, v=1.25, step 3, and nobody objects."""
    groups, merger = two_replicas(MergeSpec(k=2))
    first_interval(groups)
    merger.merge(0, 2)
    touch_rows(groups[1], {0: 1.0})
    merger.merge(1, 2)
    moved = (1 / (1 - 0.5**3)) / math.sqrt(1.25 / (1 - 0.5**3))
    for group in groups:
        assert_rows(group, [(-2.0 - moved, 1.0, 1.25, 3), (-1.0, 0.5, 0.5, 1)])


def test_moments_that_are_not_sent_stay_with_the_step_of_their_row() -> None:
    groups, merger = two_replicas(MergeSpec(k=2, row_states="weights"))
    first_interval(groups)
    merger.merge(0, 2)
    assert_rows(groups[0], [(-2.0, 0.75, 0.75, 2), (-1.0, 0.5, 0.5, 1)])
    assert_rows(groups[1], [(-2.0, 1.0, 2.0, 1), (-1.0, 0.0, 0.0, 0)])


def test_a_late_round_corrects_rows_and_what_the_next_round_starts_from() -> None:
    """Between collecting and correcting, A touches row 0 (g=1): it keeps that step on top of the merged row."""
    groups, merger = two_replicas(MergeSpec(k=2, overlap_steps=1))
    first_interval(groups)
    merger.begin(0, 2)
    touch_rows(groups[0], {0: 1.0})  # from -2 by 1: m and v are EMAs of equal gradients, step 3
    merger.finish(1)
    # m = 0.5 m_merged + 0.5 = 0.5 (0.75 * 4/3) + 0.5, v = 0.5 (0.75 * 2) + 0.5: what a step from the merged row would have left
    values = [float(groups[0].read(0, torch.tensor([0]), field)) for field in ("weight", "m", "v", "step")]
    assert values == pytest.approx([-3.0, 1.0, 1.25, 3], rel=1e-6)
    assert_rows(groups[1], EXPECTED["union", "renew"])
    merger.merge(1, 1)
    for group in groups:  # one sender: the row is what A has
        assert_rows(group, [(-3.0, 1.0, 1.25, 3), (-1.0, 0.5, 0.5, 1)])


@pytest.mark.parametrize("is_late", [False, True], ids=["in_place", "late"])
def test_a_round_of_frozen_adam_sets_v_hat_to_the_corrected_merged_v(is_late: bool) -> None:
    """Global bias correction after 2 steps: the merged v of row 0 is 1.5, hence v_hat = 1.5 / (1 - 0.5^2) = 2."""
    frozen = replace(ADAM, bias_correction="global", frozen=True)
    groups = [RowGroup.in_dram([TABLE], frozen) for _ in range(2)]
    merger = InProcessMerger([[group] for group in groups], MergeSpec(k=2, overlap_steps=int(is_late)))
    first_interval(groups)
    if is_late:
        merger.begin(0, 2, step=2)
        for group in groups:
            group.set_step(1.0, 9)  # training has gone on
        merger.finish(1)
    else:
        merger.merge(0, 2, step=2)
    for group in groups:
        assert group.read(0, torch.arange(3), "v")[:, 0].tolist() == pytest.approx([1.5, 0.5, 0.0])
        assert group.read(0, torch.arange(3), "v_hat")[:, 0].tolist() == pytest.approx([2.0, 0.5 / 0.75, 0.0])
