"""Goal: bytes that flipped on the way are noticed by file, row group and column; files do not pile up. Layer: data readers."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.making import make_prepared_set
from torchrec_kstep.data import BatchOrder
from torchrec_kstep.data.manifest import SparseColumn, has_checksums
from torchrec_kstep.data.open_files import OpenFiles
from torchrec_kstep.data.prepared import PreparedSet
from torchrec_kstep.data.write import SplitWriter
from torchrec_kstep.errors import DataError

SHARES = {"train": 0.0, "validation": 0.0, "test": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_prepared_set(tmp_path / "set", [[10, 10]], is_checked=True)


def read_all(data: PreparedSet, shuffle: bool = False) -> list[list[float]]:
    batches = list(data.batches("train", BatchOrder(batch_size=4, shuffle=shuffle)))
    columns = [(batch.label, batch.dense, batch.sparse.values(), batch.sparse.lengths()) for batch in batches]
    return [column.flatten().tolist() for batch in columns for column in batch]


def chunks(part: Path) -> list[tuple[int, str, range]]:
    """Row group, column and bytes of every column chunk."""
    metadata, found = pq.read_metadata(part), []
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
            found.append((group, chunk.path_in_schema.split(".")[0], range(begin, begin + chunk.total_compressed_size)))
    return found


def flip(part: Path, place: int) -> None:
    content = bytearray(part.read_bytes())
    content[place] ^= 0x10
    part.write_bytes(content)


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_a_flipped_byte_in_any_column_is_named(folder: Path, prefetch_batches: int) -> None:
    part = folder / "train" / "part-00000.parquet"
    for group, column, places in chunks(part):
        flip(part, places[-1])  # the values, which end a page
        with pytest.raises(DataError, match=rf"part-00000\.parquet, row group {group}, column {column}: .*prepare the set again"):
            read_all(PreparedSet(folder, prefetch_batches=prefetch_batches))
        flip(part, places[-1])
    assert read_all(PreparedSet(folder))


def test_no_flipped_byte_between_the_footers_changes_what_is_read(folder: Path) -> None:
    part = folder / "train" / "part-00000.parquet"
    expected = read_all(PreparedSet(folder, prefetch_batches=0))
    noticed: list[str] = []
    for _, _, places in chunks(part):
        for place in places[::3]:
            flip(part, place)
            try:
                assert read_all(PreparedSet(folder, prefetch_batches=0)) == expected  # statistics in page headers are never read
            except DataError as error:
                noticed.append(str(error))
            flip(part, place)
    assert len(noticed) > 20
    assert all("part-00000.parquet" in text for text in noticed)


def test_files_of_an_earlier_form_are_read_and_checked_value_by_value(tmp_path: Path) -> None:
    old, new = (make_prepared_set(tmp_path / str(checked), [[10, 10], [7]], is_checked=checked) for checked in (False, True))
    assert read_all(PreparedSet(old), shuffle=True) == read_all(PreparedSet(new), shuffle=True)
    kinds = {has_checksums(pq.read_metadata(folder / "train" / "part-00000.parquet")) for folder in (old, new)}
    assert kinds == {False, True}


def test_checksums_are_verified_once_for_each_row_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    original = OpenFiles.lend

    def lend(self: OpenFiles, path: Path, with_checksums: bool):
        asked.append(with_checksums)
        return original(self, path, with_checksums)

    monkeypatch.setattr(OpenFiles, "lend", lend)
    data = PreparedSet(folder)
    assert read_all(data) == read_all(data)
    assert asked == [True, True, False, False]


def open_parts(folder: Path) -> list[str]:
    names = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [name for name in [*names, *maps] if str(folder) in name]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_few_files_stay_open_and_none_behind_a_stream(tmp_path: Path) -> None:
    folder = make_prepared_set(tmp_path / "set", [[4]] * 40, is_checked=True)
    batches = iter(PreparedSet(folder, shuffle_row_groups=1, prefetch_batches=0).batches("train", BatchOrder(batch_size=4)))
    for _ in range(39):
        next(batches)
        assert len(open_parts(folder)) <= 2 * 17
    del batches
    assert not open_parts(folder)


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        table = pa.table({"label": pa.array([0, 1], type=pa.uint8()), "d0": pa.array([0.5, value], type=pa.float32())})
        with SplitWriter(tmp_path / str(value), "train", table.schema, 2) as writer, pytest.raises(DataError, match="column d0 would hold"):
            writer.write(table)


def test_what_is_written_has_checksums(tmp_path: Path) -> None:
    table = pa.table({"label": pa.array([0, 1], type=pa.uint8()), "d0": pa.array([0.5, 1.5], type=pa.float32())})
    with SplitWriter(tmp_path, "train", table.schema, 2) as writer:
        writer.write(table)
        (part,) = writer.finish()
    assert has_checksums(pq.read_metadata(tmp_path / part.path))
    flip(tmp_path / part.path, chunks(tmp_path / part.path)[1][2][-1])
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(tmp_path / part.path, page_checksum_verification=True)


@pytest.mark.parametrize(("num_rows", "dtype"), [((1 << 31) - 1, "torch.int32"), (1 << 31, "torch.int64"), (1 << 40, "torch.int64")])
def test_ids_have_32_bits_where_all_rows_of_all_tables_fit(tmp_path: Path, num_rows: int, dtype: str) -> None:
    sparse = [
        SparseColumn("row", num_rows, 1, False, "hash", 0, SHARES, SHARES),
        SparseColumn("bag", 1000, 3, True, "hash", 0, SHARES, SHARES),
    ]
    for columns in (sparse, sparse[:1]):
        folder = make_prepared_set(tmp_path / str(len(columns)), [[10]], sparse=columns)
        batches = list(PreparedSet(folder).batches("train", BatchOrder(batch_size=4)))
        assert {str(batch.sparse.values().dtype) for batch in batches} == {dtype}
        assert np.concatenate([batch.sparse["row"].values().numpy() for batch in batches]).tolist() == list(range(10))
