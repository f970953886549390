"""Goal: a damaged or contradictory set is refused by name, and reading leaves no thread behind. Layer: data readers."""

import contextlib
import json
import operator
import threading
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.making import make_prepared_set, write_rows
from torchrec_kstep.data import BatchOrder
from torchrec_kstep.data.manifest import FORMAT_VERSION, MANIFEST_NAME, SparseColumn, footer_sha256
from torchrec_kstep.data.prepared import PreparedSet
from torchrec_kstep.errors import ConfigError, DataError

SHARES = {"train": 0.0, "validation": 0.0, "test": 0.0}


def replace_part(folder: Path, **columns: object) -> None:
    """Replaces the first training file by one with other columns, and makes the manifest agree."""
    part = folder / "train" / "part-00000.parquet"
    write_rows(part, np.arange(20), [10, 10], **columns)
    accept_part(folder)


def accept_part(folder: Path) -> None:
    part = folder / "train" / "part-00000.parquet"
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["splits"]["train"]["files"][0] |= {"size_bytes": part.stat().st_size, "footer_sha256": footer_sha256(part)}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_prepared_set(tmp_path / "set", [[10, 10]])


def read_all(folder: Path, **options: int) -> list:
    return list(PreparedSet(folder, **options).batches("train", BatchOrder(batch_size=4)))


@pytest.mark.parametrize(
    ("bad_id", "message"), [(1 << 20, "ids from 0 to 1048576"), ((1 << 31) - 1, "to 2147483647"), (-1, "ids from -1 to")]
)
@pytest.mark.parametrize("statistics", [True, False], ids=["seen in the footer", "seen when read"])
def test_ids_outside_their_table_are_named(folder: Path, bad_id: int, message: str, statistics: bool) -> None:
    rows = np.arange(20, dtype=np.int32)
    rows[15] = bad_id
    part = folder / "train" / "part-00000.parquet"
    table = pq.read_table(part)
    table = table.set_column(table.column_names.index("row"), "row", pa.array(rows))
    pq.write_table(table, part, row_group_size=10, write_statistics=statistics)
    accept_part(folder)
    with pytest.raises(DataError, match="feature row has ids from") as caught:
        read_all(folder)
    for expected in ("1048576 rows", "part-00000.parquet, row group 1"):
        assert expected in str(caught.value)
    assert message.split()[-1] in str(caught.value)


