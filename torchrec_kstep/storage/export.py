"""Writes the rows of a snapshot to Parquet or safetensors files, one per table, in bounded memory.

A file appears under its name when it is whole; until then it ends in `.partial`, and a failure removes it.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal, get_args
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from torchrec_kstep.errors import ConfigError, StorageIOError
from torchrec_kstep.optim_spec import FieldType
from torchrec_kstep.storage.division import BYTES_PER_ELEMENT
from torchrec_kstep.storage.snapshot import Snapshot, StoredTable
from torchrec_kstep.units import MIB

ExportFormat = Literal["parquet", "safetensors"]
Progress = Callable[[str, int], None]
_CHUNK_BYTES = 16 * MIB
_ARROW_TYPES: dict[FieldType, pa.DataType] = {"f32": pa.float32(), "i32": pa.int32()}
_SAFETENSORS_TYPES: dict[FieldType, str] = {"f32": "F32", "i32": "I32"}
_SAFETENSORS_ALIGNMENT = 8

_Chunks = Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def export(
    snapshot: Snapshot,
    folder: Path,
    file_format: ExportFormat,
    tables: list[str] | None = None,
    fields: list[str] | None = None,
    with_untouched: bool = False,
    progress: Progress = lambda _table, _rows: None,
) -> list[Path]:
    """Exports tables of a snapshot, rows in ascending order.

    Args:
        snapshot: open.
        folder: made if absent; one file `<table>.<format>` per table, with characters that do not belong in a name percent-encoded.
        file_format: "parquet": a column `row_id` and one per field, lists of fixed size where a field is wider than one;
            "safetensors": tensors `row_id` `[n]` int64 and one `[n, width]` per field.
        tables: by name; None: all.
        fields: of the record, e.g. only "weight"; None: all.
        with_untouched: also rows that have no record, with their initial values.
        progress: called with the table and how many of its rows are written.

    Returns:
        The files.

    Raises:
        ConfigError: an unknown format or field.
        StorageError: an unknown table, damage in the snapshot, or a failed write.
    """
    if file_format not in get_args(ExportFormat):
        raise ConfigError(f"export format {file_format!r}, expected {' or '.join(get_args(ExportFormat))}")
    chosen = [snapshot.table(name) for name in tables or [table.spec.name for table in snapshot.tables]]
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for table in chosen:
            narrowed = _narrowed(table, fields)
            path = folder / f"{quote(table.spec.name, safe=' ')}.{file_format}"
            partial = path.with_name(path.name + ".partial")
            num_rows = table.spec.num_rows if with_untouched else table.materialised_rows
            chunks = _told(snapshot.scan(table.spec.name, _rows_per_chunk(table), with_untouched), table.spec.name, progress)
            write = _write_parquet if file_format == "parquet" else _write_safetensors
            try:
                write(partial, narrowed, num_rows, chunks)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            files.append(path)
    except OSError as error:
        if isinstance(error, StorageIOError):
            raise
        raise StorageIOError(f"export to {folder} failed: {error}") from error
    return files


def _narrowed(table: StoredTable, fields: list[str] | None) -> StoredTable:
    if fields is None:
        return table
    known = {field.name for field in table.fields}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ConfigError(f"table {table.spec.name!r} has no field {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}")
    return StoredTable(
        table.spec, tuple(field for field in table.fields if field.name in fields), table.materialised_rows, table.index_bytes
    )


def _rows_per_chunk(table: StoredTable) -> int:
    return max(1, _CHUNK_BYTES // (BYTES_PER_ELEMENT * sum(field.width for field in table.fields)))


def _told(chunks: _Chunks, table: str, progress: Progress) -> _Chunks:
    num_rows = 0
    for rows, values in chunks:
        yield rows, values
        num_rows += rows.numel()
        progress(table, num_rows)


def _write_parquet(path: Path, table: StoredTable, _num_rows: int, chunks: _Chunks) -> None:
    columns = [pa.field("row_id", pa.int64(), nullable=False)]
    for field in table.fields:
        scalar = _ARROW_TYPES[field.dtype]
        columns.append(pa.field(field.name, scalar if field.width == 1 else pa.list_(scalar, field.width), nullable=False))
    schema = pa.schema(columns)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows, values in chunks:
            arrays = [pa.array(rows.numpy())]
            for field in table.fields:
                flat = pa.array(values[field.name].reshape(-1).numpy())
                arrays.append(flat if field.width == 1 else pa.FixedSizeListArray.from_arrays(flat, field.width))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _write_safetensors(path: Path, table: StoredTable, num_rows: int, chunks: _Chunks) -> None:
    """Each tensor has its own region, whose place follows from the number of rows; chunks are written into all of them."""
    widths = {"row_id": 8} | {field.name: field.width * BYTES_PER_ELEMENT for field in table.fields}
    header: dict[str, object] = {"__metadata__": {"format": "pt", "table": table.spec.name}}
    begins: dict[str, int] = {}
    end = 0
    for name, width in widths.items():
        begins[name], end = end, end + num_rows * width
        shape = [num_rows] if name == "row_id" else [num_rows, width // BYTES_PER_ELEMENT]
        dtype = "I64" if name == "row_id" else next(_SAFETENSORS_TYPES[field.dtype] for field in table.fields if field.name == name)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _SAFETENSORS_ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        data = file.tell()
        file.truncate(data + end)
        written = 0
        for rows, values in chunks:
            for name, tensor in (("row_id", rows), *((field.name, values[field.name]) for field in table.fields)):
                _write_at(file, data + begins[name] + written * widths[name], tensor)
            written += rows.numel()
    assert written == num_rows, f"{written} rows of {num_rows} in {path}"


def _write_at(file: IO[bytes], offset: int, tensor: torch.Tensor) -> None:
    file.seek(offset)
    file.write(tensor.contiguous().numpy().data.cast("B"))
