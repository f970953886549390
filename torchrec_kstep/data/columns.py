"""Row groups decoded into numpy columns, each row group in an order of its own. Which order that is, is `order`'s business."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_kstep.data.collate import Bags
from torchrec_kstep.data.manifest import Manifest, SparseColumn, has_checksums, refuse_ids_outside
from torchrec_kstep.data.open_files import OpenFiles
from torchrec_kstep.data.window_memory import WindowMemory
from torchrec_kstep.errors import DataError

# So few that they are still in the processor's cache when they are permuted.
_COLUMNS_AT_ONCE = 4


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
        numbers: `[1 + num_dense, num_rows]` float32: the label, then the dense columns.
        ids: `[num_single, num_rows]` int32 or int64: the features with exactly one id a row, in schema order.
        bags: the other features, by name.
    """

    numbers: npt.NDArray[np.float32]
    ids: npt.NDArray[np.integer]
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
        files: lends the files.
        verified: row groups whose checksums were verified before: they are not verified again. Those read now are added.
    """

    def __init__(
        self, row_groups: Sequence[RowGroup], manifest: Manifest, memory: WindowMemory, files: OpenFiles, verified: set[RowGroup]
    ) -> None:
        """Decodes nothing yet, see the class."""
        self._files = files
        self._verified = verified
        self._row_groups = row_groups
        self._manifest = manifest
        self._begins = [0, *itertools.accumulate(group.num_rows for group in row_groups)]
        self._numbers, self._ids = memory.columns(self._begins[-1])
        self._bags: list[list[Bags]] = [[] for _ in row_groups]

    def decode(self, place: int, permutation: npt.NDArray[np.int64] | None) -> None:
        """Decodes one row group; every one must be decoded once.

        Args:
            place: which one, an index into `row_groups`.
            permutation: indices into the row group; None = it keeps its order.

        Raises:
            DataError: the file cannot be read, bytes differ from their checksum, a value is missing or not finite, an id is outside
                its table; names the place.
        """
        group = self._row_groups[place]
        where = f"{group.path}, row group {group.index}"
        stretch = slice(self._begins[place], self._begins[place + 1])
        names = ["label", *(column.name for column in self._manifest.dense), *(column.name for column in self._manifest.sparse)]
        out_of_numbers, out_of_ids = iter(self._numbers), iter(self._ids)
        sparse = {column.name: column for column in self._manifest.sparse}
        for name, values, is_known in self._read(group, names, where):
            column = sparse.get(name)
            if column is None:
                numbers = _numbers(values, name, where)
                if name != "label" and not is_known:
                    _refuse_bad_numbers(name, numbers, where)
                _permute(numbers, permutation, next(out_of_numbers)[stretch])
            elif column.is_bag:
                bags = _lists(values, name, where)
                if not is_known:
                    _refuse_bad_ids(column, bags.ids, where)
                self._bags[place].append(bags.take(np.arange(group.num_rows) if permutation is None else permutation))
            else:
                ids = _numbers(values, name, where)
                if not is_known:
                    _refuse_bad_ids(column, ids, where)
                _permute(ids, permutation, next(out_of_ids)[stretch])

    def finish(self) -> Columns:
        """Returns the columns, once all row groups are decoded."""
        names = [column.name for column in self._manifest.sparse if column.is_bag]
        bags = {name: BagColumn.join([group[index] for group in self._bags]) for index, name in enumerate(names)}
        return Columns(self._numbers, self._ids, bags)

    def _read(self, group: RowGroup, names: Sequence[str], where: str) -> Iterator[tuple[str, Any, bool]]:
        """Yields name and values of every column, and whether they are known to be right: checked when written, unchanged since."""
        try:
            with self._files.lend(group.path, with_checksums=group not in self._verified) as file:
                is_known = has_checksums(file.metadata)
                for begin in range(0, len(names), _COLUMNS_AT_ONCE):
                    # Arrow's own threads would take more time to pass the columns around than they save.
                    few = names[begin : begin + _COLUMNS_AT_ONCE]
                    table = file.read_row_group(group.index, columns=few, use_threads=False)
                    if table.num_rows < group.num_rows:
                        raise DataError(
                            f"{where} has {table.num_rows} rows, the manifest says at least {group.num_rows}: prepare the set again"
                        )
                    table = table.slice(0, group.num_rows).combine_chunks()
                    for name in few:
                        yield name, table.column(name), is_known
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"cannot read {where}{_damaged_columns(group, names)}: {error}; prepare the set again") from error
        if is_known:
            self._verified.add(group)


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


def _damaged_columns(group: RowGroup, names: Sequence[str]) -> str:
    """Says which columns of a row group cannot be read, where it is not the file as a whole."""
    damaged = []
    try:
        with pq.ParquetFile(group.path, page_checksum_verification=True) as file:
            for name in names:
                try:
                    file.read_row_group(group.index, columns=[name], use_threads=False)
                except (OSError, pa.ArrowException):
                    damaged.append(name)
    except (OSError, pa.ArrowException):
        return ""
    return f", column {', '.join(damaged)}" if damaged else ""


def _numbers(column: Any, name: str, where: str) -> npt.NDArray[Any]:
    if column.null_count:
        raise DataError(f"column {name} has {column.null_count} empty values ({where}): prepared columns have none; prepare the set again")
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def _lists(chunked: Any, name: str, where: str) -> BagColumn:
    column = chunked.chunk(0) if len(chunked) else pa.array([], type=chunked.type)
    if column.null_count or column.flatten().null_count:
        raise DataError(f"column {name} has empty values ({where}): prepared columns have none; prepare the set again")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return BagColumn(column.flatten().to_numpy(), offsets - offsets[0])
