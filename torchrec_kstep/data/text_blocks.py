"""Cuts log files into blocks of whole lines, in bounded memory. Gzip files (`.gz`) are unpacked on the way."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from torchrec_kstep.errors import DataError
from torchrec_kstep.units import MIB, format_bytes

BLOCK_BYTES = 16 * MIB  # some 70 thousand lines: large enough for arrays to pay, small enough for several in memory


@dataclass(frozen=True)
class TextBlock:
    """Whole lines of one file.

    Attributes:
        path: the file.
        is_first: whether the file begins with it; where it had a header, that is left out of `text`.
        text: the lines, each with its end, but for the last one of a file.
    """

    path: Path
    is_first: bool
    text: memoryview


def text_blocks(files: Sequence[Path], header: bytes | None = None, block_bytes: int = BLOCK_BYTES) -> Iterator[TextBlock]:
    """Yields the lines of all files in order.

    Args:
        files: log files, plain or gzip.
        header: the first line of every file, checked and passed over; None = files have none.
        block_bytes: about the size of a block; a longer line is refused.

    Raises:
        DataError: a file cannot be read or unpacked, has another header or a line without end.
    """
    for path in files:
        try:
            with cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
                yield from _blocks_of_file(path, file, header, block_bytes)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {path}: {error}") from error


def _blocks_of_file(path: Path, file: BinaryIO, header: bytes | None, block_bytes: int) -> Iterator[TextBlock]:
    is_first, rest = True, memoryview(b"")
    while True:
        buffer = bytearray(len(rest) + block_bytes)
        buffer[: len(rest)] = rest
        num_bytes = len(rest) + file.readinto(memoryview(buffer)[len(rest) :])  # type: ignore[attr-defined]
        if num_bytes == len(rest):
            break
        end = buffer.rfind(b"\n", len(rest), num_bytes) + 1
        if end:
            yield _without_header(TextBlock(path, is_first, memoryview(buffer)[:end]), header)
            is_first = False
        elif num_bytes > 2 * block_bytes:
            raise DataError(f"{path}: no line end within {format_bytes(num_bytes)}: this is no text log")
        rest = memoryview(buffer)[end:num_bytes]
    if rest or (header is not None and is_first):
        yield _without_header(TextBlock(path, is_first, rest), header)


def _without_header(block: TextBlock, header: bytes | None) -> TextBlock:
    if header is None or not block.is_first:
        return block
    first, end, _ = bytes(block.text[: len(header) + 200]).partition(b"\n")
    if first.rstrip(b"\r") != header:
        raise DataError(f"{block.path}:1: expected the header {header.decode()!r}, got {first[:200].decode(errors='replace')!r}")
    return TextBlock(block.path, True, block.text[len(first) + len(end) :])
