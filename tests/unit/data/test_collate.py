"""Goal: columns that do not fit together are refused by name at the edge. Layer: collation of batches."""

import numpy as np
import pytest
import torch

from torchrec_kstep.data import Bags, make_batch, make_sparse
from torchrec_kstep.errors import DataError
from torchrec_kstep.types import FeatureSchema, SparseFeature

SCHEMA = FeatureSchema(("d",), (SparseFeature("a", 10), SparseFeature("b", 1 << 40, 0)))


def columns(**replace: object) -> dict:
    return {
        "dense": np.zeros((3, 1), dtype=np.float32),
        "bags": {"a": Bags(np.array([1, 2, 3])), "b": Bags(np.array([2**33, 5, 7]), np.array([2, 0, 1]))},
        "label": np.array([0, 1, 1], dtype=np.float32),
    } | replace


def test_a_batch_keeps_every_value() -> None:
    batch = make_batch(SCHEMA, **columns(), num_padded_rows=4, num_global_rows=9)
    assert batch.sparse.keys() == ["a", "b"]
    assert batch.sparse.values().tolist() == [1, 2, 3, 2**33, 5, 7]
    assert batch.sparse.lengths().tolist() == [1, 1, 1, 0, 2, 0, 1, 0]
    assert batch.weight.tolist() == [1, 1, 1, 0]
    assert batch.num_global_rows == 9


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_of_32_and_64_bits_give_the_same_batch(dtype: type) -> None:
    bags = {"a": Bags(np.array([1, 2, 9], dtype=dtype)), "b": Bags(np.array([3], dtype=dtype), np.array([0, 1, 0], dtype=dtype))}
    batch = make_batch(SCHEMA, **columns(bags=bags))
    assert batch.sparse.values().dtype == torch.int64
    assert batch.sparse.values().tolist() == [1, 2, 9, 3]
    assert batch.sparse.lengths().tolist() == [1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize("bad_id", [10, 11, -1, 2**31, 2**40])
def test_an_id_outside_its_table_is_refused(bad_id: int) -> None:
    bags = columns()["bags"] | {"a": Bags(np.array([1, bad_id, 9]))}
    with pytest.raises(DataError, match=r"feature a has ids from .* its table has 10 rows"):
        make_batch(SCHEMA, **columns(bags=bags))


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ({"dense": np.zeros((2, 1), dtype=np.float32)}, r"dense columns have shape \(2, 1\), expected \(3, 1\)"),
        ({"dense": np.full((3, 1), np.nan, dtype=np.float32)}, "NaN or infinite"),
        ({"label": np.array([0, np.inf, 1], dtype=np.float32)}, "NaN or infinite"),
        ({"bags": {"a": Bags(np.array([1, 2, 3]))}}, r"missing \['b'\]"),
        ({"bags": columns()["bags"] | {"c": Bags(np.array([1, 2, 3]))}}, r"unknown \['c'\]"),
        ({"bags": columns()["bags"] | {"a": Bags(np.array([1, 2]))}}, "feature a has bags for 2 rows, the label has 3"),
        ({"bags": columns()["bags"] | {"b": Bags(np.array([1, 2]), np.array([1, 1]))}}, "feature b has bags for 2 rows"),
        (
            {"bags": columns()["bags"] | {"b": Bags(np.array([1, 2]), np.array([1, 1, 1]))}},
            "feature b: lengths add up to 3 ids but there are 2",
        ),
        ({"bags": columns()["bags"] | {"b": Bags(np.array([1, 2]), np.array([3, -1, 0]))}}, "feature b: lengths add up to 2"),
    ],
)
def test_columns_that_do_not_fit_are_named(replace: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_batch(SCHEMA, **columns(**replace))


@pytest.mark.parametrize(("num_keys", "num_lengths"), [(26, 26 * 8 - 1), (26, 26 * 8 + 1), (2, 1), (3, 2114)])
def test_lengths_that_do_not_divide_by_the_features_are_counted(num_keys: int, num_lengths: int) -> None:
    names = [f"C{index}" for index in range(num_keys)]
    with pytest.raises(
        ValueError, match=rf"{num_lengths} lengths cannot be shared by {num_keys} features.*batch size of {num_lengths // num_keys} "
    ) as caught:
        make_sparse(names, torch.arange(num_lengths), torch.ones(num_lengths, dtype=torch.int32))
    assert isinstance(caught.value, DataError)


@pytest.mark.parametrize(
    ("names", "ids", "lengths", "message"),
    [
        (["a", "a"], torch.arange(2), torch.ones(2, dtype=torch.int64), r"\['a'\] are used twice"),
        (["a", "b"], torch.arange(3), torch.ones(2, dtype=torch.int64), "lengths add up to 2 ids but there are 3"),
        (["a"], torch.arange(2).float(), torch.ones(2, dtype=torch.int64), "got ids of torch.float32"),
        (["a"], torch.arange(2), torch.tensor([3, -1]), "a bag length is -1"),
        ([], torch.arange(0), torch.ones(0, dtype=torch.int64), "0 lengths cannot be shared by 0 features"),
    ],
)
def test_other_faults_of_a_sparse_batch_are_named(names: list[str], ids: torch.Tensor, lengths: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_sparse(names, ids, lengths)


def test_a_sparse_batch_of_nothing_but_empty_bags_is_fine() -> None:
    sparse = make_sparse(["a", "b"], torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int32))
    assert sparse.stride() == 3
    assert sparse["a"].lengths().tolist() == [0, 0, 0]