def test_ids_outside_their_table_are_found_in_bags_too(folder: Path) -> None:
    replace_part(folder, bag=pa.array([[1, 2]] * 19 + [[1000]], type=pa.list_(pa.int32())))
    with pytest.raises(DataError, match="feature bag has ids from 1 to 1000 but its table has 1000 rows"):
        read_all(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_dense_values_that_are_not_finite_are_named(folder: Path, value: float) -> None:
    replace_part(folder, d1=pa.array([0.0] * 12 + [value] + [0.0] * 7, type=pa.float32()))
    for prefetch_batches in (0, 2):
        with pytest.raises(DataError, match=r"dense column d1 .*part-00000\.parquet, row group 1"):
            read_all(folder, prefetch_batches=prefetch_batches)


def test_empty_values_are_named(folder: Path) -> None:
    replace_part(folder, row=pa.array([None, *range(19)], type=pa.int32()))
    with pytest.raises(DataError, match=r"column row has 1 empty values"):
        read_all(folder)


def test_a_file_with_a_column_twice_or_without_one_is_refused(folder: Path) -> None:
    part = folder / "train" / "part-00000.parquet"
    table = pq.read_table(part)
    pq.write_table(table.append_column("row", table.column("row")), part, row_group_size=10)
    accept_part(folder)
    with pytest.raises(DataError, match=r"twice \['row'\]"):
        PreparedSet(folder)
    pq.write_table(table.drop_columns(["row"]), part, row_group_size=10)
    accept_part(folder)
    with pytest.raises(DataError, match=r"missing \['row'\]"):
        PreparedSet(folder)


def test_a_manifest_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    twice = [SparseColumn("row", 100, 1, False, "hash", 0, SHARES, SHARES)] * 2
    with pytest.raises(DataError, match=r"column names \['row'\] twice"):
        PreparedSet(make_prepared_set(tmp_path / "set", [[10]], sparse=twice))


@pytest.mark.parametrize("kind", ["changed", "longer", "missing", "no parquet"])
def test_changed_files_are_refused(folder: Path, kind: str) -> None:
    part = folder / "train" / "part-00000.parquet"
    content = part.read_bytes()
    if kind == "missing":
        part.unlink()
    else:
        changed = content[:-60] + bytes([content[-60] ^ 1]) + content[-59:]
        part.write_bytes({"changed": changed, "longer": content + b"x", "no parquet": b"\0" * len(content)}[kind])
    with pytest.raises(DataError, match=r"part-00000\.parquet"):
        PreparedSet(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m | {"version": FORMAT_VERSION + 1}, "expected torchrec_kstep.prepared_set version"),
        (lambda m: m | {"format": "other"}, "has format other"),
        (lambda m: m | {"reserved_ids": {"padding": 1}}, "reserved ids differ"),
        (lambda m: {k: v for k, v in m.items() if k != "splits"}, "lacks or misnames"),
        (lambda m: m | {"splits": {"train": m["splits"]["train"]}}, "lacks or misnames"),
        (lambda m: m | {"extra": 1}, "lacks or misnames"),
        (
            lambda m: m | {"splits": m["splits"] | {"train": m["splits"]["train"] | {"num_rows": 21}}},
            "claims 21 rows, its row groups hold 20",
        ),
        (lambda _: [1], "has format None"),
    ],
)
def test_other_manifests_are_refused(folder: Path, edit, message: str) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=message):
        PreparedSet(folder)


