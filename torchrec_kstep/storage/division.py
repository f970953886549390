"""How the DRAM of one rank is divided over its tables. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_kstep.ops import _library
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import record_fields
from torchrec_kstep.optim_spec import OptimizerSpec

BYTES_PER_ELEMENT = 4  # f32 and i32 alike


@dataclass(frozen=True)
class RecordLayout:
    """How the rows of one payload size lie in DRAM and on SSD, as the compiled store lays them out (docs/format.md).

    Attributes:
        payload_bytes: the row's fields.
        record_bytes: with row_id, table_id, epoch and checksum.
        unit_bytes: what one read fetches.
        records_per_unit: records in it.
        units_per_segment: at most, in one file.
        segment_header_bytes: at the start of each file.
        stride_bytes: from one cached row to the next.
        slot_overhead_bytes: bookkeeping per cached row, counted in the cache's bytes.
    """

    payload_bytes: int
    record_bytes: int
    unit_bytes: int
    records_per_unit: int
    units_per_segment: int
    segment_header_bytes: int
    stride_bytes: int
    slot_overhead_bytes: int

    @classmethod
    def of(cls, payload_bytes: int, segment_bytes: int) -> "RecordLayout":
        """Asks the compiled store."""
        _library.load()
        values: dict[str, Any] = dict(torch.classes.kstep.Snapshot.record_layout(payload_bytes, segment_bytes))
        return cls(payload_bytes=payload_bytes, **values)

    @property
    def slot_bytes(self) -> int:
        """DRAM that one cached row takes."""
        return self.stride_bytes + self.slot_overhead_bytes


def payload_bytes(table: TableSpec, optimizer: OptimizerSpec | None) -> int:
    """Bytes of the fields of one row."""
    return BYTES_PER_ELEMENT * sum(field.width for field in record_fields(table, optimizer))


def divide_dram(tables: Sequence[TableSpec], slot_bytes: Sequence[int], dram_bytes: int) -> list[int]:
    """Divides a cache over tables, all of it unless every row of every table has its slot.

    Each table may have as many rows cached as any other, since each is read about equally often in a batch of single-valued
    features; what a table smaller than that leaves over goes to the others. Tables of equal record size share one cache in
    the store, so the division matters between record sizes only.

    Args:
        tables: of the group.
        slot_bytes: DRAM per cached row of each table.
        dram_bytes: to be divided.

    Returns:
        Bytes per table; their sum is at most `dram_bytes`.
    """
    needs = [table.num_rows * slot for table, slot in zip(tables, slot_bytes, strict=True)]
    shares = [0] * len(needs)
    open_tables = list(range(len(needs)))
    left = dram_bytes
    while open_tables:
        slots_each = left // sum(slot_bytes[table] for table in open_tables)
        full = [table for table in open_tables if tables[table].num_rows <= slots_each]
        if not full:
            break
        for table in full:
            shares[table] = needs[table]
            left -= needs[table]
        open_tables = [table for table in open_tables if table not in full]
    if open_tables:
        weight = sum(slot_bytes[table] for table in open_tables)
        for table in open_tables:
            shares[table] = left * slot_bytes[table] // weight
    return shares
