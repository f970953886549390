"""Layer 1, pure: how a cache is divided, and what statistics say."""

from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.storage.division import divide_dram
from torchrec_kstep.storage.segments import SegmentInfo, svg_map, text_map
from torchrec_kstep.storage.stats import StoreStats


def test_small_tables_are_cached_whole_and_the_others_share_the_rest() -> None:
    tables = [TableSpec("small", 10, 8), TableSpec("big", 10**9, 8), TableSpec("wide", 10**9, 16)]
    shares = divide_dram(tables, [100, 100, 200], 301_000)
    assert shares == [1000, 100_000, 200_000]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 10**12), st.integers(64, 9000)), min_size=1, max_size=30),
    dram_bytes=st.integers(0, 2**45),
)
def test_a_division_spends_all_or_covers_all(sizes: list[tuple[int, int]], dram_bytes: int) -> None:
    tables = [TableSpec(f"t{index}", rows, 8) for index, (rows, _) in enumerate(sizes)]
    slots = [slot for _, slot in sizes]
    shares = divide_dram(tables, slots, dram_bytes)
    needs = [table.num_rows * slot for table, slot in zip(tables, slots, strict=True)]
    assert sum(shares) <= dram_bytes
    assert all(0 <= share <= max(need, share) for share, need in zip(shares, needs, strict=True))
    covered = all(share >= need for share, need in zip(shares, needs, strict=True))
    assert covered or dram_bytes - sum(shares) < len(sizes)
    # Nobody gets fewer rows than another, unless it has no more.
    rows = [share // slot for share, slot in zip(shares, slots, strict=True)]
    for row, table in zip(rows, tables, strict=True):
        assert row >= min(table.num_rows, max(rows) - 1) or row >= min(rows)


def test_statistics_keep_tables_and_store_apart() -> None:
    table = {"hits_rows": 60.0, "misses_rows": 30.0, "first_touches_rows": 10.0, "clairvoyant_ratio": 0.5, "stall_s": 0.25}
    table |= {"materialised_rows": 40.0, "index_bytes": 360.0, "read_bytes": 10.0}
    store = {"write_amplification_ratio": 1.2, "device_written_bytes": 2048.0, "cleaner_share_ratio": 0.1, "queue_depth_mean": 7.0}
    stats = StoreStats.of({"a": {**table, **store}, "b": {**table, **store, "hits_rows": 0.0, "clairvoyant_ratio": 0.0}})
    assert stats.store == store
    assert set(stats.tables["a"]) == set(table)
    assert stats.accesses_rows == 140
    assert stats.hit_ratio == 60 / 140
    assert stats.clairvoyant_ratio == 0.5
    assert stats.index_bytes_per_row == 9
    text = stats.describe()
    for part in ("140 rows asked for", "42.9%", "50% of what", "write amplification 1.20", "9.0 bytes a row", "cleaner 10%"):
        assert part in text
    later = StoreStats.of({"a": {**table, **store, "hits_rows": 100.0, "index_bytes": 400.0, "device_written_bytes": 4096.0}})
    change = later.since(stats)
    assert change.tables["a"]["hits_rows"] == 40
    assert change.tables["a"]["index_bytes"] == 400
    assert change.store["device_written_bytes"] == 2048
    assert change.store["write_amplification_ratio"] == 1.2


def test_pictures_of_segments() -> None:
    full = SegmentInfo(1, 0, 96, 100, 100, 1, 4096, False)
    half = SegmentInfo(2, 0, 96, 100, 50, 0, 4096, False)
    dead = SegmentInfo(3, 0, 96, 100, 0, 1, 4096, False)
    writing = SegmentInfo(4, 0, 192, 100, 10, 0, 4096, True)
    text = text_map([writing, dead, half, full])
    assert "|█▄.|" in text
    assert "|o|" in text
    assert "rows of 96 bytes: 3 segments, 12 KiB" in text
    svg = svg_map([writing, dead, half, full], "a <store>")
    assert svg.count("<title>segment") == 4
    assert "a &lt;store&gt;" in svg
