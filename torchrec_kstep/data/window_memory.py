"""Memory of windows, used again for later ones: fresh pages cost about as much time as decoding the values that fill them."""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.collate import ids_dtype
from torchrec_kstep.data.manifest import Manifest

_MAX_SPARE = 2  # what one stream needs: the window in use and the one that is being decoded


class WindowMemory:
    """Room for the columns of some number of rows."""

    def __init__(self, manifest: Manifest, capacity_rows: int) -> None:
        """Allocates room for `capacity_rows` rows of the single-valued columns of a set; pages come when they are written."""
        single = [column for column in manifest.sparse if not column.is_bag]
        self.capacity_rows = capacity_rows
        self._num_numbers, self._num_single = 1 + len(manifest.dense), len(single)
        self._numbers = np.empty(self._num_numbers * capacity_rows, dtype=np.float32)
        self._ids = np.empty(self._num_single * capacity_rows, dtype=ids_dtype(manifest.feature_schema()))

    def columns(self, num_rows: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        """Returns contiguous `[1 + num_dense, num_rows]` numbers and `[num_single, num_rows]` ids in this memory."""
        return (
            self._numbers[: self._num_numbers * num_rows].reshape(self._num_numbers, num_rows),
            self._ids[: self._num_single * num_rows].reshape(self._num_single, num_rows),
        )


class SpareMemory:
    """Keeps the memory of finished windows for the next ones; shared by the streams of a set, so also from epoch to epoch."""

    def __init__(self, manifest: Manifest) -> None:
        """Starts with none."""
        self._manifest = manifest
        self._spare: list[WindowMemory] = []
        self._lock = threading.Lock()

    def take(self, num_rows: int) -> WindowMemory:
        """Returns memory for `num_rows` rows, kept or fresh."""
        with self._lock:
            for index, memory in enumerate(self._spare):
                if memory.capacity_rows >= num_rows:
                    return self._spare.pop(index)
        return WindowMemory(self._manifest, num_rows)

    def give_back(self, memory: WindowMemory) -> None:
        """Takes memory that nobody uses any more; keeps the largest pieces."""
        with self._lock:
            self._spare = sorted([*self._spare, memory], key=lambda spare: spare.capacity_rows)[-_MAX_SPARE:]
