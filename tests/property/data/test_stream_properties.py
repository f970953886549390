"""Goal: the rules of the batch stream hold for every shape of set, batch and world. Layer: data readers."""

import math
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.making import bag_of, make_prepared_set
from torchrec_kstep.data import BatchOrder
from torchrec_kstep.data.prepared import PreparedSet
from torchrec_kstep.types import Batch

row_group_files = st.lists(st.lists(st.sampled_from([1, 2, 7, 8, 8, 8, 8, 13]), min_size=0, max_size=8), min_size=1, max_size=4).filter(
    lambda files: sum(map(sum, files)) > 0
)


def rows_of(batch: Batch) -> list[int]:
    """The numbers of the real rows, after checking that all columns belong to the same rows and padding is inert."""
    num_real = int(batch.weight.sum())
    assert batch.weight.tolist() == [1.0] * num_real + [0.0] * (len(batch.weight) - num_real)
    rows = batch.sparse["row"]
    assert rows.lengths().tolist() == batch.weight.int().tolist()
    numbers = rows.values().tolist()
    assert batch.sparse.values().dtype == torch.int32
    assert batch.dense[:num_real].tolist() == [[float(row), float(-row)] for row in numbers]
    assert batch.label[:num_real].tolist() == [float(row % 2) for row in numbers]
    assert not batch.dense[num_real:].any()
    assert not batch.label[num_real:].any()
    bags = batch.sparse["bag"]
    assert bags.values().tolist() == [bag_id for row in numbers for bag_id in bag_of(row)]
    assert bags.lengths().tolist() == [len(bag_of(row)) for row in numbers] + [0] * (len(batch.weight) - num_real)
    return numbers


def steps_of(data: PreparedSet, order: BatchOrder, start_step: int = 0) -> list[list[tuple[list[int], int, int]]]:
    """Per step and micro-batch: the rank's rows, the padded number of rows, the number of global rows."""
    stream = data.batches("train", order, start_step)
    batches = [(rows_of(batch), len(batch.label), batch.num_global_rows) for batch in stream]
    assert len(batches) == len(stream) == (stream.num_steps - start_step) * order.micro_batches
    return [batches[begin : begin + order.micro_batches] for begin in range(0, len(batches), order.micro_batches)]


def check_epoch(data: PreparedSet, world_size: int, batch_size: int, micro_batches: int, shuffle: bool, seed: int) -> list[list[int]]:
    """Checks one epoch over all ranks and returns the sorted rows of each step."""
    num_rows = data.num_rows("train")
    orders = [BatchOrder(rank, world_size, batch_size, micro_batches, seed=seed, shuffle=shuffle) for rank in range(world_size)]
    by_rank = [steps_of(data, order) for order in orders]
    global_batch_size = orders[0].global_batch_size
    assert {len(steps) for steps in by_rank} == {math.ceil(num_rows / global_batch_size)}
    sets = []
    for step, ranks in enumerate(zip(*by_rank, strict=True)):
        for micro_batches_of_ranks in zip(*ranks, strict=True):
            assert len({padded for _, padded, _ in micro_batches_of_ranks}) == 1
            padded = micro_batches_of_ranks[0][1]
            assert 1 <= padded <= batch_size
            assert padded == max(1, *(len(rows) for rows, _, _ in micro_batches_of_ranks))
        rows = [row for rank in ranks for rows, _, _ in rank for row in rows]
        num_global_rows = min(global_batch_size, num_rows - step * global_batch_size)
        assert len(rows) == num_global_rows > 0
        assert {count for rank in ranks for _, _, count in rank} == {num_global_rows}
        sets.append(sorted(rows))
    assert Counter(row for rows in sets for row in rows) == Counter(range(num_rows))
    return sets


