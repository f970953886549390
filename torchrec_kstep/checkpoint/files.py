"""Files of a checkpoint: safetensors written as a stream with its checksum, durable folders, names that cannot escape."""

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrec_kstep.errors import CheckpointError, DamagedCheckpointError

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS_DTYPES}
_FILE_NAME = re.compile(r"[a-z0-9_]{1,64}\.safetensors")
_READ_BYTES = 1 << 22
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what the header says, and how to get the values when their turn comes."""

    key: str
    dtype: torch.dtype
    size: torch.Size
    values: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.size.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FileInfo:
    """What the manifest remembers of a file."""

    num_bytes: int
    sha256: str


def write_safetensors(path: Path, entries: Iterable[Entry]) -> FileInfo:
    """Writes `entries` as a safetensors file and syncs it to the disk. A few megabytes are held on the host at a time.

    Raises:
        CheckpointError: a dtype that the format does not know, or the disk refused.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))  # keeps every tensor aligned
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with path.open("wb") as file:
            for data in _parts(ordered):
                file.write(data)
                digest.update(data)
                num_bytes += len(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}; free space or choose another run_dir, older checkpoints are intact"
        ) from error
    return FileInfo(num_bytes, digest.hexdigest())


def _parts(entries: list[Entry]) -> Iterator[bytes | memoryview]:
    """What the file consists of, in blocks of rows."""
    yield _header(entries)
    for entry in entries:
        values = entry.values().detach()
        assert values.dtype == entry.dtype
        assert values.size() == entry.size, f"{entry.key}: announced {entry.size}, got {values.size()}"
        for rows in row_blocks(entry.size, entry.dtype):
            block = values[rows] if values.ndim else values
            yield block.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data  # copied only where it lies elsewhere


def row_blocks(size: torch.Size, dtype: torch.dtype) -> Iterator[slice]:
    """Cuts the first dimension into parts of `BLOCK_BYTES` or one row: what is moved at a time. A scalar is one part."""
    num_rows = size[0] if size else 1
    row_bytes = max(size[1:].numel() * dtype.itemsize, 1) if size else 1
    step = max(BLOCK_BYTES // row_bytes, 1)
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def _header(entries: list[Entry]) -> bytes:
    header: dict[str, Any] = {}
    offset = 0
    for entry in entries:
        if entry.dtype not in _SAFETENSORS_DTYPES:
            raise CheckpointError(f"{entry.key}: cannot save dtype {entry.dtype}; known are {', '.join(DTYPES)}")
        header[entry.key] = {
            "dtype": _SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.size),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_text(path: Path, text: str) -> None:
    """Writes a small file and syncs it to the disk."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(path: Path) -> None:
    """Makes names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Removes a folder and what is in it; one that is not there is fine."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def check_file_name(name: str, manifest: Path) -> None:
    """Refuses names that do not stand for a file beside the manifest.

    Raises:
        CheckpointError: the name holds a separator, climbs out of the folder, or has another form than we write.
    """
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{manifest} names the file {name!r}: expected a plain name like 'rank_0000.safetensors'; it is not our manifest or was changed"
        )


def verify_file(path: Path, expected: FileInfo) -> None:
    """Compares a file with what the manifest remembers of it.

    Raises:
        DamagedCheckpointError: the file is missing, no regular file, of another length, or its checksum differs.
    """
    if path.is_symlink() or not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing or no regular file: expected {expected.num_bytes} bytes")
    num_bytes = path.stat().st_size
    if num_bytes != expected.num_bytes:
        raise DamagedCheckpointError(f"{path} has {num_bytes} bytes, expected {expected.num_bytes}: it was cut or changed")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    if digest.hexdigest() != expected.sha256:
        raise DamagedCheckpointError(
            f"{path} does not match its checksum: expected sha256 {expected.sha256[:16]}..., got {digest.hexdigest()[:16]}..."
        )
