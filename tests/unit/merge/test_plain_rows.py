"""Tables that are plain tensors merge to the bits of compiled groups."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.merging import ADAM, TABLES, assert_same_rows, dram_group, random_steps, rows_of, touch
from torchrec_kstep.errors import ConfigError, DataError
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.plain_rows import PlainRows
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec, CowClip

K = 3
CASES: dict[str, tuple[dict[str, Any], AdamSpec]] = {
    "default": ({}, ADAM),
    "paper": ({"row_merge": "mean", "moments": "delta"}, replace(ADAM, bias_correction="global")),
    "touched_int8_in_buckets": ({"row_merge": "touched", "wire": "int8", "bucket_bytes": 1 << 16}, replace(ADAM, l2=0.01)),
    "late": ({"overlap_steps": 2, "wire": "bf16"}, ADAM),
    "periods": ({"m_period_rounds": 2, "v_period_rounds": 3}, replace(ADAM, num_trackers=3, step_per_moment=True)),
    "auto": ({"row_states": "auto"}, ADAM),
    "frozen": ({}, replace(ADAM, frozen=True, amsgrad=True)),
    "clipped": ({}, replace(ADAM, clip=CowClip(ratio=0.1))),
}


class Tensors:
    """Tables as a model might hold them: weights with gradients."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.params = [weight.clone().requires_grad_() for weight in weights]

    def weights(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.params]

    def gradients(self) -> list[torch.Tensor] | None:
        found = [param.grad for param in self.params if param.grad is not None]
        return found if len(found) == len(self.params) else None

    def clear_gradients(self) -> None:
        for param in self.params:
            param.grad = None


def plain_group(spec: AdamSpec = ADAM) -> PlainRows:
    start = dram_group(spec)
    return PlainRows(TABLES, spec, Tensors([start.read(index, torch.arange(table.num_rows)) for index, table in enumerate(TABLES)]))


def train(groups: list[RowGroup], spec: MergeSpec) -> list[tuple[int, int]]:
    merger = InProcessMerger([[group] for group in groups], spec)
    told, step = [], 1
    for round_index in range(3):
        for replica, group in enumerate(groups):
            random_steps(group, replica, step, K, num_ids=60)
        step += K
        if spec.overlap_steps:
            merger.begin(round_index, K)
            for replica, group in enumerate(groups):
                random_steps(group, replica, step, 2, num_ids=60)
            step += 2
            reports = merger.finish(2)
        else:
            reports = merger.merge(round_index, K, step=step - 1)
        told += [(report.total_sent_bytes, report.base_bytes) for report in reports]
    merger.merge(3, 0, is_full=True, step=step - 1)
    return told


@pytest.mark.parametrize("case", CASES)
def test_plain_tables_end_in_the_bits_of_compiled_groups(case: str) -> None:
    options, adam = CASES[case]
    spec = MergeSpec(k=K, **options)
    plain: list[RowGroup] = [plain_group(adam) for _ in range(2)]
    compiled = [dram_group(adam) for _ in range(2)]
    assert [sent for sent, _ in train(plain, spec)] == [sent for sent, _ in train(compiled, spec)]
    for ours, theirs in zip(plain, compiled, strict=True):
        assert_same_rows(ours, theirs)
        assert ours.base_bytes == 0
        assert ours.touched_rows(1).numel() == 0


def test_bases_take_the_memory_of_touched_rows() -> None:
    group = plain_group()
    group.track(0, ("weight", "m", "v"))
    touch(group, {1: (list(range(0, 3000, 10)), torch.ones(300, 4))})
    touch(group, {1: ([0, 5], torch.ones(2, 4))})
    assert group.base_bytes == 301 * 4 * 4 * 3
    assert group.touched_rows(1).numel() == 301
    group.clear_touched(1)
    assert group.base_bytes == 0


def test_gradients_of_several_backwards_wait_until_they_are_taken() -> None:
    tensors = Tensors([torch.zeros(table.num_rows, table.dim) for table in TABLES])
    group = PlainRows(TABLES, ADAM, tensors)
    offsets = torch.tensor([0, 2, 3, 4, 5])  # two bags of each of two features
    for ids in ([1, 3, 3, 7, 9], [3, 3, 1, 9, 2999]):
        group.note(torch.tensor(ids), offsets, [0, 1])
        for table, param in enumerate(tensors.params):
            of_table = torch.tensor(ids[:3] if table == 0 else ids[3:])
            param[of_table].sum().backward()  # type: ignore[no-untyped-call]
    assert group.num_pending == 2
    gradients = group.take_pending()
    assert gradients.unique_rows.tolist() == [1, 3, 7, 9, 2999]
    assert gradients.table_offsets.tolist() == [0, 2, 5]
    assert gradients.counts.tolist() == [2, 4, 1, 2, 1]
    assert gradients.grads.tolist() == [2.0] * 8 + [4.0] * 8 + [1.0] * 4 + [2.0] * 4 + [1.0] * 4
    assert group.num_pending == 0
    assert tensors.gradients() is None
    assert group.take_pending().unique_rows.numel() == 0


def test_steps_without_tracking_count_nothing() -> None:
    group = plain_group()
    group.set_tracking(False)
    random_steps(group, 0, 1, 2)
    assert all(group.touched_rows(table).numel() == 0 for table in range(2))
    assert not any(bool(values.any()) for name, values in rows_of(group, with_touches=True).items() if "touches" in name)
    group.set_tracking(True)
    random_steps(group, 0, 3, 1)
    assert group.touched_rows(0).numel()


def test_what_is_no_field_cannot_be_kept() -> None:
    with pytest.raises(DataError, match="expected some of m, v, weight"):
        plain_group().track(0, ("sum",))


def test_rows_that_would_replay_their_l2_unseen_are_refused_by_name() -> None:
    replaying = AdamSpec(lr=0.1, l2=0.01, l2_absent_rows="replay")
    with pytest.raises(ConfigError, match=f"tables {', '.join(table.name for table in TABLES)} .*choose l2_absent_rows='skip'"):
        plain_group(replaying)
    assert plain_group(replace(replaying, l2=0.0)).num_pending == 0, "without L2 there is nothing to replay"
