"""The description of a prepared set, `manifest.json`: written last, read first, and checked against the files beside it.

A prepared set is a folder:

    manifest.json
    train/part-00000.parquet, ...       validation/..., test/...
    vocabulary/<feature>.parquet        value and id, where ids come from a vocabulary

A part holds the columns `label` (uint8), every dense column (float32) and every sparse feature: int32 or int64 row ids, or a
list of them for a feature with bags. All row groups of a split but the last hold the same number of rows.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_origin

import pyarrow.parquet as pq

from torchrec_kstep.errors import DataError
from torchrec_kstep.types import SPLITS, FeatureSchema, SparseFeature, Split

MANIFEST_NAME = "manifest.json"
FORMAT = "torchrec_kstep.prepared_set"
FORMAT_VERSION = 1

PADDING_ID = 0  # no row of a table is read for padding; the id exists for models that want rectangular bags
MISSING_ID = 1  # the raw value was empty
UNSEEN_ID = 2  # the value was not in the training split, or seen there fewer times than min_count
NUM_RESERVED_IDS = 3

# An entry of a part's footer: all pages have checksums, all numbers are finite, and the statistics tell the range of all ids.
CHECKED_WHEN_WRITTEN = {"torchrec_kstep.checked": "crc32 finite range"}

Entry = TypeVar("Entry", "DenseColumn", "SparseColumn", "PartFile", "SplitFiles", "Manifest")


@dataclass(frozen=True)
class DenseColumn:
    """How a numeric column was made. Shares are fractions of the rows of a split."""

    name: str
    transform: str
    missing_share: dict[str, float]


@dataclass(frozen=True)
class SparseColumn:
    """How a sparse feature was made. Shares are fractions of the ids of a split.

    Attributes:
        name: feature name and Parquet column.
        num_rows: rows its table needs, reserved ids included.
        max_ids_per_bag: 1 for a plain column, else the largest bag of all splits.
        is_bag: whether the Parquet column is a list.
        encoding: `vocabulary` or `hash`.
        num_values: distinct raw values with an id of their own; 0 under `hash`.
        missing_share: share of ids that stand for an empty raw value, per split.
        unseen_share: share of ids that stand for a value without an id of its own, per split.
    """

    name: str
    num_rows: int
    max_ids_per_bag: int
    is_bag: bool
    encoding: str
    num_values: int
    missing_share: dict[str, float]
    unseen_share: dict[str, float]


@dataclass(frozen=True)
class PartFile:
    """One Parquet file, by a path relative to the manifest, with what identifies its content."""

    path: str
    size_bytes: int
    footer_sha256: str
    row_group_rows: list[int]


@dataclass(frozen=True)
class SplitFiles:
    """The rows of one split, in order."""

    num_rows: int
    num_positive: int
    files: list[PartFile]


@dataclass(frozen=True)
class Manifest:
    """All that is known about a prepared set.

    Attributes:
        name: data set, as in `data.name`.
        fingerprint: digest of `sources` and `options`; equal ones give equal files.
        options: the options of preparation that change its result.
        sources: what identifies the raw files.
        dense: numeric columns in order.
        sparse: sparse features in order.
        splits: files per split.
        num_bad_lines: malformed lines that were left out.
        bad_lines: the first of them, as file:line: reason.
    """

    name: str
    fingerprint: str
    options: dict[str, Any]
    sources: list[dict[str, Any]]
    dense: list[DenseColumn]
    sparse: list[SparseColumn]
    splits: dict[str, SplitFiles]
    num_bad_lines: int
    bad_lines: list[str]

    def feature_schema(self) -> FeatureSchema:
        """The columns as models see them."""
        return FeatureSchema(
            dense_names=tuple(column.name for column in self.dense),
            sparse=tuple(SparseFeature(column.name, column.num_rows, column.max_ids_per_bag) for column in self.sparse),
        )

    def files(self, split: Split) -> list[PartFile]:
        """The Parquet files of a split, in order."""
        return self.splits[split].files


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` into `folder`."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, "reserved_ids": _reserved_ids(), **asdict(manifest)}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a prepared set, without looking at its other files.

    Raises:
        DataError: there is none, it is of another format or version, or it contradicts itself.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"{folder} holds no prepared set: {MANIFEST_NAME} is missing; "
            "make one with `python -m torchrec_kstep.prepare data=<name> data.source=<raw files> data.path=<this folder>`"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; prepare the set again with overwrite=true") from error
    found = (content.pop("format", None), content.pop("version", None)) if isinstance(content, dict) else (None, None)
    if found != (FORMAT, FORMAT_VERSION):
        raise DataError(
            f"{path} has format {found[0]} version {found[1]}, expected {FORMAT} version {FORMAT_VERSION}: "
            "it was made by another release; prepare the set again with overwrite=true"
        )
    if content.pop("reserved_ids", None) != _reserved_ids():
        raise DataError(f"{path}: reserved ids differ from {_reserved_ids()}; prepare the set again with overwrite=true")
    try:
        manifest = _manifest_from_json(content)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} lacks or misnames an entry ({error}); prepare the set again with overwrite=true") from error
    _check_names(path, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compares every Parquet file with the manifest by size and footer, and the ids that footers declare with the tables.

    Reads no rows.

    Raises:
        DataError: a file is missing, is not the one that was prepared, lacks a column or has one twice, or holds an id outside
            its table; names file, feature and row group.
    """
    for split in SPLITS:
        for part in manifest.files(split):
            path = folder / part.path
            if not path.is_file():
                raise DataError(f"{path} is missing from the prepared set; copy it there or prepare the set again")
            size_bytes = path.stat().st_size
            if size_bytes != part.size_bytes:
                raise DataError(
                    f"{path} has {size_bytes} bytes, the manifest says {part.size_bytes}: it was changed or cut short; prepare again"
                )
            if footer_sha256(path) != part.footer_sha256:
                raise DataError(f"{path} is not the file that was prepared: its footer differs from the manifest; prepare the set again")
            _check_footer(path, manifest)


