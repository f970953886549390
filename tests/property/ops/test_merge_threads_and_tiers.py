"""Layer 2, in process: merge rounds over many rows, with several threads and with rows that have left the cache.

What breaks otherwise: a first touch that two threads list twice or with another row's base; a replica with a small cache that
ends a round with other bits than its peers.
"""

from pathlib import Path

import pytest
import torch

from tests.tiers import assert_same_state, open_tiered, uniform_table
from torchrec_kstep.ops import merge, reference, reference_merge
from torchrec_kstep.ops.batch import Merged, RowGradients
from torchrec_kstep.ops.reference import ReferenceGroup
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.units import KIB, MIB

FIELDS = ("weight", "m", "v")
OPTIMIZER = AdamSpec(0.1, touches="count", bias_correction="row")
NUM_STEPS = 4


def gradients(rows: torch.Tensor, dim: int, seed: int) -> RowGradients:
    grads = torch.randn(rows.numel() * dim, generator=torch.Generator().manual_seed(seed))
    return RowGradients(rows, torch.tensor([0, rows.numel()]), torch.ones(rows.numel(), dtype=torch.int32), grads)


def rows_of_step(num_rows: int, seed: int) -> torch.Tensor:
    return (torch.rand(num_rows, generator=torch.Generator().manual_seed(seed)) < 0.5).nonzero()[:, 0]


def train(group: RowGroup, first_seed: int) -> None:
    """Steps of one replica; about half of the rows in each."""
    for step in range(NUM_STEPS):
        group.set_step(0.1, step + 1)
        group.apply(gradients(rows_of_step(group.tables[0].num_rows, first_seed + step), group.tables[0].dim, first_seed + step))


def test_several_threads_note_each_first_touch_once_with_its_base() -> None:
    table = uniform_table(num_rows=20_000, dim=6)
    group, expected = RowGroup.in_dram([table], OPTIMIZER), ReferenceGroup([table], OPTIMIZER)
    for either in (group, expected):
        either.track(0, FIELDS)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(4)
    train(group, 1)
    for step in range(NUM_STEPS):
        expected.lr, expected.step = 0.1, step + 1
        reference.apply_row_gradients(expected, gradients(rows_of_step(20_000, 1 + step), 6, 1 + step))
    rows = group.touched_rows(0)
    assert torch.equal(rows, expected.touched_rows(0))
    assert group.base_bytes == rows.numel() * 3 * 6 * 4
    sent, expected_sent = merge.collect(group, 0, rows), reference_merge.collect(expected, 0, rows)
    assert torch.equal(sent.counts, expected_sent.counts)
    assert all(torch.equal(sent.values[name], expected_sent.values[name]) for name in FIELDS)
    arguments = ([rows, rows[::3].contiguous()], [sent.counts, sent.counts[::3].contiguous()])
    values = [sent.values, {name: value[::3].contiguous() for name, value in sent.values.items()}]
    merged = merge.reduce(*arguments, values, "renew", "union", NUM_STEPS, 2)
    expected_merged = reference_merge.reduce(*arguments, values, "renew", "union", NUM_STEPS, 2)
    assert torch.equal(merged.u_real, expected_merged.u_real)
    assert all(torch.equal(merged.values[name], expected_merged.values[name]) for name in FIELDS)
    merge.apply(group, 0, merged)
    reference_merge.apply(expected, 0, merged)
    torch.set_num_threads(threads_before)
    for name, value in expected.fields[0].items():
        assert torch.equal(group.read(0, torch.arange(20_000), name), value), name


@pytest.mark.parametrize("dram_bytes", [0, 32 * KIB, 64 * MIB])
@pytest.mark.parametrize("is_detached", [False, True])
def test_a_cache_of_any_size_ends_a_round_with_the_same_bits(tmp_path: Path, dram_bytes: int, is_detached: bool) -> None:
    """Two replicas; one of them has its rows on SSD. Rows that only the other touched are applied there too."""
    table = uniform_table(num_rows=3_000, dim=8)
    peer, in_dram = (RowGroup.in_dram([table], OPTIMIZER) for _ in range(2))
    with open_tiered(tmp_path, [table], OPTIMIZER, dram_bytes) as tiered:
        groups = (peer, in_dram, tiered)
        for group in groups:
            group.track(0, FIELDS)
            train(group, 50 if group is peer else 7)
        assert torch.equal(tiered.touched_rows(0), in_dram.touched_rows(0))
        rows = [group.touched_rows(0) for group in groups]
        sent = [merge.collect(group, 0, touched) for group, touched in zip(groups, rows, strict=True)]
        assert torch.equal(sent[2].values["v"], sent[1].values["v"])
        arguments = (rows[:2], [part.counts for part in sent[:2]], [part.values for part in sent[:2]])
        merged = merge.reduce(*arguments, "renew", "union", NUM_STEPS, 2)
        num_read = 0
        for group in groups:
            if is_detached:
                group.detach_touched(0)
                train(group, 90 if group is peer else 30)
            for begin in range(0, merged.rows.numel(), 1000):
                piece = slice(begin, begin + 1000)
                part = Merged(merged.rows[piece], merged.u_real[piece], {name: value[piece] for name, value in merged.values.items()})
                num_read += merge.apply(group, 0, part)
            group.clear_touched(0)
        assert_same_state(tiered, in_dram, OPTIMIZER)
        assert (num_read == 0) == (dram_bytes == 64 * MIB)
        if not is_detached:
            assert_same_state(peer, in_dram, OPTIMIZER)
