"""Rounds over rows on SSD: the bits and bytes of rows in DRAM, whatever the cache."""

from pathlib import Path

import pytest

from tests.merging import ADAM, TABLES, assert_same_rows, dram_group, random_steps
from tests.tiers import open_tiered
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.units import KIB, MIB

NUM_REPLICAS = 2
# All rows fit; about one in twenty does; the cache is smaller than what one round merges.
CACHES = {"all": 4 * MIB, "twentieth": 12 * KIB, "none": 0}


def train(groups: list[RowGroup], is_late: bool, wire: str) -> list[tuple[int, ...]]:
    """Three rounds; returns bytes and rows of each, as every replica counted them."""
    merger = InProcessMerger([[group] for group in groups], MergeSpec(k=3, wire=wire))  # type: ignore[arg-type]  # one of the wires
    told = []
    for round_index in range(3):
        for replica, group in enumerate(groups):
            random_steps(group, replica, 5 * round_index + 1, 3)
        if is_late:
            merger.begin(round_index, 3)
            for replica, group in enumerate(groups):
                random_steps(group, replica, 5 * round_index + 4, 2)
            reports = merger.finish(2)
        else:
            reports = merger.merge(round_index, 3)
        told += [(report.total_sent_bytes, sum(report.num_union_rows.values()), sum(report.num_own_rows.values())) for report in reports]
        # A row is read again at most where it had left the cache, and it is of those that were merged.
        assert all(report.num_rows_read <= sum(report.num_union_rows.values()) for report in reports)
        if not isinstance(groups[0], TieredTables):
            assert all(report.num_rows_read == 0 for report in reports)
    merger.merge(3, 2)
    return told


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("is_late", "wire"), [(False, "fp32"), (False, "int8"), (True, "fp32")], ids=["in_place", "int8", "late"])
def test_tiers_end_with_the_bits_and_bytes_of_dram(cache: str, is_late: bool, wire: str, tmp_path: Path) -> None:
    in_dram = [dram_group() for _ in range(NUM_REPLICAS)]
    expected = train(in_dram, is_late, wire)
    stores = [open_tiered(tmp_path / str(replica), list(TABLES), ADAM, CACHES[cache]) for replica in range(NUM_REPLICAS)]
    try:
        assert train(list(stores), is_late, wire) == expected
        for store, group in zip(stores, in_dram, strict=True):
            assert_same_rows(store, group)
    finally:
        for store in stores:
            store.close()


def test_rows_that_left_the_cache_are_counted_as_read(tmp_path: Path) -> None:
    stores = [open_tiered(tmp_path / str(replica), list(TABLES), ADAM, 0) for replica in range(NUM_REPLICAS)]
    merger = InProcessMerger([[store] for store in stores], MergeSpec(k=3))
    for replica, store in enumerate(stores):
        random_steps(store, replica, 1, 3)
    merger.merge(0, 3)
    for replica, store in enumerate(stores):
        random_steps(store, replica + 10, 4, 3)
    assert sum(report.num_rows_read for report in merger.merge(1, 3)) > 0
    for store in stores:
        store.close()


def evicted_rows(store: TieredTables) -> float:
    return sum(counters["evicted_rows"] for counters in store.counters().values())


@pytest.mark.parametrize("cache", CACHES)
def test_a_round_reads_no_more_rows_than_the_receiver_evicted_since_it_touched_them(cache: str, tmp_path: Path) -> None:
    """Rows that it touched, that is; of the others only those that it once held and that are no longer in its cache."""
    stores = [open_tiered(tmp_path / str(replica), list(TABLES), ADAM, CACHES[cache]) for replica in range(NUM_REPLICAS)]
    merger = InProcessMerger([[store] for store in stores], MergeSpec(k=3))
    held: set[tuple[int, int]] = set()  # by all replicas, after the rounds so far
    for round_index in range(4):
        evicted_before = [evicted_rows(store) for store in stores]
        own = []
        for replica, store in enumerate(stores):
            random_steps(store, replica + 10 * round_index, 3 * round_index + 1, 3, num_ids=80)
            own.append({(table, row) for table in range(len(TABLES)) for row in store.touched_rows(table).tolist()})
        union = set().union(*own)
        for replica, report in enumerate(merger.merge(round_index, 3)):
            num_evicted = evicted_rows(stores[replica]) - evicted_before[replica]
            num_other = len((union - own[replica]) & held)
            if cache != "none":  # without a cache rows leave at once, and none is counted as evicted
                assert report.num_rows_read <= num_evicted + num_other
            assert report.num_rows_read <= len(union & (own[replica] | held)), "a row that was never held is not read"
            if cache == "all":
                assert report.num_rows_read == 0
        held |= union
    for store in stores:
        store.close()
