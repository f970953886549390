"""Row groups decoded into numpy columns, each row group in an order of its own. Which order that is, is `order`'s business."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_kstep.data.collate import Bags
from torchrec_kstep.data.manifest import Manifest, SparseColumn, refuse_ids_outside
from torchrec_kstep.data.window_memory import WindowMemory
from torchrec_kstep.errors import DataError


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


class ColumnsDecoder:
    """Decodes row groups one by one into columns that hold all of them; different row groups by different threads.

    Args:
        row_groups: what to read, laid end to end.
        manifest: names and limits of the columns.
        memory: is where the columns lie, and is theirs until the caller passes it on.
    """

    def __init__(self, row_groups: Sequence[RowGroup], manifest: Manifest, memory: WindowMemory) -> None:
        """Decodes nothing yet, see the class."""
        self._row_groups = row_groups
        self._manifest = manifest
        self._begins = [0, *itertools.accumulate(group.num_rows for group in row_groups)]
        self._label, self._dense, self._single = memory.columns(self._begins[-1])
        self._bags: list[list[Bags]] = [[] for _ in row_groups]

    def decode(self, place: int, permutation: npt.NDArray[np.int64] | None) -> None:
        """Decodes one row group; every one must be decoded once.

        Args:
            place: which one, an index into `row_groups`.
            permutation: indices into the row group; None = it keeps its order.

        Raises:
            DataError: the file cannot be read, a value is missing or not finite, an id is outside its table; names the place.
        """
        group = self._row_groups[place]
        where = f"{group.path}, row group {group.index}"
        table = _read(group, self._manifest, where)
        stretch = slice(self._begins[place], self._begins[place + 1])
        _permute(_numbers(table, "label", where), permutation, self._label[stretch])
        for dense_column, out in zip(self._manifest.dense, self._dense, strict=True):
            values = _numbers(table, dense_column.name, where)
            _refuse_bad_numbers(dense_column.name, values, where)
            _permute(values, permutation, out[stretch])
        singles = iter(self._single)
        for column in self._manifest.sparse:
            if column.is_bag:
                bags = _lists(table, column.name, where)
                _refuse_bad_ids(column, bags.ids, where)
                self._bags[place].append(bags.take(np.arange(group.num_rows) if permutation is None else permutation))
            else:
                values = _numbers(table, column.name, where)
                _refuse_bad_ids(column, values, where)
                _permute(values, permutation, next(singles)[stretch])

    def finish(self) -> Columns:
        """Returns the columns, once all row groups are decoded."""
        names = [column.name for column in self._manifest.sparse if column.is_bag]
        bags = {name: BagColumn.join([group[index] for group in self._bags]) for index, name in enumerate(names)}
        return Columns(self._dense, self._label, self._single, bags)


def _permute(values: npt.NDArray[Any], permutation: npt.NDArray[np.int64] | None, out: npt.NDArray[Any]) -> None:
    if permutation is None:
        out[:] = values
    elif values.dtype == out.dtype:
        values.take(permutation, out=out, mode="clip")  # any other mode makes numpy go through a buffer; nothing is ever clipped
    else:
        out[:] = values.take(permutation)


def _refuse_bad_numbers(name: str, values: npt.NDArray[np.floating], where: str) -> None:
    # Both extremes are NaN where any value is, and finding them costs half of looking at each value.
    if len(values) and not np.isfinite([values.min(), values.max()]).all():
        raise DataError(f"dense column {name} holds NaN or an infinity ({where}): prepare the set again")


def _refuse_bad_ids(column: SparseColumn, ids: npt.NDArray[np.integer], where: str) -> None:
    if len(ids):
        refuse_ids_outside(column.name, int(ids.min()), int(ids.max()), column.num_rows, where)


def _read(group: RowGroup, manifest: Manifest, where: str) -> Any:
    names = ["label", *(column.name for column in manifest.dense), *(column.name for column in manifest.sparse)]
    try:
        with pq.ParquetFile(group.path, memory_map=True) as file:
            # Arrow's own threads would take more time to pass the columns around than they save.
            table = file.read_row_group(group.index, columns=names, use_threads=False)
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
