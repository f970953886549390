"""How much DRAM and SSD a row store will take, from the tables alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_kstep.cost import index_memory_bytes
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.storage.division import RecordLayout, divide_dram, payload_bytes
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB, MIB, format_bytes

# The compiled store's own constants (kernels/storage, kernels/cache).
_SLOT_STATE_BYTES, _MIN_CACHE_ENTRIES, _CACHE_ENTRY_BYTES = 16, 1024, 8  # row_cache: state; hash and announcements per entry
_WRITE_BUFFERS, _WRITE_BUFFER_BYTES = 8, MIB  # row_log: per log
_MIN_SEGMENT_BYTES, _SEGMENT_SHARE = 256 * KIB, 32  # row_log: a segment is at most 1/32 of the live bytes
_FOOTER_PAGE_BYTES, _TRAILER_BYTES = 4096, 64
_SMALL_STORE_BYTES = MIB  # cleaner: per log, exempt from the bound


@dataclass(frozen=True)
class TableEstimate:
    """One table.

    Attributes:
        name: of the table.
        num_rows: ids it has.
        touched_rows: rows that will have a record.
        record_bytes: of one row on SSD.
        index_bytes: DRAM that finds the touched rows, if they are spread evenly.
        cache_bytes: DRAM for cached rows.
        payload_bytes: rows of equal payload share one cache and one log.
    """

    name: str
    num_rows: int
    touched_rows: int
    record_bytes: int
    index_bytes: int
    cache_bytes: int
    payload_bytes: int


@dataclass(frozen=True)
class StoreEstimate:
    """A store of several tables.

    Attributes:
        tables: table by table.
        cache_bytes: DRAM of the cache with its bookkeeping.
        index_bytes: DRAM of the indexes once the touched rows have records.
        buffer_bytes: DRAM of write and read buffers, at most.
        disk_bytes: files on SSD when every touched row was written once.
        max_disk_bytes: at most, with stale rows, without what only snapshots hold.
    """

    tables: tuple[TableEstimate, ...]
    cache_bytes: int
    index_bytes: int
    buffer_bytes: int
    disk_bytes: int
    max_disk_bytes: int

    @property
    def memory_bytes(self) -> int:
        """All DRAM together."""
        return self.cache_bytes + self.index_bytes + self.buffer_bytes

    @property
    def index_bytes_per_row(self) -> float:
        """Of a touched row."""
        touched = sum(table.touched_rows for table in self.tables)
        return self.index_bytes / touched if touched else 0.0

    def describe_memory(self) -> str:
        """One line for a log."""
        touched = sum(table.touched_rows for table in self.tables)
        return (
            f"cache {format_bytes(self.cache_bytes)}, index {format_bytes(self.index_bytes)} once {touched:,} rows were touched "
            f"({self.index_bytes_per_row:.1f} bytes a row), buffers up to {format_bytes(self.buffer_bytes)}"
        )


def estimate(
    tables: Sequence[TableSpec],
    optimizer: OptimizerSpec | None,
    dram_bytes: int,
    config: TierConfig,
    touched_rows: Sequence[int] | None = None,
) -> StoreEstimate:
    """Estimates one rank's store.

    Args:
        tables: of the rank.
        optimizer: says what a record holds.
        dram_bytes: cache of the rank.
        config: segment size, space factor and queue depth.
        touched_rows: rows of each table that will have a record, spread evenly over it; None: all.
    """
    touched = [table.num_rows for table in tables] if touched_rows is None else list(touched_rows)
    layouts = [RecordLayout.of(payload_bytes(table, optimizer), config.num_segment_bytes) for table in tables]
    shares = divide_dram(tables, [layout.slot_bytes for layout in layouts], dram_bytes)
    by_payload = {layout.payload_bytes: layout for layout in layouts}
    cache_bytes = disk_bytes = max_disk_bytes = buffer_bytes = 0
    estimates = []
    for payload, layout in by_payload.items():
        of_log = [index for index, one in enumerate(layouts) if one.payload_bytes == payload]
        cache_bytes += cache_memory_bytes(layout, sum(shares[index] for index in of_log))
        fresh, bound = _disk_bytes(layout, [(tables[index], touched[index]) for index in of_log], config)
        disk_bytes += fresh
        max_disk_bytes += bound
        buffer_bytes += _WRITE_BUFFERS * _WRITE_BUFFER_BYTES + config.queue_depth * layout.unit_bytes
    for table, share, rows, layout in zip(tables, shares, touched, layouts, strict=True):
        index = index_memory_bytes(table.num_rows, rows)
        estimates.append(TableEstimate(table.name, table.num_rows, rows, layout.record_bytes, index, share, layout.payload_bytes))
    return StoreEstimate(
        tables=tuple(estimates),
        cache_bytes=cache_bytes,
        index_bytes=sum(one.index_bytes for one in estimates),
        buffer_bytes=buffer_bytes,
        disk_bytes=disk_bytes,
        max_disk_bytes=max_disk_bytes,
    )


def cache_memory_bytes(layout: RecordLayout, share_bytes: int) -> int:
    """DRAM that a cache takes when it is given `share_bytes`."""
    capacity = share_bytes // layout.slot_bytes
    entries = max(_MIN_CACHE_ENTRIES, 1 << max(0, 2 * capacity - 1).bit_length())
    return capacity * (layout.stride_bytes + _SLOT_STATE_BYTES) + entries * _CACHE_ENTRY_BYTES


def _disk_bytes(layout: RecordLayout, tables: Sequence[tuple[TableSpec, int]], config: TierConfig) -> tuple[int, int]:
    """Bytes of one log: each row written once, and the cleaner's bound."""
    records = sum(rows for _, rows in tables)
    if not records:
        return 0, 0
    units = -(-records // layout.records_per_unit) * layout.unit_bytes
    entries = sum(rows * (_varint_bytes(_record_table_id(table)) + _varint_bytes(table.num_rows * 3 // 4) + 1) for table, rows in tables)
    overhead = layout.segment_header_bytes + _TRAILER_BYTES + _FOOTER_PAGE_BYTES // 2
    fresh = units + entries + _num_segments(units, config.num_segment_bytes) * overhead
    return fresh, round(config.space_factor * (fresh + _SMALL_STORE_BYTES))


def _record_table_id(table: TableSpec) -> int:
    """The number that stands for a table in records: column shards differ."""
    return table.table_id | table.first_column << 20


def _num_segments(unit_bytes: int, segment_bytes: int) -> int:
    """Segments grow with the store: 256 KiB at first, then 1/32 of it, up to `segment_bytes`."""
    smallest = min(_MIN_SEGMENT_BYTES, segment_bytes)
    begin, end = _SEGMENT_SHARE * smallest, _SEGMENT_SHARE * segment_bytes
    count = min(unit_bytes, begin) / smallest
    if unit_bytes > begin:
        count += _SEGMENT_SHARE * math.log(min(unit_bytes, end) / begin)
    if unit_bytes > end:
        count += (unit_bytes - end) / segment_bytes
    return math.ceil(count)


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
