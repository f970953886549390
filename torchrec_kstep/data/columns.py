"""Row groups decoded into numpy columns, and batches gathered out of them. Which rows, and in which order, is `order`'s business."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_kstep.data.collate import Bags, pad_batch
from torchrec_kstep.data.manifest import Manifest, refuse_ids_outside
from torchrec_kstep.errors import DataError
from torchrec_kstep.types import Batch, FeatureSchema


@dataclass(frozen=True)
class RowGroup:
    """A row group of a Parquet file; `num_rows` is smaller than in the file where a limit cuts it off."""

    path: Path
    index: int
    num_rows: int


@dataclass(frozen=True)
class Columns:
    """Decoded rows, column by column.

    Attributes:
        dense: `[num_rows, num_dense]` float32.
        label: `[num_rows]` float32.
        ids: one array per sparse feature, int32 or int64 as in the file.
        offsets: `[num_rows + 1]` int64 per feature with bags: the bag of row i is `ids[offsets[i] : offsets[i + 1]]`; None for a
            feature with exactly one id a row.
    """

    dense: npt.NDArray[np.float32]
    label: npt.NDArray[np.float32]
    ids: list[npt.NDArray[np.integer]]
    offsets: list[npt.NDArray[np.int64] | None]

    def take_bags(self, feature: int, rows: npt.NDArray[np.int64]) -> Bags:
        """Gathers the bags of one feature."""
        offsets = self.offsets[feature]
        if offsets is None:
            return Bags(self.ids[feature][rows])
        begins = offsets[rows]
        lengths = offsets[rows + 1] - begins
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        return Bags(self.ids[feature][np.repeat(begins, lengths) + within], lengths)


def decode(row_groups: Sequence[RowGroup], manifest: Manifest) -> Columns:
    """Reads row groups and lays them end to end.

    Raises:
        DataError: a file cannot be read, a value is missing or not finite, an id is outside its table; names the place.
    """
    num_rows = sum(group.num_rows for group in row_groups)
    dense = np.empty((num_rows, len(manifest.dense)), dtype=np.float32)
    label = np.empty(num_rows, dtype=np.float32)
    ids: list[list[npt.NDArray[np.integer]]] = [[] for _ in manifest.sparse]
    lengths: list[list[npt.NDArray[np.int64]]] = [[] for _ in manifest.sparse]
    begin = 0
    for group in row_groups:
        where = f"{group.path}, row group {group.index}"
        table = _read(group, manifest, where)
        end = begin + group.num_rows
        label[begin:end] = _numbers(table, "label", where)
        for index, dense_column in enumerate(manifest.dense):
            values = _numbers(table, dense_column.name, where)
            if not np.isfinite(values).all():
                raise DataError(f"dense column {dense_column.name} holds NaN or an infinity ({where}): prepare the set again")
            dense[begin:end, index] = values
        for index, column in enumerate(manifest.sparse):
            if column.is_bag:
                values, bag_lengths = _lists(table, column.name, where)
                lengths[index].append(bag_lengths)
            else:
                values = _numbers(table, column.name, where)
            if len(values):
                refuse_ids_outside(column.name, int(values.min()), int(values.max()), column.num_rows, where)
            ids[index].append(values)
        begin = end
    return Columns(
        dense=dense,
        label=label,
        ids=[np.concatenate(pieces) if len(pieces) > 1 else pieces[0] for pieces in ids],
        offsets=[np.concatenate([[0], np.cumsum(np.concatenate(pieces))]) if pieces else None for pieces in lengths],
    )


@dataclass(frozen=True)
class OwnRows:
    """The rows of this rank in one window: indices into `columns`, in the order in which they come."""

    columns: Columns
    rows: npt.NDArray[np.int64]


class RowCursor:
    """Walks over the rows of successive windows; a batch may begin in one window and end in the next."""

    def __init__(self, windows: Generator[OwnRows, None, None]) -> None:
        """Starts before the first row of the first window."""
        self._windows = windows
        self._current: OwnRows | None = None
        self._position = 0

    def next_rows(self, num_rows: int) -> list[OwnRows]:
        """Returns the next `num_rows` rows, in one piece per window that they touch."""
        pieces = []
        while num_rows:
            if self._current is None or self._position == len(self._current.rows):
                self._current = None  # frees the window before the next one arrives
                self._current, self._position = next(self._windows), 0
            rows = self._current.rows[self._position : self._position + num_rows]
            pieces.append(OwnRows(self._current.columns, rows))
            self._position += len(rows)
            num_rows -= len(rows)
        return pieces

    def close(self) -> None:
        """Ends the source of windows and its thread."""
        self._windows.close()


def gather(pieces: Sequence[OwnRows], schema: FeatureSchema, num_padded_rows: int, num_global_rows: int) -> Batch:
    """Makes the batch that holds the rows of `pieces` in turn, then padding rows."""
    bags = [_join_bags([piece.columns.take_bags(index, piece.rows) for piece in pieces]) for index in range(len(schema.sparse))]
    dense = [piece.columns.dense[piece.rows] for piece in pieces] or [np.empty((0, schema.num_dense), dtype=np.float32)]
    label = [piece.columns.label[piece.rows] for piece in pieces] or [np.empty(0, dtype=np.float32)]
    return pad_batch(schema, np.concatenate(dense), bags, np.concatenate(label), num_padded_rows, num_global_rows)


def _join_bags(pieces: Sequence[Bags]) -> Bags:
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return Bags(np.empty(0, dtype=np.int64))
    lengths = None if pieces[0].lengths is None else np.concatenate([piece.lengths for piece in pieces if piece.lengths is not None])
    return Bags(np.concatenate([piece.ids for piece in pieces]), lengths)


def _read(group: RowGroup, manifest: Manifest, where: str) -> Any:
    names = ["label", *(column.name for column in manifest.dense), *(column.name for column in manifest.sparse)]
    try:
        with pq.ParquetFile(group.path, memory_map=True) as file:
            table = file.read_row_group(group.index, columns=names)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {where}: {error}; prepare the set again") from error
    if table.num_rows < group.num_rows:
        raise DataError(f"{where} has {table.num_rows} rows, the manifest says at least {group.num_rows}: prepare the set again")
    return table.slice(0, group.num_rows).combine_chunks()


def _numbers(table: Any, name: str, where: str) -> npt.NDArray[Any]:
    column = table.column(name)
    if column.null_count:
        raise DataError(f"column {name} has {column.null_count} empty values ({where}): prepared columns have none; prepare the set again")
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def _lists(table: Any, name: str, where: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    column = table.column(name).chunk(0) if table.num_rows else pa.array([], type=table.schema.field(name).type)
    if column.null_count or column.flatten().null_count:
        raise DataError(f"column {name} has empty values ({where}): prepared columns have none; prepare the set again")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(), np.diff(offsets)
