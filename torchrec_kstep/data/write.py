"""Writes the Parquet files of a prepared set: row groups of one size, a new part after some of them."""

from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_kstep.data.manifest import CHECKED_WHEN_WRITTEN, PartFile, footer_sha256
from torchrec_kstep.errors import DataError
from torchrec_kstep.types import Split

ROW_GROUPS_PER_PART = 32
_COMPRESSION = "lz4"  # decodes several times faster than a disk delivers, for two thirds of the bytes


class SplitWriter:
    """Collects the rows of one split and writes them in row groups of exactly `rows_per_row_group` rows; the last one is shorter."""

    def __init__(self, folder: Path, split: Split, schema: Any, rows_per_row_group: int) -> None:
        """Writes parts named `<split>/part-00000.parquet`, ... under `folder`."""
        self._folder = folder
        self._split = split
        self._schema = schema
        self._rows_per_row_group = rows_per_row_group
        self._waiting: list[Any] = []
        self._num_waiting = 0
        self._writer: Any = None
        self._parts: list[tuple[str, list[int]]] = []
        (folder / split).mkdir(parents=True)

    def write(self, table: Any) -> None:
        """Adds a table of the schema's columns."""
        self._waiting.append(table)
        self._num_waiting += table.num_rows
        if self._num_waiting >= self._rows_per_row_group:
            table = pa.concat_tables(self._waiting)
            begin = 0
            while table.num_rows - begin >= self._rows_per_row_group:
                self._write_row_group(table.slice(begin, self._rows_per_row_group))
                begin += self._rows_per_row_group
            self._waiting, self._num_waiting = [table.slice(begin)], table.num_rows - begin

    def finish(self) -> list[PartFile]:
        """Writes what waits, closes the last part and describes all of them."""
        if self._num_waiting:
            self._write_row_group(pa.concat_tables(self._waiting))
            self._waiting, self._num_waiting = [], 0
        self._close_part()
        return [
            PartFile(name, (self._folder / name).stat().st_size, footer_sha256(self._folder / name), row_group_rows)
            for name, row_group_rows in self._parts
        ]

    def __enter__(self) -> "SplitWriter":
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Closes the open part, whether or not the split is finished."""
        self._close_part()

    def _write_row_group(self, table: Any) -> None:
        _refuse_bad_numbers(table)
        if self._writer is None:
            name = f"{self._split}/part-{len(self._parts):05d}.parquet"
            self._parts.append((name, []))
            self._writer = pq.ParquetWriter(
                self._folder / name, self._schema, compression=_COMPRESSION, store_schema=False, write_page_checksum=True
            )
            self._writer.add_key_value_metadata(CHECKED_WHEN_WRITTEN)
        self._writer.write_table(table, row_group_size=table.num_rows)
        row_group_rows = self._parts[-1][1]
        row_group_rows.append(table.num_rows)
        if len(row_group_rows) == ROW_GROUPS_PER_PART:
            self._close_part()

    def _close_part(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _refuse_bad_numbers(table: Any) -> None:
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py():
            raise DataError(f"dense column {name} would hold NaN or an infinity after its transform: clean the raw values first")
