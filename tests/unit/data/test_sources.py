"""Goal: MovieLens and Frappe give the documented rows, features and splits in every file format. Layer: data sources."""

import importlib.util
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.raw import write_frappe, write_lines, write_movielens_1m, write_movielens_100k
from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import Coded, RawBlock
from torchrec_kstep.data.preparation import prepare
from torchrec_kstep.data.sources import open_source
from torchrec_kstep.data.sources.parquet import read_table
from torchrec_kstep.errors import DataError
from torchrec_kstep.types import SPLITS


def read(name: str, source: Path | str, max_bad_lines: int = 0) -> dict[str, RawBlock]:
    """All rows of a source, by split."""
    config = DataConfig(name=name, source=str(source))
    blocks = list(open_source(config).blocks(BadLines(max_bad_lines)))
    return {f"{index}:{split}": block for index, block in enumerate(blocks) for split in ("all",)}


def only_block(name: str, source: Path | str, max_bad_lines: int = 0) -> RawBlock:
    (block,) = read(name, source, max_bad_lines).values()
    return block


def values(coded: Coded) -> list:
    """Raw values in row order: None = missing, a list per bag."""
    flat = [None if code < 0 else coded.values[code].item() for code in coded.codes.tolist()]
    if coded.offsets is None:
        return flat
    return [flat[begin:end] for begin, end in zip(coded.offsets[:-1], coded.offsets[1:], strict=True)]


