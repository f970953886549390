"""Value types between stages: a batch keeps every part when it moves, and a schema keeps its order."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.types import SPLITS, Batch, FeatureSchema, SparseFeature


def make_batch(num_rows: int) -> Batch:
    sparse = KeyedJaggedTensor.from_lengths_sync(
        keys=["user", "item"], values=torch.arange(2 * num_rows), lengths=torch.ones(2 * num_rows, dtype=torch.int32)
    )
    return Batch(
        dense=torch.arange(3.0 * num_rows).reshape(num_rows, 3),
        sparse=sparse,
        label=torch.ones(num_rows),
        weight=torch.ones(num_rows),
        num_global_rows=17,
    )


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_batch_moves_with_every_part(num_rows: int) -> None:
    batch = make_batch(num_rows)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    for name in ("dense", "label", "weight"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(batch, name).shape
    assert moved.sparse.values().device.type == "meta"
    assert moved.sparse.keys() == ["user", "item"]
    assert moved.num_global_rows == 17


def test_moving_to_the_same_device_keeps_the_values() -> None:
    batch = make_batch(4)
    moved = batch.to(torch.device("cpu"))
    torch.testing.assert_close(moved.dense, batch.dense, rtol=0, atol=0)
    torch.testing.assert_close(moved.sparse.values(), batch.sparse.values(), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["pin_memory", "record_stream"])
def test_every_tensor_of_a_batch_is_reached(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten field would stay in pageable memory, or be freed while a copy still reads it."""
    batch = make_batch(2)
    seen: list[int] = []

    def record(tensor: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch.Tensor, method, record)
    if method == "pin_memory":
        assert batch.pin_memory().num_global_rows == 17
    else:
        batch.record_stream(torch.Stream(device="cpu"))
    assert {tensor.data_ptr() for tensor in (batch.dense, batch.label, batch.weight, batch.sparse.values())} <= set(seen)


def test_schema_keeps_column_order() -> None:
    schema = FeatureSchema(dense_names=("b", "a"), sparse=(SparseFeature("z", 10), SparseFeature("y", 5, max_ids_per_bag=0)))
    assert schema.num_dense == 2
    assert schema.sparse_names == ("z", "y")


def test_splits_are_the_three() -> None:
    assert SPLITS == ("train", "validation", "test")
