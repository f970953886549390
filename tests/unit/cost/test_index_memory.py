"""DRAM of the index of a table on SSD. Layer: unit. Against real stores it is checked in tests/unit/storage/test_estimate.py."""

import pytest

from torchrec_kstep.cost import index_memory_bytes


@pytest.mark.parametrize("num_rows", [1, 16, 1000, 65_536, 65_537, 10**9])
def test_the_index_of_an_untouched_table_is_small(num_rows: int) -> None:
    assert index_memory_bytes(num_rows, 0) <= 8 * (num_rows // 65_536 + 1)
    assert index_memory_bytes(num_rows, num_rows) >= 4 * num_rows


def test_the_index_grows_with_touched_rows_not_with_the_table() -> None:
    """Otherwise a table of a billion rows of which a million are touched would be refused for 4 GB of index."""
    assert index_memory_bytes(10**9, 10**6) < 16 * 10**6