@settings(max_examples=40)
@given(
    files=row_group_files,
    shuffle_row_groups=st.sampled_from([1, 2, 3, 4, 16]),
    per_rank=st.integers(1, 9),
    micro_batches=st.integers(1, 3),
    shuffle=st.booleans(),
    limit=st.one_of(st.just(0), st.integers(1, 60)),
    seed=st.integers(0, 5),
    prefetch_batches=st.sampled_from([0, 0, 2]),
)
def test_every_world_size_takes_the_same_rows_in_the_same_steps(
    files: list[list[int]],
    shuffle_row_groups: int,
    per_rank: int,
    micro_batches: int,
    shuffle: bool,
    limit: int,
    seed: int,
    prefetch_batches: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = PreparedSet(make_prepared_set(Path(folder) / "set", files), limit, shuffle_row_groups, prefetch_batches)
        assert data.num_rows("train") == min(limit or math.inf, sum(map(sum, files)))
        batch_size = per_rank * 4 * 3
        worlds = [(1, batch_size), (2, batch_size // 2), (3, batch_size // 3), (4, batch_size // 4), (1, batch_size // 4 * micro_batches)]
        epochs = [check_epoch(data, world, size, 1, shuffle, seed) for world, size in worlds[:4]]
        assert all(epoch == epochs[0] for epoch in epochs)
        accumulated = [check_epoch(data, world, per_rank * 4 // world, micro_batches, shuffle, seed) for world in (1, 2, 4)]
        assert all(epoch == accumulated[0] for epoch in accumulated)
        whole = check_epoch(data, 1, per_rank * 4 * micro_batches, 1, shuffle, seed)
        assert accumulated[0] == whole


@given(
    files=row_group_files, world_size=st.sampled_from([1, 2, 3, 16]), batch_size=st.integers(1, 20), shuffle=st.booleans(), data=st.data()
)
def test_resuming_at_a_step_gives_the_rest_of_the_epoch_exactly(
    files: list[list[int]], world_size: int, batch_size: int, shuffle: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepared = PreparedSet(make_prepared_set(Path(folder) / "set", files), shuffle_row_groups=2, prefetch_batches=0)
        order = BatchOrder(data.draw(st.integers(0, world_size - 1)), world_size, batch_size, 2, seed=3, epoch=1, shuffle=shuffle)
        whole = steps_of(prepared, order)
        start_step = data.draw(st.integers(0, len(whole)))
        assert steps_of(prepared, order, start_step) == whole[start_step:]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [100, 128, 1000, 1001])
def test_a_thousand_rows_give_no_empty_batch_and_lose_none(tmp_path: Path, world_size: int, batch_size: int) -> None:
    data = PreparedSet(make_prepared_set(tmp_path / "set", [[256, 256], [256, 232]]))
    check_epoch(data, world_size, batch_size, 1, True, 0)


def test_sixteen_ranks_share_full_windows_without_decoding_a_row_group_twice(tmp_path: Path) -> None:
    data = PreparedSet(make_prepared_set(tmp_path / "set", [[8] * 20, [8] * 20, [5]]), shuffle_row_groups=16, prefetch_batches=0)
    assert check_epoch(data, 16, 3, 2, True, 7) == check_epoch(data, 1, 96, 1, True, 7) == check_epoch(data, 4, 24, 1, True, 7)


def test_epochs_and_seeds_differ_when_shuffled_and_repeat_when_asked_again(tmp_path: Path) -> None:
    data = PreparedSet(make_prepared_set(tmp_path / "set", [[50, 50]]))

    def first_rows(seed: int, epoch: int) -> list[int]:
        return steps_of(data, BatchOrder(batch_size=100, seed=seed, epoch=epoch, shuffle=True))[0][0][0]

    orders = [first_rows(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(rows) for rows in orders}) == 4
    assert first_rows(1, 1) == orders[3]
    assert steps_of(data, BatchOrder(batch_size=100))[0][0][0] == list(range(100))


def test_evaluation_over_uneven_ranks_counts_every_row_once(tmp_path: Path) -> None:
    data = PreparedSet(make_prepared_set(tmp_path / "set", [[4]], eval_files=[[8, 8], [3]]))
    counts: Counter[int] = Counter()
    for rank in range(4):
        batches = list(data.batches("validation", BatchOrder(rank, 4, 4)))
        assert len(batches) == 2
        counts.update(row for batch in batches for row in rows_of(batch))
    assert counts == Counter(range(19))
