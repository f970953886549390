"""Goal: ids and offsets reach the row group as they are meant, of whatever width they come. Layer: unit."""

import numpy as np
import pytest
import torch

from torchrec_kstep.sharding.tiered.kernel import int64_here, shifted_here


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_become_int64(dtype: torch.dtype) -> None:
    whole = torch.arange(0, 20, dtype=dtype)
    for offsets in (whole, whole[::2], whole[:0]):
        converted = int64_here(offsets)
        assert converted.dtype == torch.int64
        assert converted.is_contiguous()
        assert torch.equal(converted, offsets.long())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_shifted_by_the_first_row_of_their_feature(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 1, 2, 3, 4], dtype=dtype)
    offsets = torch.tensor([0, 2, 2, 2, 5, 5, 5])  # three features of two bags; the last is empty
    shifted = shifted_here(ids, offsets, np.array([100, 0, 7], np.int32))
    assert shifted.dtype == dtype
    assert shifted.tolist() == [100, 101, 2, 3, 4]


def test_narrow_ids_reach_rows_beyond_int32() -> None:
    """A rank's part of a huge table is counted from its first row, so its ids may come as int32."""
    shifted = shifted_here(torch.tensor([5], dtype=torch.int32), torch.tensor([0, 1]), np.array([3 << 31], np.int64))
    assert shifted.tolist() == [(3 << 31) + 5]
