"""Keeps raw blocks on disk between the pass that counts values and the pass that encodes them. Read by the process that wrote it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.blocks import Coded, RawBlock


class Spool:
    """An append-only file of raw blocks; codes take the smallest integer type that holds them."""

    def __init__(self, path: Path) -> None:
        """Creates the file."""
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._num_blocks = 0

    def append(self, block: RawBlock) -> None:
        """Writes a block whose rows have a split."""
        assert block.split is not None
        self._write(block.label)
        self._write(block.split)
        for column in block.dense:
            self._write(column.astype(np.float32))
        for coded in block.sparse:
            self._write(_narrow(coded.codes, len(coded.values)))
            self._write(coded.values)
            self._write(np.empty(0, dtype=np.int64) if coded.offsets is None else coded.offsets)
        self._num_blocks += 1

    def read(self, num_dense: int, num_sparse: int) -> Iterator[RawBlock]:
        """Yields the blocks in order, then deletes the file."""
        self._file.close()
        with self._path.open("rb") as file:
            for _ in range(self._num_blocks):
                label, split = _load(file), _load(file)
                dense = [_load(file) for _ in range(num_dense)]
                yield RawBlock(label, split, dense, [_load_coded(file) for _ in range(num_sparse)])
        self._path.unlink()

    def close(self) -> None:
        """Closes the file for writing; harmless when repeated."""
        self._file.close()

    def _write(self, array: npt.NDArray[Any]) -> None:
        np.lib.format.write_array(self._file, np.ascontiguousarray(array), allow_pickle=False)


def _load(file: BinaryIO) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _load_coded(file: BinaryIO) -> Coded:
    codes, values, offsets = _load(file), _load(file), _load(file)
    return Coded(codes, values, offsets if len(offsets) else None)


def _narrow(codes: npt.NDArray[np.integer], num_values: int) -> npt.NDArray[np.integer]:
    for dtype in (np.int8, np.int16):
        if num_values <= np.iinfo(dtype).max:
            return codes.astype(dtype)
    return codes.astype(np.int32)
