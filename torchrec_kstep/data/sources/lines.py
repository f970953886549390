"""Small text tables, read whole and checked line by line. Large logs are streamed by `delimited` instead."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.errors import DataError


def split_lines(
    path: Path,
    delimiter: str,
    num_columns: int,
    bad_lines: BadLines,
    *,
    header: Sequence[str] | None = None,
    parse: Callable[[list[str]], list[str]] = list,
    encoding: str = "utf-8",
) -> list[npt.NDArray[np.str_]]:
    """Reads a delimited text file into one array of texts per column. Blank lines are passed over.

    Args:
        path: the file.
        delimiter: separates the columns.
        num_columns: columns every line must have.
        bad_lines: is told of every malformed line.
        header: the first line, where there is one.
        parse: checks and rewrites the columns of a line; a `ValueError` says what is wrong with them.
        encoding: of the text.

    Returns:
        `[num_lines]` per column.

    Raises:
        DataError: the header differs, the text cannot be decoded, or a line is malformed.
    """
    try:
        lines = path.read_text(encoding=encoding).split("\n")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"cannot read {path} as {encoding} text: {error}") from error
    begin = 0
    if header is not None:
        if lines[0].split(delimiter) != list(header):
            raise DataError(f"{path}:1: expected the header {delimiter.join(header)!r}, got {lines[0]!r}")
        begin = 1
    rows = []
    for number, line in enumerate(lines[begin:], start=begin + 1):
        if not line.strip():
            continue
        fields = line.split(delimiter)
        try:
            if len(fields) != num_columns:
                raise ValueError(f"expected {num_columns} columns, got {len(fields)}")
            rows.append(parse(fields))
        except ValueError as error:
            bad_lines.add(path, number, str(error))
    return [np.array(column, dtype=np.str_) for column in zip(*rows, strict=True)] if rows else [np.empty(0, dtype=np.str_)] * num_columns


def require_numbers(*columns: int) -> Callable[[list[str]], list[str]]:
    """Makes a `parse` for `split_lines` that wants whole numbers in the given columns, counted from 0."""

    def parse(fields: list[str]) -> list[str]:
        for column in columns:
            text = fields[column]
            if not (text.isascii() and text.isdigit() and len(text) <= 18):
                raise ValueError(f"column {column + 1}: expected a whole number, got {text!r}")
        return fields

    return parse
