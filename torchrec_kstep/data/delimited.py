"""Parses blocks of delimited text into raw columns with Arrow, and finds the lines at fault where Arrow refuses a block.

The fast path sees whole blocks and only learns that something in one is wrong. Such a block is searched by halving, through
the same parser, so fast path and search can never disagree about what is malformed.
"""

import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from torchrec_kstep.data.background import map_ahead
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import MISSING_CODE, Coded, RawBlock
from torchrec_kstep.data.text_blocks import BLOCK_BYTES, TextBlock, text_blocks

Kind = Literal["label", "integer", "hex", "category", "hour", "skipped"]
"""`label` 0 or 1; `integer` a numeric column; `hex` a category of 1 to 8 hexadecimal digits; `category` one of whole numbers;
`hour` the category YYMMDDHH, never missing."""

_ARROW_TYPES = {
    "label": pa.int8(),
    "integer": pa.int64(),
    "hex": pa.dictionary(pa.int32(), pa.binary()),
    "category": pa.dictionary(pa.int32(), pa.int64()),
    "hour": pa.dictionary(pa.int32(), pa.int64()),
}
_HEX_DIGITS = b"0123456789abcdefABCDEF"
_NO_DIGIT = 255
_VALUE_OF_DIGIT = np.full(256, _NO_DIGIT, dtype=np.uint8)
_VALUE_OF_DIGIT[list(_HEX_DIGITS)] = [int(chr(digit), 16) for digit in _HEX_DIGITS]


class _MalformedError(ValueError):
    """Something in a block is wrong; the search says which line."""


@dataclass(frozen=True)
class TextFormat:
    """Columns of a log in order, and what separates them."""

    columns: tuple[tuple[str, Kind], ...]
    delimiter: str
    has_header: bool

    @property
    def header(self) -> bytes | None:
        """The line that every file begins with, if there is one."""
        return self.delimiter.join(name for name, _ in self.columns).encode() if self.has_header else None

    def names(self, *kinds: Kind) -> tuple[str, ...]:
        """Names of the columns of these kinds, in order."""
        return tuple(name for name, kind in self.columns if kind in kinds)