def test_movielens_100k_joins_users_and_items_in_the_order_of_the_reference_split(tmp_path: Path) -> None:
    block = only_block("movielens_100k", write_movielens_100k(tmp_path))
    row = np.random.RandomState(2026).permutation(60)
    assert block.label.tolist() == [int(1 + r % 5 >= 4) for r in row]
    user, item, gender, age, occupation, zip_prefix, genres, year = map(values, block.sparse)
    assert user == [1 + r % 6 for r in row]
    assert item == [1 + r // 6 % 5 for r in row]
    assert gender == ["MF"[u % 2] for u in user]
    assert age == [20 + u for u in user]
    assert set(occupation) == {"writer"}
    assert zip_prefix == ["T8" if u == 3 else f"0{u}" for u in user]
    assert genres == [{1: ["Animation", "Children's", "Comedy"], 2: [None]}.get(i, ["Drama"]) for i in item]
    assert year == [{1: "1995", 2: None}.get(i, "1990") for i in item]
    assert block.split is not None
    assert block.split.tolist() == [0] * 48 + [1] * 6 + [2] * 6


def test_movielens_1m_is_the_same_from_text_and_from_parquet(tmp_path: Path) -> None:
    text = write_movielens_1m(tmp_path / "text")
    tables = tmp_path / "parquet"
    tables.mkdir()
    ratings = [line.split("::") for line in (text / "ratings.dat").read_text().split()]
    users = [line.split("::") for line in (text / "users.dat").read_text().split()]
    items = [line.split("::") for line in (text / "movies.dat").read_text("latin-1").splitlines()]
    columns = {
        "ratings": {
            "user_id": [int(r[0]) for r in ratings],
            "item_id": [int(r[1]) for r in ratings],
            "rating": [int(r[2]) for r in ratings],
        },
        "users": {
            "user_id": [int(u[0]) for u in users],
            **{name: [u[index] for u in users] for index, name in enumerate(("gender", "age", "occupation", "zip"), start=1)},
        },
        "items": {"item_id": [int(i[0]) for i in items], "title": [i[1] for i in items], "genres": [i[2] for i in items]},
    }
    for name, table in columns.items():
        pq.write_table(pa.table(table), tables / f"{name}.parquet")
    from_text, from_parquet = only_block("movielens_1m", text), only_block("movielens_1m", tables)
    assert from_text.label.tolist() == from_parquet.label.tolist()
    assert [values(column) for column in from_text.sparse] == [values(column) for column in from_parquet.sparse]
    item, year = values(from_text.sparse[1]), values(from_text.sparse[7])
    assert {pair for pair in zip(item, year, strict=True) if pair[0] < 4} == {(1, "1995"), (2, "2000"), (3, None)}
    order = sorted(range(60), key=lambda r: (1 + r % 6, 1 + r // 6 % 5))[::1]
    assert sorted(values(from_text.sparse[0])) == sorted(1 + r % 6 for r in order)


def test_frappe_text_and_table_keep_the_split_of_the_source(tmp_path: Path) -> None:
    folder = write_frappe(tmp_path / "text")
    blocks = list(read("frappe", folder).values())
    assert [block.num_rows for block in blocks] == [40, 12, 8]
    assert [set(block.split.tolist()) for block in blocks if block.split is not None] == [{0}, {1}, {2}]
    names = {0: "train", 1: "valid", 2: "test"}
    table = {f"f{c}": [v for block in blocks for v in values(block.sparse[c])] for c in range(10)}
    table |= {
        "label": [label for block in blocks for label in block.label.tolist()],
        "split": [names[split] for split, block in enumerate(blocks) for _ in range(block.num_rows)],
    }
    pq.write_table(pa.table(table), tmp_path / "frappe.parquet")
    block = only_block("frappe", tmp_path / "frappe.parquet")
    assert block.label.tolist() == table["label"]
    assert [values(column) for column in block.sparse] == [table[f"f{c}"] for c in range(10)]
    assert block.split is not None
    assert np.bincount(block.split).tolist() == [40, 12, 8]


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("ml-100k.inter", "1\t2\t3", r"ml-100k\.inter:62: expected 4 columns, got 3"),
        ("ml-100k.inter", "x\t2\t3\t4", r"ml-100k\.inter:62: column 1: expected a whole number, got 'x'"),
        ("ml-100k.inter", "1\t2\tnan\t4", r"column 3: expected a whole number, got 'nan'"),
        ("ml-100k.inter", "99\t2\t3\t4", r"user 99 has ratings but no entry among the users"),
        ("ml-100k.inter", "1\t99\t3\t4", r"item 99 has ratings but no entry among the items"),
        ("ml-100k.user", "7\told\tM\twriter\t1", r"ml-100k\.user:8: column 2: expected a whole number, got 'old'"),
        ("ml-100k.item", "6\tFilm", r"ml-100k\.item:7: expected 4 columns, got 2"),
    ],
)
def test_malformed_movielens_lines_are_named(tmp_path: Path, file: str, line: str, message: str) -> None:
    folder = write_movielens_100k(tmp_path)
    path = folder / file
    path.write_text(path.read_text() + line + "\n\n")
    with pytest.raises(DataError, match=message):
        only_block("movielens_100k", folder)
    if "no entry" not in message:
        assert only_block("movielens_100k", folder, max_bad_lines=1).num_rows == 60


@pytest.mark.parametrize("line", ["1 1:1", "2 0:1 100:1 200:1 300:1 400:1 500:1 600:1 700:1 800:1 900:1", "1 0:1 100:x" + " 5:1" * 8, ""])
def test_malformed_frappe_lines_are_named(tmp_path: Path, line: str) -> None:
    folder = write_frappe(tmp_path)
    path = folder / "frappe.test.libfm"
    path.write_text(path.read_text() + line + "\n")
    if line:
        with pytest.raises(DataError, match=r"frappe\.test\.libfm:9: "):
            read("frappe", folder)
    assert sum(block.num_rows for block in read("frappe", folder, max_bad_lines=1).values()) == 60


@pytest.mark.parametrize("name", ["movielens_1m", "frappe"])
def test_absent_files_are_named_with_the_forms_that_are_understood(tmp_path: Path, name: str) -> None:
    for source in ("", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(DataError, match=r"data\.source"):
            only_block(name, source)


def test_another_header_is_refused(tmp_path: Path) -> None:
    folder = write_movielens_100k(tmp_path)
    write_lines(folder / "ml-100k.inter", ["user_id:token\trating:float", "1\t2"])
    with pytest.raises(DataError, match=r"ml-100k\.inter:1: expected the header"):
        only_block("movielens_100k", folder)
    (folder / "ml-100k.user").unlink()
    with pytest.raises(DataError, match=r"lacks ml-100k\.user"):
        only_block("movielens_100k", folder)


def test_the_copy_inside_recbole_has_the_known_size_and_rate(tmp_path: Path) -> None:
    if importlib.util.find_spec("recbole") is None:
        pytest.skip("recbole, which carries MovieLens-100K, is not installed")
    manifest = prepare(DataConfig(name="movielens_100k", path=str(tmp_path / "set")))
    assert [manifest.splits[split].num_rows for split in SPLITS] == [80_000, 10_000, 10_000]
    assert sum(manifest.splits[split].num_positive for split in SPLITS) == 55_375


def test_the_real_frappe_has_the_known_sizes(tmp_path: Path, real_data: Path) -> None:
    source = real_data / "frappe" / "frappe_recon.parquet"
    manifest = prepare(DataConfig(name="frappe", source=str(source), path=str(tmp_path / "set")))
    assert [manifest.splits[split].num_rows for split in SPLITS] == [202_794, 57_722, 28_860]


def test_the_real_movielens_1m_has_the_known_sizes_and_split(tmp_path: Path, real_data: Path) -> None:
    manifest = prepare(DataConfig(name="movielens_1m", source=str(real_data / "ml1m"), path=str(tmp_path / "set")))
    assert [manifest.splits[split].num_rows for split in SPLITS] == [800_167, 100_021, 100_021]
    ratings = pq.read_table(real_data / "ml1m" / "ratings.parquet").sort_by([("user_id", "ascending"), ("item_id", "ascending")])
    test_rows = np.random.RandomState(2026).permutation(len(ratings))[900_188:]
    expected = (ratings.column("rating").to_numpy() >= 4)[test_rows]
    np.testing.assert_array_equal(pq.read_table(tmp_path / "set" / "test").column("label").to_numpy(), expected)


@pytest.mark.parametrize("wrong", [[1.0, None], [1.0, float("nan")], ["1", "x"], [[1], [2]]], ids=str)
def test_a_column_of_numbers_that_holds_anything_else_is_named(tmp_path: Path, wrong: list) -> None:
    """Otherwise an empty label would count as a negative one."""
    path = tmp_path / "table.parquet"
    for kind in (pa.int64(), pa.float64()):
        pq.write_table(pa.table({"fine": [1, 2], "rating": wrong}), path)
        with pytest.raises(DataError, match=r"table\.parquet, column rating: expected"):
            read_table(path, {"fine": kind, "rating": kind})


def test_columns_of_other_names_are_told_beside_those_that_are_there(tmp_path: Path) -> None:
    """Otherwise pyarrow answers, with FieldRef and the columns that it adds for itself."""
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"user": [1, 2], "label": [0, 1]}), path)
    with pytest.raises(DataError, match=r"mine\.parquet lacks the columns f0, f1: expected f0, f1, label, it has user, label$"):
        read_table(path, {"f0": pa.int64(), "f1": pa.int64(), "label": pa.int64()})


def test_a_folder_with_a_part_of_the_files_is_told_which_are_lacking(tmp_path: Path) -> None:
    (write_movielens_1m(tmp_path) / "users.dat").unlink()
    with pytest.raises(DataError, match=r"lacks users\.dat"):
        open_source(DataConfig(name="movielens_1m", source=str(tmp_path)))
