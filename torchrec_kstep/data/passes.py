"""The passes over the raw rows, in memory bounded by a few blocks and the distinct values.

First pass: read and check the rows, draw their splits, count the values of the training split, keep the rows in a spool.
Second pass: turn values into ids and write Parquet. Hashed columns need no counts, so they take one pass and no spool.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.background import map_ahead
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import MISSING_CODE, Coded, RawBlock
from torchrec_kstep.data.encode import (
    NUMERIC_TRANSFORM,
    Encoder,
    HashEncoder,
    Vocabulary,
    VocabularyBuilder,
    random_split,
    rows_by_code,
    signed_log1p,
)
from torchrec_kstep.data.manifest import MISSING_ID, NUM_RESERVED_IDS, UNSEEN_ID, DenseColumn, SparseColumn, SplitFiles
from torchrec_kstep.data.sources import Source
from torchrec_kstep.data.sources.base import name_files
from torchrec_kstep.data.spool import Spool
from torchrec_kstep.data.write import SplitWriter
from torchrec_kstep.errors import DataError
from torchrec_kstep.types import SPLITS

Progress = Callable[[str, int], None]
"""Is told what is being done and how many rows are done."""


def run_passes(config: DataConfig, source: Source, folder: Path, progress: Progress) -> dict[str, Any]:
    """Reads a source and writes all files of a prepared set but the manifest.

    Args:
        config: the options of preparation.
        source: the raw rows.
        folder: an empty folder.
        progress: is called after every block.

    Returns:
        The entries of the `Manifest` that describe the result.
    """
    bad_lines = BadLines(config.max_bad_lines)
    blocks = _with_progress(_with_split(source.blocks(bad_lines), config), "reading", progress)
    with contextlib.ExitStack() as stack:
        encoders: list[Encoder]
        if config.encoding == "hash":
            encoders = [HashEncoder(name, config.num_hash_rows) for name in source.sparse_names]
        else:
            spool = stack.enter_context(contextlib.closing(Spool(folder / "rows.spool")))
            vocabularies = _count_values(blocks, source, spool, config.min_count)
            _write_vocabularies(folder / "vocabulary", source, vocabularies)
            encoders = list(vocabularies)
            blocks = _with_progress(spool.read(len(source.dense_names), len(source.sparse_names)), "writing", progress)
        schema = _arrow_schema(source, encoders)
        writers = [stack.enter_context(SplitWriter(folder, split, schema, config.rows_per_row_group)) for split in SPLITS]
        totals = _encode_and_write(blocks, encoders, schema, writers)
        files = [writer.finish() for writer in writers]
    if not totals[0].num_rows:
        num_rows = sum(total.num_rows for total in totals)
        raise DataError(
            f"no rows to train on: {name_files(source.files)} gave {num_rows} rows in all, none of them for the training split; "
            "check data.source, data.validation_fraction and data.test_fraction"
        )
    return {
        "dense": _dense_columns(source, totals),
        "sparse": _sparse_columns(config, source, encoders, totals),
        "splits": {
            split: SplitFiles(total.num_rows, total.num_positive, parts) for split, total, parts in zip(SPLITS, totals, files, strict=True)
        },
        "num_bad_lines": bad_lines.num_bad_lines,
        "bad_lines": bad_lines.messages,
    }


def _with_split(blocks: Iterator[RawBlock], config: DataConfig) -> Iterator[RawBlock]:
    first_row = 0
    for block in blocks:
        split = block.split
        if split is None:
            split = random_split(first_row, block.num_rows, config.split_seed, config.validation_fraction, config.test_fraction)
        first_row += block.num_rows
        yield RawBlock(block.label, split, block.dense, block.sparse)


def _with_progress(blocks: Iterator[RawBlock], what: str, progress: Progress) -> Iterator[RawBlock]:
    num_rows = 0
    for block in blocks:
        yield block
        num_rows += block.num_rows
        progress(what, num_rows)


def _count_values(blocks: Iterator[RawBlock], source: Source, spool: Spool, min_count: int) -> list[Vocabulary]:
    builders = [VocabularyBuilder() for _ in source.sparse_names]
    for block in blocks:
        spool.append(block)
        is_train = np.asarray(block.split) == 0
        for builder, coded in zip(builders, block.sparse, strict=True):
            builder.add(coded.values, _count_codes(coded, is_train))
    return [builder.finish(min_count) for builder in builders]


def _count_codes(coded: Coded, is_wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    if coded.offsets is not None:
        is_wanted = np.repeat(is_wanted, np.diff(coded.offsets))
    shifted = coded.codes[is_wanted].astype(np.int64) - MISSING_CODE  # bincount takes no negative numbers
    return np.bincount(shifted, minlength=len(coded.values) + 1)[1:]


def _write_vocabularies(folder: Path, source: Source, vocabularies: list[Vocabulary]) -> None:
    folder.mkdir()
    for name, vocabulary in zip(source.sparse_names, vocabularies, strict=True):
        ids = np.arange(NUM_RESERVED_IDS, vocabulary.num_rows)
        pq.write_table(pa.table({"value": pa.array(vocabulary.values), "id": ids}), folder / f"{name}.parquet", compression="zstd")


@dataclass
class _Total:
    """Counts of one split; `_missing` and `_unseen` have one entry per column."""

    num_rows: int = 0
    num_positive: int = 0
    dense_missing: list[int] = field(default_factory=list)
    num_ids: list[int] = field(default_factory=list)
    sparse_missing: list[int] = field(default_factory=list)
    sparse_unseen: list[int] = field(default_factory=list)
    max_ids_per_bag: list[int] = field(default_factory=list)

    def add(self, other: "_Total") -> None:
        """Adds the counts of some more rows."""
        self.num_rows += other.num_rows
        self.num_positive += other.num_positive
        for name in ("dense_missing", "num_ids", "sparse_missing", "sparse_unseen"):
            setattr(self, name, _add(getattr(self, name), getattr(other, name)))
        largest = self.max_ids_per_bag or other.max_ids_per_bag
        self.max_ids_per_bag = [max(pair) for pair in zip(largest, other.max_ids_per_bag, strict=True)]


def _add(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)] if left else list(right)


def _encode_and_write(blocks: Iterator[RawBlock], encoders: list[Encoder], schema: Any, writers: list[SplitWriter]) -> list[_Total]:
    totals = [_Total() for _ in SPLITS]
    for pieces in map_ahead(lambda block: _encode(block, encoders, schema), blocks, max(1, (os.cpu_count() or 2) - 1)):
        for (table, counts), writer, total in zip(pieces, writers, totals, strict=True):
            total.add(counts)
            if table.num_rows:
                writer.write(table)
    return totals


def _encode(block: RawBlock, encoders: list[Encoder], schema: Any) -> list[tuple[Any, _Total]]:
    """Turns a block into one table per split, with counts."""
    assert block.split is not None
    ids_of_code = [rows_by_code(encoder, coded.values) for encoder, coded in zip(encoders, block.sparse, strict=True)]
    pieces = []
    for split in range(len(SPLITS)):
        rows = np.flatnonzero(block.split == split)
        label = block.label[rows]
        total = _Total(num_rows=len(rows), num_positive=int(label.sum()))
        columns: list[Any] = [label]
        for column in block.dense:
            raw = column[rows]
            total.dense_missing.append(int(np.isnan(raw).sum()))
            columns.append(signed_log1p(raw))
        for table, coded, arrow_field in zip(ids_of_code, block.sparse, list(schema)[len(columns) :], strict=True):
            columns.append(_encode_sparse(table, coded, rows, arrow_field.type, total))
        pieces.append((pa.table(columns, schema=schema), total))
    return pieces


def _encode_sparse(table: npt.NDArray[np.int64], coded: Coded, rows: npt.NDArray[np.int64], kind: Any, total: _Total) -> Any:
    is_bag = pa.types.is_list(kind)
    table = table.astype((kind.value_type if is_bag else kind).to_pandas_dtype())
    if coded.offsets is None:
        ids, largest = table[coded.codes[rows]], 1
    else:
        lengths = np.diff(coded.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        ids, largest = table[coded.codes[np.repeat(coded.offsets[rows], lengths) + within]], int(lengths.max(initial=1))
    total.num_ids.append(len(ids))
    total.sparse_missing.append(int(np.count_nonzero(ids == MISSING_ID)))
    total.sparse_unseen.append(int(np.count_nonzero(ids == UNSEEN_ID)))
    total.max_ids_per_bag.append(largest)
    return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), pa.array(ids)) if is_bag else pa.array(ids)


def _arrow_schema(source: Source, encoders: list[Encoder]) -> Any:
    fields = [pa.field("label", pa.uint8(), nullable=False)]
    fields += [pa.field(name, pa.float32(), nullable=False) for name in source.dense_names]
    for name, encoder in zip(source.sparse_names, encoders, strict=True):
        kind = pa.int32() if encoder.num_rows <= np.iinfo(np.int32).max else pa.int64()
        fields.append(pa.field(name, pa.list_(kind) if name in source.bag_names else kind, nullable=False))
    return pa.schema(fields)


def _dense_columns(source: Source, totals: list[_Total]) -> list[DenseColumn]:
    return [
        DenseColumn(name, NUMERIC_TRANSFORM, _shares((total.dense_missing[index], total.num_rows) for total in totals))
        for index, name in enumerate(source.dense_names)
    ]


def _sparse_columns(config: DataConfig, source: Source, encoders: list[Encoder], totals: list[_Total]) -> list[SparseColumn]:
    return [
        SparseColumn(
            name=name,
            num_rows=encoder.num_rows,
            max_ids_per_bag=max(total.max_ids_per_bag[index] for total in totals),
            is_bag=name in source.bag_names,
            encoding=config.encoding,
            num_values=encoder.num_values,
            missing_share=_shares((total.sparse_missing[index], total.num_ids[index]) for total in totals),
            unseen_share=_shares((total.sparse_unseen[index], total.num_ids[index]) for total in totals),
        )
        for index, (name, encoder) in enumerate(zip(source.sparse_names, encoders, strict=True))
    ]


def _shares(parts_of_wholes: Iterable[tuple[int, int]]) -> dict[str, float]:
    return {split: round(part / whole, 6) if whole else 0.0 for split, (part, whole) in zip(SPLITS, parts_of_wholes, strict=True)}
