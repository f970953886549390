"""The form in which every source hands over raw rows: numpy columns, block by block. No source or file format is known here."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MISSING_CODE = -1

Values = npt.NDArray[Any]
"""Distinct raw values of one column: uint32 (hex text), int64 (whole numbers) or unicode; always the same kind in one column."""


@dataclass(frozen=True)
class Coded:
    """A categorical column of a block, as codes into the block's own distinct values.

    Attributes:
        codes: `[num_ids]` integers, an index into `values` or `MISSING_CODE`.
        values: raw values, each at most once.
        offsets: `[num_rows + 1]` int64, the bag of row i is `codes[offsets[i] : offsets[i + 1]]`; None = one code a row.
    """

    codes: npt.NDArray[np.integer]
    values: Values
    offsets: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, raw: npt.NDArray[Any], is_missing: npt.NDArray[np.bool_] | None = None) -> "Coded":
        """Codes raw values, one a row; those under `is_missing` count as missing."""
        values, codes = np.unique(raw, return_inverse=True)
        codes = codes.reshape(-1).astype(np.int32)
        if is_missing is not None:
            codes[is_missing] = MISSING_CODE
        return cls(codes, values)


@dataclass(frozen=True)
class RawBlock:
    """Some rows of a source.

    Attributes:
        label: `[num_rows]` uint8, 0 or 1.
        split: `[num_rows]` uint8 index into `types.SPLITS`, or None where the source leaves the split to preparation.
        dense: `[num_rows]` floating point per numeric column, NaN = missing; nothing else in it is not finite.
        sparse: one coded column per sparse feature.
    """

    label: npt.NDArray[np.uint8]
    split: npt.NDArray[np.uint8] | None
    dense: list[npt.NDArray[np.floating]]
    sparse: list[Coded]

    @property
    def num_rows(self) -> int:
        """Rows of the block."""
        return len(self.label)
