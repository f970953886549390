"""Goal: memory of batches is used again once nobody refers to it, and never before. Layer: data readers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data.making import NUM_ROWS_OF_TABLE, make_prepared_set
from torchrec_kstep.data import BatchOrder
from torchrec_kstep.data.batch_memory import BatchMemory
from torchrec_kstep.data.manifest import SparseColumn
from torchrec_kstep.data.prepared import PreparedSet

SHARES = {"train": 0.0, "validation": 0.0, "test": 0.0}
ROW = SparseColumn("row", NUM_ROWS_OF_TABLE, 1, False, "hash", 0, SHARES, SHARES)
BAG = SparseColumn("bag", 1000, 3, True, "hash", 0, SHARES, SHARES)


def test_memory_comes_back_when_the_last_that_shares_it_is_gone() -> None:
    memory = BatchMemory()
    lent = memory.lend((3, 5), np.dtype(np.int32))
    address = lent.ctypes.data
    tensor = torch.from_numpy(lent[1:].reshape(-1)).view(2, 5)[1]
    del lent
    assert memory.lend((3, 5), np.dtype(np.int32)).ctypes.data != address, "a tensor still shares it"
    del tensor
    assert memory.lend((5, 3), np.dtype(np.float32)).ctypes.data == address


def test_memory_of_another_size_is_not_lent() -> None:
    memory = BatchMemory()
    for size in (7, 2, 0):
        memory.lend((size,), np.dtype(np.int64))
    lent = []
    for size in (0, 2, 7, 9):
        lent.append(memory.lend((size,), np.dtype(np.int64)))
        lent[-1][:] = size
    assert [row.tolist() for row in lent] == [[size] * size for size in (0, 2, 7, 9)]


@pytest.mark.parametrize("sparse", [[ROW], [ROW, BAG]], ids=["one id a row", "bags"])
@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_batches_that_are_kept_stay_as_they_were(tmp_path: Path, sparse: list[SparseColumn], prefetch_batches: int) -> None:
    folder = make_prepared_set(tmp_path / "set", [[64] * 8], sparse=sparse)
    data = PreparedSet(folder, shuffle_row_groups=2, prefetch_batches=prefetch_batches)
    kept, copies = [], []
    for epoch in range(3):
        for batch in data.batches("train", BatchOrder(batch_size=16, shuffle=True, epoch=epoch)):
            ids = batch.sparse["row"].values()
            copies.append((batch.dense.clone(), ids.clone(), batch.label.clone()))
            if len(copies) % 3 == 0:  # some are dropped, and their memory is used again
                kept.append((len(copies) - 1, batch.dense, ids, batch.label))
    for place, *tensors in kept:
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies[place], strict=True))
