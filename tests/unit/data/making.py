"""Makes small prepared sets by hand, so that readers are tested apart from preparation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_kstep.data.manifest import (
    CHECKED_WHEN_WRITTEN,
    DenseColumn,
    Manifest,
    PartFile,
    SparseColumn,
    SplitFiles,
    footer_sha256,
    write_manifest,
)
from torchrec_kstep.types import SPLITS

NUM_ROWS_OF_TABLE = 1 << 20


def bag_of(row: int) -> list[int]:
    """The bag of a row of a hand-made set: 0 to 3 ids."""
    return [(row * 7 + k) % 1000 for k in range(row % 4)]


def make_prepared_set(
    folder: Path,
    files: Sequence[Sequence[int]],
    eval_files: Sequence[Sequence[int]] = ((5,),),
    is_checked: bool = False,
    **replace: Any,
) -> Path:
    """Writes a set whose feature `row` is the number of the row in its split.

    Args:
        folder: where.
        files: rows of each row group of each file of the training split.
        eval_files: the same for validation and test.
        is_checked: whether the files are as `prepare` writes them, `CHECKED_WHEN_WRITTEN`.
        replace: entries of the manifest that differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shares = dict.fromkeys(SPLITS, 0.0)
    columns = {
        "dense": [DenseColumn("d0", "none", shares), DenseColumn("d1", "none", shares)],
        "sparse": [
            SparseColumn("row", NUM_ROWS_OF_TABLE, 1, False, "hash", 0, shares, shares),
            SparseColumn("bag", 1000, 3, True, "hash", 0, shares, shares),
        ],
    }
    named = {column.name for kind, usual in columns.items() for column in replace.get(kind, usual)}
    written = ["label", *(column.name for usual in columns.values() for column in usual if column.name in named)]
    splits = {}
    for split in SPLITS:
        (folder / split).mkdir()
        parts, num_rows = [], 0
        for index, row_groups in enumerate(files if split == "train" else eval_files):
            name = f"{split}/part-{index:05d}.parquet"
            rows = np.arange(num_rows, num_rows + sum(row_groups))
            write_rows(folder / name, rows, row_groups, written, is_checked)
            parts.append(PartFile(name, (folder / name).stat().st_size, footer_sha256(folder / name), list(row_groups)))
            num_rows += len(rows)
        splits[split] = SplitFiles(num_rows, num_rows // 2, parts)
    manifest = {
        "name": "criteo",
        "fingerprint": "0" * 32,
        "options": {},
        "sources": [],
        **columns,
        "splits": splits,
        "num_bad_lines": 0,
        "bad_lines": [],
    }
    write_manifest(folder, Manifest(**(manifest | replace)))
    return folder


def write_rows(
    path: Path, rows: Any, row_groups: Sequence[int], names: Sequence[str] | None = None, is_checked: bool = False, **replace: Any
) -> None:
    """Writes rows of the hand-made set as a Parquet file with the given row groups; `names` = the columns written, if not all."""
    columns = {
        "label": pa.array((rows % 2).astype(np.uint8)),
        "d0": pa.array(rows.astype(np.float32)),
        "d1": pa.array((-rows).astype(np.float32)),
        "row": pa.array(rows.astype(np.int32)),
        "bag": pa.array([bag_of(int(row)) for row in rows], type=pa.list_(pa.int32())),
    } | replace
    table = pa.table({name: columns[name] for name in names or columns})
    with pq.ParquetWriter(path, table.schema, write_page_checksum=is_checked) as writer:
        if is_checked:
            writer.add_key_value_metadata(CHECKED_WHEN_WRITTEN)
        begin = 0
        for num_rows in row_groups:
            writer.write_table(table.slice(begin, num_rows), row_group_size=max(1, num_rows))
            begin += num_rows
