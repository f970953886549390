"""Goal: the synthetic stream is Zipf-shaped, learnable, and any row depends on its index alone. Layer: synthetic data."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.config.schema import DataConfig, SyntheticConfig
from torchrec_kstep.data import BatchOrder, open_dataset
from torchrec_kstep.data.mixing import mix64, scatter
from torchrec_kstep.data.synthetic import SyntheticStream
from torchrec_kstep.data.teacher import expected_auc
from torchrec_kstep.data.zipf import Zipf
from torchrec_kstep.errors import ConfigError

SMALL = {"num_train_rows": 100, "num_eval_rows": 10, "num_dense": 2, "num_rows_per_table": [50, 3_000_000_000, 1], "max_ids_per_bag": 3}

Row = tuple[tuple[float, ...], tuple[tuple[int, ...], ...], float]


def rows_of(data: SyntheticStream, order: BatchOrder, start_step: int = 0) -> list[list[Row]]:
    """Real rows per batch."""
    batches = []
    for batch in data.batches("train", order, start_step):
        features = [batch.sparse[name].to_dense() for name in data.schema.sparse_names]
        rows = range(int(batch.weight.sum()))
        batches.append(
            [(tuple(batch.dense[r].tolist()), tuple(tuple(f[r].tolist()) for f in features), batch.label[r].item()) for r in rows]
        )
    return batches


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_world_size_sees_the_same_rows_and_resuming_is_exact(shuffle: bool) -> None:
    data = SyntheticStream(SyntheticConfig(**SMALL), limit=97, prefetch_batches=0)  # type: ignore[arg-type]
    whole = rows_of(data, BatchOrder(batch_size=24, shuffle=shuffle, seed=5))
    for world_size in (2, 3, 4):
        ranks = [rows_of(data, BatchOrder(rank, world_size, 24 // world_size, shuffle=shuffle, seed=5)) for rank in range(world_size)]
        for step, expected in enumerate(whole):
            assert Counter(row for rank in ranks for row in rank[step]) == Counter(expected)
    assert rows_of(data, BatchOrder(batch_size=24, shuffle=shuffle, seed=5), start_step=2) == whole[2:]
    in_order = rows_of(data, BatchOrder(batch_size=97))[0]
    assert Counter(row for batch in whole for row in batch) == Counter(in_order)
    assert ([row for batch in whole for row in batch] == in_order) is not shuffle


def test_batches_splits_seeds_and_epochs_differ() -> None:
    config = SyntheticConfig(**SMALL)  # type: ignore[arg-type]
    data = SyntheticStream(config)
    batches = rows_of(data, BatchOrder(batch_size=10))
    assert len({tuple(batch) for batch in batches}) == 10
    other = SyntheticStream(SyntheticConfig(**(SMALL | {"seed": 2})))  # type: ignore[arg-type]
    assert rows_of(other, BatchOrder(batch_size=10))[0] != batches[0]
    assert other.fingerprint != data.fingerprint
    first = {epoch: rows_of(data, BatchOrder(batch_size=10, shuffle=True, epoch=epoch))[0] for epoch in (0, 1)}
    assert first[0] != first[1]
    validation, test = (next(iter(data.batches(split, BatchOrder(batch_size=10)))).dense for split in ("validation", "test"))  # type: ignore[arg-type]
    assert not torch.equal(validation, test)


def test_ids_bags_labels_and_dense_values_have_the_promised_shape() -> None:
    data = open_dataset(
        DataConfig(
            name="synthetic",
            synthetic=SyntheticConfig(num_train_rows=20_000, num_dense=3, num_rows_per_table=[1000, 10**9], max_ids_per_bag=4),
        )
    )
    (batch,) = data.batches("train", BatchOrder(batch_size=20_000))
    for feature in data.schema.sparse:
        bags = batch.sparse[feature.name]
        assert set(bags.lengths().tolist()) == {1, 2, 3, 4}
        assert 0 <= int(bags.values().min()) <= int(bags.values().max()) < feature.num_rows
        assert feature.max_ids_per_bag == 4
    assert int(batch.sparse["C2"].values().max()) > 900_000_000
    assert batch.label.mean().item() == pytest.approx(0.28, abs=0.05)
    assert batch.dense.mean().item() == pytest.approx(0, abs=0.02)
    assert batch.dense.std().item() == pytest.approx(1, abs=0.02)


def test_the_labels_can_be_learnt_up_to_the_stated_auc() -> None:
    """Scored by the teacher, the labels that were drawn have the AUC that is stated; scored by chance they have one half."""
    data = SyntheticStream(SyntheticConfig(num_train_rows=30_000, num_rows_per_table=[100] * 8))
    rows = data._make("train", np.arange(30_000, dtype=np.uint64))
    ranks = np.argsort(np.argsort(rows.probability)) + 1
    num_positive = rows.label.sum()
    found = (ranks[rows.label == 1].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * (len(ranks) - num_positive))
    assert found == pytest.approx(data.bayes_auc("train"), abs=0.01)
    assert 0.7 < found < 0.85


def test_expected_auc_of_hand_made_probabilities() -> None:
    assert expected_auc(np.full(10, 0.3)) == pytest.approx(0.5)
    p, q = 0.2, 0.9  # pairs, each with itself included as a tie
    wins = q * (1 - p) + (p * (1 - p) + q * (1 - q)) / 2
    assert expected_auc(np.array([p, q])) == pytest.approx(wins / ((p + q) * (2 - p - q)))


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("num_rows", [1, 5, 4096, 4097, 20_000])
def test_zipf_ranks_follow_the_law(exponent: float, num_rows: int) -> None:
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    expected = np.cumsum(weights) / weights.sum()
    draws = (np.arange(200_000) + 0.5) / 200_000
    ranks = Zipf(num_rows, exponent).ranks(draws)
    assert ranks.max() < num_rows
    counts = np.cumsum(np.bincount(ranks.astype(np.int64), minlength=num_rows)) / len(draws)
    np.testing.assert_allclose(counts, expected, atol=2e-5)


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**40))
def test_scatter_is_a_permutation(size: int, seed: int) -> None:
    numbers = scatter(np.arange(size, dtype=np.uint64), size, seed)
    assert np.array_equal(np.sort(numbers), np.arange(size))


def test_scatter_leaves_no_trace_of_the_order() -> None:
    numbers = scatter(np.arange(100_000, dtype=np.uint64), 3_000_000_000, 1).astype(np.float64)
    assert abs(np.corrcoef(np.arange(100_000), numbers)[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert len(np.unique(mix64(np.arange(100_000, dtype=np.uint64), 1))) == 100_000


@pytest.mark.parametrize(
    "replace",
    [
        {"num_train_rows": 0},
        {"num_rows_per_table": []},
        {"num_rows_per_table": [0]},
        {"max_ids_per_bag": 0},
        {"zipf_exponent": -1.0},
        {"seed": -1},
    ],
)
def test_impossible_sizes_are_refused(replace: dict) -> None:
    with pytest.raises(ConfigError, match=r"data\.synthetic"):
        SyntheticStream(SyntheticConfig(**(SMALL | replace)))