def _check_footer(path: Path, manifest: Manifest) -> None:
    metadata = pq.read_metadata(path)
    names = [metadata.schema.column(index).path.split(".")[0] for index in range(metadata.num_columns)]
    expected = ["label", *(column.name for column in manifest.dense), *(column.name for column in manifest.sparse)]
    if sorted(names) != sorted(expected):
        twice = sorted({name for name in names if names.count(name) > 1})
        missing, unknown = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
        raise DataError(f"{path} differs from its manifest in columns: missing {missing}, unknown {unknown}, twice {twice}; prepare again")
    lists = {name for index, name in enumerate(names) if metadata.schema.column(index).max_repetition_level}
    if lists != (bags := {column.name for column in manifest.sparse if column.is_bag}):
        raise DataError(f"{path} holds lists in {sorted(lists)}, its manifest says {sorted(bags)}; prepare again")
    for column in manifest.sparse:
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(names.index(column.name)).statistics
            if statistics is not None and statistics.has_min_max:
                refuse_ids_outside(column.name, statistics.min, statistics.max, column.num_rows, f"{path}, row group {group}")


def has_checksums(metadata: pq.FileMetaData) -> bool:
    """Says whether a part is `CHECKED_WHEN_WRITTEN`; those of older releases are not."""
    found = metadata.metadata or {}
    return all(found.get(key.encode()) == value.encode() for key, value in CHECKED_WHEN_WRITTEN.items())


def refuse_ids_outside(feature: str, smallest: int, largest: int, num_rows: int, where: str) -> None:
    """Raises a `DataError` that names the feature and the place, unless all ids are in `[0, num_rows)`."""
    if smallest < 0 or largest >= num_rows:
        raise DataError(
            f"feature {feature} has ids from {smallest} to {largest} but its table has {num_rows} rows ({where}): "
            "ids must be at least 0 and smaller than the number of rows; prepare again with the hash range or vocabulary of the model"
        )


def footer_sha256(path: Path) -> str:
    """Digest of a Parquet file's footer, which holds the place, size and statistics of every column chunk."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length + 8 > path.stat().st_size:
            raise DataError(f"{path} is no Parquet file: its last bytes are not the footer's; prepare the set again")
        file.seek(-8 - length, 2)
        return hashlib.sha256(file.read(length)).hexdigest()


def _reserved_ids() -> dict[str, int]:
    return {"padding": PADDING_ID, "missing": MISSING_ID, "unseen": UNSEEN_ID}


def _manifest_from_json(content: dict[str, Any]) -> Manifest:
    splits = {
        split: _entry(SplitFiles, entry | {"files": [_entry(PartFile, part) for part in entry["files"]]})
        for split, entry in content.pop("splits").items()
    }
    if set(splits) != set(SPLITS):
        raise KeyError(f"splits {sorted(splits)}")
    dense = [_entry(DenseColumn, column) for column in content.pop("dense")]
    sparse = [_entry(SparseColumn, column) for column in content.pop("sparse")]
    return _entry(Manifest, content | {"dense": dense, "sparse": sparse, "splits": splits})


def _entry(entry_type: type[Entry], content: dict[str, Any]) -> Entry:
    """Makes an entry of JSON values. Raises TypeError unless they have the names and the types of its fields."""
    entry = entry_type(**content)
    for field in fields(entry):
        value, expected = content[field.name], field.type
        is_right = type(value) is (get_origin(expected) or expected)
        if not is_right or (expected == list[int] and any(type(item) is not int for item in value)):
            raise TypeError(f"{field.name} is {value!r}, expected {getattr(expected, '__name__', expected)}")
    return entry


def _check_names(path: Path, manifest: Manifest) -> None:
    names = ["label", *(column.name for column in manifest.dense), *(column.name for column in manifest.sparse)]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise DataError(f"{path} uses the column names {duplicates} twice: every column needs a name of its own")
    for split, entry in manifest.splits.items():
        num_rows = sum(sum(part.row_group_rows) for part in entry.files)
        if num_rows != entry.num_rows:
            raise DataError(f"{path}: split {split} claims {entry.num_rows} rows, its row groups hold {num_rows}; prepare the set again")
