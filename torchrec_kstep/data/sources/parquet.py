"""Raw tables in Parquet: columns of known types, or an error that names file and column."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_kstep.errors import DataError


def read_table(path: Path, types: Mapping[str, Any]) -> Any:
    """Reads columns as the Arrow types asked for.

    Args:
        path: the file.
        types: column -> type. Columns of text may hold empty values; numbers may hold neither those nor NaN.

    Raises:
        DataError: the file cannot be read, lacks a column, or a column holds something else.
    """
    try:
        present = pq.read_schema(path).names
        if missing := [name for name in types if name not in present]:
            raise DataError(
                f"{path} lacks the columns {', '.join(missing)}: expected {', '.join(types)}, it has {', '.join(present[:50]) or 'none'}"
            )
        table = pq.read_table(path, columns=list(types))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read columns {', '.join(types)} of {path}: {error}") from error
    columns = [_typed(table.column(name), kind, f"{path}, column {name}") for name, kind in types.items()]
    return pa.table(dict(zip(types, columns, strict=True)))


def _typed(column: Any, kind: Any, where: str) -> Any:
    if not pa.types.is_large_string(kind):
        empty = pc.is_null(column, nan_is_null=True)
        if (num_empty := pc.sum(empty).as_py() or 0) > 0:
            raise DataError(
                f"{where}: expected a number in every row, got {num_empty} empty or NaN, first in row {pc.index(empty, True).as_py()}"
            )
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise DataError(f"{where}: expected {kind}, got {column.type}: {error}") from error