def read_delimited(
    files: Sequence[Path], text_format: TextFormat, bad_lines: BadLines, max_bad_lines: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[RawBlock]:
    """Reads log files in order, parsing several blocks at a time. Blank lines are passed over; CRLF ends a line like LF.

    Args:
        files: the logs, plain or gzip.
        text_format: their columns.
        bad_lines: is told of every malformed line.
        max_bad_lines: its budget; the search of a block ends behind it.
        block_bytes: text per block.

    Returns:
        Blocks without a split; dense and sparse columns in the order of the format.
    """

    def parse(block: TextBlock) -> _Parsed:
        num_lines = int(np.count_nonzero(np.frombuffer(block.text, dtype=np.uint8) == ord("\n")))
        try:
            return _Parsed(block.path, block.is_first, num_lines, _parse(block.text, text_format), [])
        except (pa.ArrowInvalid, _MalformedError):
            good, bad = _search(bytes(block.text), text_format, max_bad_lines)
            rows = _parse(good, text_format) if len(bad) <= max_bad_lines else None
            return _Parsed(block.path, block.is_first, num_lines, rows, bad)

    first_line = 1
    for parsed in map_ahead(parse, text_blocks(files, text_format.header, block_bytes), os.cpu_count() or 2):
        if parsed.is_first:
            first_line = 2 if text_format.has_header else 1
        for index, reason in parsed.bad:
            bad_lines.add(parsed.path, first_line + index, reason)
        first_line += parsed.num_lines
        if parsed.rows is not None and parsed.rows.num_rows:
            yield parsed.rows


@dataclass(frozen=True)
class _Parsed:
    """What became of a block; `bad` holds indices of lines in it and their faults, `rows` is None where there are too many."""

    path: Path
    is_first: bool
    num_lines: int
    rows: RawBlock | None
    bad: list[tuple[int, str]]


def _parse(text: bytes | memoryview, text_format: TextFormat) -> RawBlock:
    """Parses whole lines.

    Raises:
        pa.ArrowInvalid, _MalformedError: a line is malformed.
    """
    if not bytes(text[:64]).strip(b"\r\n") and not bytes(text).strip(b"\r\n"):
        return RawBlock(np.empty(0, dtype=np.uint8), None, [], [])
    table = pyarrow.csv.read_csv(
        pa.BufferReader(text),
        # One block, so that every column has one dictionary; block_size is a 32-bit number of bytes.
        pyarrow.csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=[name for name, _ in text_format.columns]),
        pyarrow.csv.ParseOptions(delimiter=text_format.delimiter, quote_char=False, ignore_empty_lines=True),
        pyarrow.csv.ConvertOptions(
            column_types={name: _ARROW_TYPES[kind] for name, kind in text_format.columns if kind != "skipped"},
            include_columns=[name for name, kind in text_format.columns if kind != "skipped"],
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    label = np.empty(0, dtype=np.uint8)
    dense: list[npt.NDArray[np.floating]] = []
    sparse: list[Coded] = []
    for name, kind in text_format.columns:
        if kind == "label":
            label = _label(table.column(name).combine_chunks())
        elif kind == "integer":
            dense.append(pc.cast(table.column(name), pa.float32(), safe=False).combine_chunks().to_numpy(zero_copy_only=False))
        elif kind != "skipped":
            sparse.append(_coded(table.column(name).combine_chunks(), kind))
    return RawBlock(label, None, dense, sparse)


def _label(column: Any) -> npt.NDArray[np.uint8]:
    if column.null_count:
        raise _MalformedError("empty label")
    label: npt.NDArray[np.uint8] = column.to_numpy().view(np.uint8)
    if label.max(initial=0) > 1:
        raise _MalformedError("label is neither 0 nor 1")
    return label


def _coded(column: Any, kind: Kind) -> Coded:
    codes = column.indices.fill_null(MISSING_CODE).to_numpy()
    if kind == "hex":
        return Coded(codes, _hex_values(column.dictionary))
    values = column.dictionary.to_numpy()
    if kind == "hour":
        if column.null_count:
            raise _MalformedError("empty hour")
        _check_hours(values)
    return Coded(codes, values)


def _check_hours(values: npt.NDArray[np.int64]) -> None:
    for value in values.tolist():
        try:
            datetime.datetime.strptime(f"{value:08d}", "%y%m%d%H")
        except ValueError:
            raise _MalformedError("no hour") from None


def _hex_values(texts: Any) -> npt.NDArray[np.uint32]:
    """Reads 1 to 8 hexadecimal digits as a number, for every text of a binary array."""
    _, offset_buffer, text_buffer = texts.buffers()
    if not len(texts):
        return np.empty(0, dtype=np.uint32)
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    lengths = np.diff(offsets)
    if lengths.min() < 1 or lengths.max() > 8:
        raise _MalformedError("not 1 to 8 hexadecimal digits")
    digits = _VALUE_OF_DIGIT[np.frombuffer(text_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]]
    if digits.max() == _NO_DIGIT:
        raise _MalformedError("no hexadecimal digit")
    if lengths.min() < 8:
        padded = np.zeros((len(texts), 8), dtype=np.uint8)
        padded[np.arange(8) >= 8 - lengths[:, None]] = digits
        digits = padded.reshape(-1)
    # Eight digits stand in the bytes of a 64-bit number, the first one lowest. Joining neighbours three times leaves all
    # of them side by side.
    packed = digits.view("<u8").astype(np.uint64)
    packed = (packed << np.uint64(4) | packed >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    packed = (packed << np.uint64(8) | packed >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    packed = (packed << np.uint64(16) | packed >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
    return packed.astype(np.uint32)


def _search(text: bytes, text_format: TextFormat, max_bad_lines: int) -> tuple[bytes, list[tuple[int, str]]]:
    """Finds the malformed lines of a block, the first `max_bad_lines + 1` of them.

    Returns:
        The text of the other lines, and index and fault of each malformed one.
    """
    lines = text.split(b"\n")
    num_delimiters = len(text_format.columns) - 1
    delimiter = text_format.delimiter.encode()
    suspects: list[int] = []
    bad: set[int] = set()
    for index, line in enumerate(lines):
        if not line.rstrip(b"\r"):
            continue
        if line.count(delimiter) == num_delimiters:
            suspects.append(index)
        else:
            bad.add(index)
    bad.update(_halve(lines, suspects, text_format, max_bad_lines + 1))
    found = sorted(bad)[: max_bad_lines + 1]
    good = b"\n".join(line for index, line in enumerate(lines) if index not in bad)
    return good, [(index, _fault(lines[index].rstrip(b"\r"), text_format)) for index in found]


def _halve(lines: Sequence[bytes], suspects: Sequence[int], text_format: TextFormat, num_wanted: int) -> list[int]:
    """Returns the first `num_wanted` of the suspected lines that do not parse."""
    if not suspects or num_wanted <= 0:
        return []
    try:
        _parse(b"\n".join(lines[index] for index in suspects), text_format)
    except (pa.ArrowInvalid, _MalformedError):
        if len(suspects) == 1:
            return list(suspects)
        half = len(suspects) // 2
        left = _halve(lines, suspects[:half], text_format, num_wanted)
        return left + _halve(lines, suspects[half:], text_format, num_wanted - len(left))
    return []


def _fault(line: bytes, text_format: TextFormat) -> str:
    """Says for people what is wrong with a line that does not parse."""
    fields = line.split(text_format.delimiter.encode())
    if len(fields) != len(text_format.columns):
        return f"expected {len(text_format.columns)} columns, got {len(fields)}{_hint(line, fields, text_format)}"
    for number, ((name, kind), field) in enumerate(zip(text_format.columns, fields, strict=True), start=1):
        alone = TextFormat((("label", "label"), (name, kind)) if kind != "label" else (("label", kind),), text_format.delimiter, False)
        if kind == "skipped":
            continue
        try:
            _parse(field if kind == "label" and field else b"0" + text_format.delimiter.encode() + field, alone)
            if kind == "label" and not field:
                raise _MalformedError
        except (pa.ArrowInvalid, _MalformedError):
            return f"column {number} ({name}): expected {_EXPECTED[kind]}, got {field[:60].decode(errors='replace')!r}"
    return f"cannot be parsed: {line[:200].decode(errors='replace')!r}"


_EXPECTED = {
    "label": "0 or 1",
    "integer": "a whole number of at most 64 bits, or nothing",
    "hex": "1 to 8 hexadecimal digits, or nothing",
    "category": "a whole number of at most 64 bits, or nothing",
    "hour": "YYMMDDHH",
}


def _hint(line: bytes, fields: Sequence[bytes], text_format: TextFormat) -> str:
    others = {"\t": "tabs", ",": "commas"}
    for delimiter, name in others.items():
        if delimiter != text_format.delimiter and line.count(delimiter.encode()) >= len(text_format.columns) - 2:
            return f" separated by {others[text_format.delimiter]}; the line is separated by {name}"
    if len(fields) == len(text_format.columns) - 1 and text_format.columns[0][1] == "label":
        return "; is this a test file without labels?"
    return ""
