"""How raw values become numbers: the numeric transform, vocabularies, hashing, and the random split. Pure functions of arrays."""

import zlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.blocks import Values
from torchrec_kstep.data.manifest import MISSING_ID, NUM_RESERVED_IDS, UNSEEN_ID
from torchrec_kstep.data.mixing import hash_bytes, mix64, uniform

NUMERIC_TRANSFORM = "signed_log1p: sign(x) * log(1 + |x|); missing -> 0"


def signed_log1p(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Computes sign(x) * log(1 + |x|) in float32, finite for every finite x and odd around 0; NaN, which means missing, becomes 0."""
    magnitude: npt.NDArray[np.float32] = np.abs(values).astype(np.float32)
    magnitude += np.float32(1)
    np.log(magnitude, out=magnitude)
    np.copysign(magnitude, values, out=magnitude, casting="unsafe")
    magnitude[np.isnan(magnitude)] = 0
    return magnitude


class Encoder(Protocol):
    """Turns distinct raw values of one column into row ids."""

    num_rows: int
    num_values: int

    def lookup(self, values: Values) -> npt.NDArray[np.int64]:
        """Returns the row id of every value: `UNSEEN_ID`, or `NUM_RESERVED_IDS` and up."""
        ...


class Vocabulary:
    """Ids by exact value: the sorted values of the training split get the ids from `NUM_RESERVED_IDS` on.

    Sorting by value instead of by frequency makes ids independent of the order of the rows, and scatters the frequent ones
    over the table, so that row-wise shards are equally busy.
    """

    def __init__(self, values: Values) -> None:
        """Takes the values that have an id of their own, sorted and distinct."""
        self.values = values
        self.num_values = len(values)
        self.num_rows = NUM_RESERVED_IDS + len(values)

    def lookup(self, values: Values) -> npt.NDArray[np.int64]:
        """Returns the row id of every value, see `Encoder`."""
        if not len(self.values):
            return np.full(len(values), UNSEEN_ID, dtype=np.int64)
        place = np.searchsorted(self.values, values)
        place[place == len(self.values)] = 0
        return np.where(self.values[place] == values, place + NUM_RESERVED_IDS, UNSEEN_ID)


class VocabularyBuilder:
    """Counts the values of one column over many blocks.

    Memory is proportional to the distinct values: 12 to 36 bytes each for numbers.
    """

    def __init__(self) -> None:
        """Starts with no values."""
        self._values: Values | None = None
        self._counts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._pending: list[tuple[Values, npt.NDArray[np.int64]]] = []
        self._num_pending = 0

    def add(self, values: Values, counts: npt.NDArray[np.int64]) -> None:
        """Adds values with the times each was seen; a value may come several times, also in one call."""
        seen = counts > 0
        self._pending.append((values[seen], counts[seen]))
        self._num_pending += len(self._pending[-1][0])
        # Merging costs the size of the whole; waiting until the pending part is as large makes the total cost linear.
        if self._num_pending > max(len(self._counts), 1 << 16):
            self._merge()

    def finish(self, min_count: int) -> Vocabulary:
        """Returns the vocabulary of all values that were seen at least `min_count` times."""
        self._merge()
        values = np.empty(0, dtype=np.int64) if self._values is None else self._values
        return Vocabulary(values[self._counts >= min_count])

    def _merge(self) -> None:
        if not self._pending:
            return
        known = [] if self._values is None else [(self._values, self._counts)]
        values = np.concatenate([values for values, _ in known + self._pending])
        counts = np.concatenate([counts for _, counts in known + self._pending])
        self._pending, self._num_pending = [], 0
        self._values, self._counts = _sum_by_value(values, counts)


class HashEncoder:
    """Ids by hashing into a table of fixed size; different values may share a row, none is unseen."""

    def __init__(self, column: str, num_rows: int) -> None:
        """Takes the column's name, which seeds the hash, and the rows of its table, reserved ones included."""
        self.num_rows = num_rows
        self.num_values = 0
        self._seed = zlib.crc32(column.encode())

    def lookup(self, values: Values) -> npt.NDArray[np.int64]:
        """Returns the row id of every value, see `Encoder`."""
        keys = hash_bytes(values) if values.dtype.kind == "U" else values.astype(np.uint64)
        return (mix64(keys, self._seed) % np.uint64(self.num_rows - NUM_RESERVED_IDS)).astype(np.int64) + NUM_RESERVED_IDS


def rows_by_code(encoder: Encoder, values: Values) -> npt.NDArray[np.int64]:
    """Returns `[len(values) + 1]` row ids: indexed by a block's codes, the last entry serves `MISSING_CODE`."""
    return np.append(encoder.lookup(values), MISSING_ID)


def random_split(first_row: int, num_rows: int, seed: int, validation_fraction: float, test_fraction: float) -> npt.NDArray[np.uint8]:
    """Assigns rows `first_row`.. to splits: a function of (seed, index of the row) alone, so blocks of any size agree.

    Returns:
        `[num_rows]` uint8 indices into `types.SPLITS`.
    """
    draws = uniform(mix64(np.arange(first_row, first_row + num_rows, dtype=np.uint64), seed))
    split = np.zeros(num_rows, dtype=np.uint8)
    split[draws >= 1 - validation_fraction - test_fraction] = 1
    split[draws >= 1 - test_fraction] = 2
    return split


def _sum_by_value(values: Values, counts: npt.NDArray[np.int64]) -> tuple[Values, npt.NDArray[np.int64]]:
    """Sorts values and adds up the counts of equal ones."""
    if not len(values):
        return values, counts
    if values.dtype == np.uint32 and counts.max() <= np.iinfo(np.uint32).max:
        # Sorting value and count as one 64-bit number is several times faster than sorting indices and gathering.
        pairs = values.astype(np.uint64) << np.uint64(32) | counts.astype(np.uint64)
        pairs.sort()
        values, counts = (pairs >> np.uint64(32)).astype(np.uint32), (pairs & np.uint64(0xFFFFFFFF)).astype(np.int64)
    else:
        order = np.argsort(values, kind="stable")
        values, counts = values[order], counts[order]
    begins = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[begins], np.add.reduceat(counts, begins)
