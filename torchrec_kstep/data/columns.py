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
from torchrec_kstep.data.manifest import Manifest, SparseColumn, refuse_ids_outside
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
        dense: `[num_dense, num_rows]` float32.
        label: `[num_rows]` float32.
        single: `[num_single, num_rows]` int32 or int64: the features with exactly one id a row, in schema order.
        bags: the other features, by name.
    """

    dense: npt.NDArray[np.float32]
    label: npt.NDArray[np.float32]
    single: npt.NDArray[np.integer]
    bags: dict[str, "BagColumn"]


@dataclass(frozen=True)
class BagColumn:
    """A feature whose rows hold bags: that of row i is `ids[offsets[i] : offsets[i + 1]]`; offsets are `[num_rows + 1]` int64."""

    ids: npt.NDArray[np.integer]
    offsets: npt.NDArray[np.int64]

    def take(self, rows: npt.NDArray[np.int64]) -> Bags:
        """Gathers the bags of some rows."""
        begins = self.offsets[rows]
        lengths = self.offsets[rows + 1] - begins
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        return Bags(self.ids[np.repeat(begins, lengths) + within], lengths)

    @classmethod
    def join(cls, pieces: Sequence[Bags]) -> "BagColumn":
        """Lays bags end to end."""
        lengths = np.concatenate([piece.lengths for piece in pieces if piece.lengths is not None])
        return cls(np.concatenate([piece.ids for piece in pieces]), np.concatenate([[0], np.cumsum(lengths)]))


def decode(row_groups: Sequence[RowGroup], permutations: Sequence[npt.NDArray[np.int64] | None], manifest: Manifest) -> Columns:
    """Reads row groups, permutes each, and lays them end to end.

    Args:
        row_groups: what to read.
        permutations: indices into each row group; None = it keeps its order.
        manifest: names and limits of the columns.

    Raises:
        DataError: a file cannot be read, a value is missing or not finite, an id is outside its table; names the place.
    """
    num_rows = sum(group.num_rows for group in row_groups)
    single_columns = [column for column in manifest.sparse if not column.is_bag]
    bag_columns = [column for column in manifest.sparse if column.is_bag]
    has_large_ids = any(column.num_rows > np.iinfo(np.int32).max for column in single_columns)
    label = np.empty(num_rows, dtype=np.float32)
    dense = np.empty((len(manifest.dense), num_rows), dtype=np.float32)
    single = np.empty((len(single_columns), num_rows), dtype=np.int64 if has_large_ids else np.int32)
    bags: dict[str, list[Bags]] = {column.name: [] for column in bag_columns}
    end = 0
    for group, permutation in zip(row_groups, permutations, strict=True):
        begin, end = end, end + group.num_rows
        where = f"{group.path}, row group {group.index}"
        table = _read(group, manifest, where)
        _permute(_numbers(table, "label", where), permutation, label[begin:end])
        for index, dense_column in enumerate(manifest.dense):
            values = _numbers(table, dense_column.name, where)
            if not np.isfinite(values).all():
                raise DataError(f"dense column {dense_column.name} holds NaN or an infinity ({where}): prepare the set again")
            _permute(values, permutation, dense[index, begin:end])
        for index, column in enumerate(single_columns):
            values = _numbers(table, column.name, where)
            _refuse_bad_ids(column, values, where)
            _permute(values, permutation, single[index, begin:end])
        for column in bag_columns:
            bag_column = _lists(table, column.name, where)
            _refuse_bad_ids(column, bag_column.ids, where)
            rows = np.arange(group.num_rows) if permutation is None else permutation
            bags[column.name].append(bag_column.take(rows))
    return Columns(dense, label, single, {name: BagColumn.join(pieces) for name, pieces in bags.items()})


def _permute(values: npt.NDArray[Any], permutation: npt.NDArray[np.int64] | None, out: npt.NDArray[Any]) -> None:
    if permutation is None:
        out[:] = values
    elif values.dtype == out.dtype:
        values.take(permutation, out=out, mode="clip")  # any other mode makes numpy go through a buffer; nothing is ever clipped
    else:
        out[:] = values.take(permutation)


def _refuse_bad_ids(column: SparseColumn, ids: npt.NDArray[np.integer], where: str) -> None:
    if len(ids):
        refuse_ids_outside(column.name, int(ids.min()), int(ids.max()), column.num_rows, where)


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
    if not pieces:
        no_bags = [Bags(np.empty(0, dtype=np.int64))] * len(schema.sparse)
        no_dense = np.empty((0, schema.num_dense), dtype=np.float32)
        return pad_batch(schema, no_dense, no_bags, np.empty(0, dtype=np.float32), num_padded_rows, num_global_rows)
    single = _join([piece.columns.single.take(piece.rows, axis=1) for piece in pieces], axis=1)
    bags = {name: _join_bags([piece.columns.bags[name].take(piece.rows) for piece in pieces]) for name in pieces[0].columns.bags}
    next_single = iter(single)
    in_order = [bags[name] if name in bags else Bags(next(next_single)) for name in schema.sparse_names]
    dense = _join([piece.columns.dense.take(piece.rows, axis=1) for piece in pieces], axis=1)
    label = _join([piece.columns.label.take(piece.rows) for piece in pieces])
    return pad_batch(schema, np.ascontiguousarray(dense.T), in_order, label, num_padded_rows, num_global_rows)


def _join(pieces: Sequence[npt.NDArray[Any]], axis: int = 0) -> npt.NDArray[Any]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=axis)


def _join_bags(pieces: Sequence[Bags]) -> Bags:
    if len(pieces) == 1:
        return pieces[0]
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


def _lists(table: Any, name: str, where: str) -> BagColumn:
    column = table.column(name).chunk(0) if table.num_rows else pa.array([], type=table.schema.field(name).type)
    if column.null_count or column.flatten().null_count:
        raise DataError(f"column {name} has empty values ({where}): prepared columns have none; prepare the set again")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return BagColumn(column.flatten().to_numpy(), offsets - offsets[0])
