"""Random touch patterns against the formulas of a round, written down once more in double precision."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.merging import rows_of, touch
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec

NUM_ROWS, DIM = 12, 3
TABLE = TableSpec("t", NUM_ROWS, DIM, seed=3, init="uniform", init_a=-0.5, init_b=0.5)
ADAM = AdamSpec(lr=0.05, betas=(0.8, 0.9), bias_correction="row", touches="count")
rows_of_steps = st.lists(st.sets(st.integers(0, NUM_ROWS - 1), max_size=6).map(sorted), min_size=1, max_size=4)


def expected(spec: MergeSpec, start: dict[str, torch.Tensor], ends: list[dict[str, torch.Tensor]], k: int) -> dict[str, torch.Tensor]:
    """What all replicas hold after a round in which every row of `start` was equal on all."""
    base = {name: values.double() for name, values in start.items()}
    counts = torch.stack([(end["step"] - start["step"])[:, 0].double() for end in ends])  # [N, rows]
    total, senders = counts.sum(dim=0), (counts > 0).sum(dim=0)
    union = torch.where(senders == 1, total, k * (1 - (1 - counts / k).prod(dim=0)))
    divisor = {"touched": senders.double(), "mean": torch.full_like(total, len(ends))}.get(spec.row_merge)
    u = union if divisor is None else total / divisor
    a = u / total
    merged = {name: values.clone() for name, values in base.items()}
    touched = total > 0
    for name, beta in (("weight", None), ("m", ADAM.betas[0]), ("v", ADAM.betas[1])):
        changes = torch.stack([end[name].double() - base[name] for end in ends])
        if beta is None or spec.moments == "delta":
            moved = base[name] + a[:, None] * changes.sum(dim=0)
        else:
            decay = beta ** counts[:, :, None]
            new = torch.where(
                counts[:, :, None] > 0, (torch.stack([end[name].double() for end in ends]) - decay * base[name]) / (1 - decay), 0.0
            )
            share = (counts / total)[:, :, None]
            moved = beta ** u[:, None] * base[name] + (1 - beta ** u[:, None]) * (share * new).nan_to_num(0.0).sum(dim=0)
        merged[name][touched] = moved[touched]
    steps = u.round().clamp(min=1)
    merged["step"][touched, 0] = (base["step"][:, 0] + steps)[touched]
    return merged


def fields(group: RowGroup) -> dict[str, torch.Tensor]:
    return {name.removeprefix("t."): values for name, values in rows_of(group).items()}


@pytest.mark.parametrize("moments", ["renew", "delta"])
@pytest.mark.parametrize("row_merge", ["union", "touched", "mean"])
@settings(max_examples=25, deadline=None)
@given(replicas=st.lists(st.lists(rows_of_steps, min_size=2, max_size=2), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_any_pattern_of_touches_gives_what_the_formulas_say(
    row_merge: Any, moments: Any, replicas: list[list[list[list[int]]]], seed: int
) -> None:
    k = max(len(steps) for rounds in replicas for steps in rounds)
    spec = MergeSpec(k=k, row_merge=row_merge, moments=moments)
    groups = [RowGroup.in_dram([TABLE], ADAM) for _ in replicas]
    merger = InProcessMerger([[group] for group in groups], spec)
    noise = torch.Generator().manual_seed(seed)
    for round_index in range(2):
        start = fields(groups[0])
        for group, rounds in zip(groups, replicas, strict=True):
            for rows in rounds[round_index]:
                # Gradients away from 0, or double precision would not be a judge of single.
                touch(group, {0: (rows, torch.rand(len(rows), DIM, generator=noise) + 0.5)})
        want = expected(spec, start, [fields(group) for group in groups], k)
        merger.merge(round_index, k)
        for group in groups:
            got = fields(group)
            for name, values in want.items():
                torch.testing.assert_close(got[name].double(), values, atol=2e-5, rtol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
            assert all(torch.equal(got[name], values) for name, values in fields(groups[0]).items())
