"""Frappe (context-aware app usage): libFM text files with one file per split, or one Parquet table with a split column.

Ten categorical columns f0..f9: user, item, daytime, weekday, is_weekend, home or work, cost, weather, country, city. Both forms
number all values of all columns in one range; here each column gets a table of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import Coded, RawBlock
from torchrec_kstep.data.sources.lines import split_lines
from torchrec_kstep.data.sources.parquet import read_table
from torchrec_kstep.errors import DataError

NUM_COLUMNS = 10
_TEXT_FILES = ("frappe.train.libfm", "frappe.validation.libfm", "frappe.test.libfm")
_SPLIT_INDEX = {"train": 0, "valid": 1, "validation": 1, "test": 2}
_LABELS = {"-1": 0, "0": 0, "1": 1, "+1": 1}


class FrappeSource:
    """The rows of each split in the order of the file; the split is that of the source."""

    dense_names: tuple[str, ...] = ()
    sparse_names = tuple(f"f{index}" for index in range(NUM_COLUMNS))
    bag_names: frozenset[str] = frozenset()

    def __init__(self, config: DataConfig) -> None:
        """Finds the three text files in the folder `config.source`, or takes it as the Parquet table."""
        what = f"a folder with {', '.join(_TEXT_FILES)}, or a Parquet file with columns f0..f9, label, split"
        if not config.source:
            raise DataError(f"data=frappe needs data.source: {what}")
        path = Path(config.source)
        self.files = [path / name for name in _TEXT_FILES] if path.is_dir() else [path]
        missing = [str(file) for file in self.files if not file.is_file()]
        if missing:
            raise DataError(f"{', '.join(missing)} is missing: data.source must be {what}")

    def blocks(self, bad_lines: BadLines) -> Iterator[RawBlock]:
        """Reads one block per file, see `Source.blocks`."""
        if len(self.files) == 1:
            yield _read_parquet(self.files[0])
            return
        for split, path in enumerate(self.files):
            yield _read_text(path, split, bad_lines)


def _read_text(path: Path, split: int, bad_lines: BadLines) -> RawBlock:
    label, *columns = split_lines(path, " ", 1 + NUM_COLUMNS, bad_lines, parse=_parse_fields)
    return RawBlock(
        label=label.astype(np.uint8),
        split=np.full(len(label), split, dtype=np.uint8),
        dense=[],
        sparse=[Coded.of(column.astype(np.int64)) for column in columns],
    )


def _parse_fields(fields: list[str]) -> list[str]:
    """Turns `["-1", "451:1", ...]` into the texts of label and ids."""
    if fields[0] not in _LABELS:
        raise ValueError(f"label: expected 1, -1 or 0, got {fields[0]!r}")
    ids = []
    for index, field in enumerate(fields[1:], start=2):
        number, colon, value = field.partition(":")
        if not (number.isascii() and number.isdigit() and colon and value in ("1", "1.0")):
            raise ValueError(f"column {index}: expected <id>:1, got {field!r}")
        ids.append(number)
    return [str(_LABELS[fields[0]]), *ids]


def _read_parquet(path: Path) -> RawBlock:
    names = [f"f{index}" for index in range(NUM_COLUMNS)]
    table = read_table(path, dict.fromkeys([*names, "label"], pa.int64()) | {"split": pa.large_string()})
    unknown = set(pc.unique(table.column("split")).to_pylist()) - set(_SPLIT_INDEX)
    label = table.column("label").to_numpy()
    if unknown or not np.isin(label, [-1, 0, 1]).all():
        raise DataError(
            f"{path}: unknown splits {sorted(map(str, unknown))}, expected {', '.join(_SPLIT_INDEX)}; labels must be 0 or 1, or -1 and 1"
        )
    return RawBlock(
        label=(label > 0).astype(np.uint8),
        split=np.array([_SPLIT_INDEX[text] for text in table.column("split").to_pylist()], dtype=np.uint8),
        dense=[],
        sparse=[Coded.of(table.column(name).to_numpy()) for name in names],
    )