def places(content: object, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value in a JSON document."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ():
        yield (*above, key)
        yield from places(value, (*above, key))


@pytest.mark.parametrize("wrong", [None, "x", -1, 3.5, [], {}, True, [None]], ids=str)
def test_a_value_of_another_type_anywhere_in_the_manifest_never_passes_as_anything_but_a_data_error(folder: Path, wrong: object) -> None:
    path = folder / MANIFEST_NAME
    text = path.read_text()
    for *above, last in places(json.loads(text)):
        manifest = json.loads(text)
        parent: Any = reduce(operator.getitem, above, manifest)
        parent[last] = wrong
        path.write_text(json.dumps(manifest))
        with contextlib.suppress(DataError):  # shares and sources are for people: a wrong one harms no reading
            next(iter(PreparedSet(folder, prefetch_batches=0).batches("train", BatchOrder(batch_size=4))))


def test_a_manifest_that_is_no_json_or_absent_is_refused(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        PreparedSet(folder)
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(DataError, match="holds no prepared set"):
        PreparedSet(folder)


def reader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kstep-")}


def test_a_dropped_iterator_leaves_no_thread(tmp_path: Path) -> None:
    data = PreparedSet(make_prepared_set(tmp_path / "set", [[8] * 40]), shuffle_row_groups=2)
    of_other_tests = reader_threads()  # an iterator that a failure's traceback still holds
    for num_batches in (0, 1, 5):
        batches = iter(data.batches("train", BatchOrder(batch_size=4)))
        for _ in range(num_batches):
            next(batches)
        assert bool(reader_threads() - of_other_tests) == bool(num_batches)
        del batches
        assert not reader_threads() - of_other_tests


def test_each_pass_starts_anew_and_depth_does_not_matter(tmp_path: Path) -> None:
    folder = make_prepared_set(tmp_path / "set", [[8] * 7])

    def passes(prefetch_batches: int) -> list[list[list[int]]]:
        stream = PreparedSet(folder, prefetch_batches=prefetch_batches).batches("train", BatchOrder(batch_size=8, shuffle=True))
        return [[batch.sparse["row"].values().tolist() for batch in stream] for _ in range(2)]

    expected = passes(0)
    assert expected[0] == expected[1]
    assert len(expected[0]) == 7
    assert all(passes(depth) == expected for depth in (1, 2, 3))


def test_reading_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    data = PreparedSet(make_prepared_set(tmp_path / "set", [[8] * 40]), shuffle_row_groups=1, prefetch_batches=3)
    original = PreparedSet._iterate

    def counting(self: PreparedSet, *arguments):
        for batch in original(self, *arguments):
            made.append(1)
            yield batch

    monkeypatch.setattr(PreparedSet, "_iterate", counting)
    batches = iter(data.batches("train", BatchOrder(batch_size=8)))
    next(batches)
    deadline = time.monotonic() + 10
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(made) == 5  # one is in use, three wait, one waits for a place


@pytest.mark.parametrize("limit", [1, 10, 13, 20, 21])
def test_a_limit_cuts_the_training_split_only(folder: Path, limit: int) -> None:
    data = PreparedSet(folder, limit=limit)
    assert data.num_rows("train") == min(limit, 20)
    assert data.num_rows("validation") == data.num_rows("test") == 5
    rows = [row for batch in data.batches("train", BatchOrder(batch_size=6)) for row in batch.sparse["row"].values().tolist()]
    assert rows == list(range(min(limit, 20)))


_COLUMNS_OF_KINDS = {
    "no dense": {"dense": []},
    "bags only": {"dense": [], "sparse": [SparseColumn("bag", 1000, 3, True, "hash", 0, SHARES, SHARES)]},
    "single-valued only": {"sparse": [SparseColumn("row", 1 << 20, 1, False, "hash", 0, SHARES, SHARES)]},
    "single-valued, no dense": {"dense": [], "sparse": [SparseColumn("row", 1 << 20, 1, False, "hash", 0, SHARES, SHARES)]},
}


@pytest.mark.parametrize("kinds", list(_COLUMNS_OF_KINDS))
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("files", [[[10, 3]], [[10] * 4, [10, 3]]], ids=["ragged", "full and ragged"])
def test_sets_without_columns_of_a_kind_are_read_whole(
    tmp_path: Path, kinds: str, shuffle: bool, world_size: int, files: list[list[int]]
) -> None:
    data = PreparedSet(make_prepared_set(tmp_path / "set", files, **_COLUMNS_OF_KINDS[kinds]), shuffle_row_groups=4)
    batches = [
        batch
        for rank in range(world_size)
        for batch in data.batches("train", BatchOrder(rank=rank, world_size=world_size, batch_size=4, shuffle=shuffle))
    ]
    assert sum(int(batch.weight.sum()) for batch in batches) == data.num_rows("train")
    for batch in batches:
        assert batch.dense.shape == (len(batch.label), data.schema.num_dense)
        assert batch.sparse.keys() == list(data.schema.sparse_names)
        assert batch.sparse.stride() == len(batch.label)


def test_an_empty_split_has_no_steps(tmp_path: Path) -> None:
    stream = PreparedSet(make_prepared_set(tmp_path / "set", [[10]], eval_files=[])).batches("test", BatchOrder())
    assert stream.num_steps == 0
    assert list(stream) == []


def test_impossible_positions_are_refused(folder: Path) -> None:
    data = PreparedSet(folder)
    with pytest.raises(ConfigError, match="the epoch has 5 steps"):
        data.batches("train", BatchOrder(batch_size=4), start_step=6)
    assert list(data.batches("train", BatchOrder(batch_size=4), start_step=5)) == []
    for order in ({"rank": 1}, {"batch_size": 0}, {"micro_batches": 0}, {"seed": -1}):
        with pytest.raises(ConfigError):
            BatchOrder(**order)
