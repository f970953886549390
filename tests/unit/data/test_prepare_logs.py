"""Goal: every kind of malformed log line is named by file and line, or handled as documented. Layer: preparation of text logs."""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.unit.data.raw import AVAZU_HEADER, avazu_lines, criteo_config, criteo_fields, criteo_lines, write_lines
from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data import delimited
from torchrec_kstep.data.encode import signed_log1p
from torchrec_kstep.data.manifest import MISSING_ID, NUM_RESERVED_IDS, UNSEEN_ID, Manifest
from torchrec_kstep.data.preparation import prepare
from torchrec_kstep.data.sources import criteo
from torchrec_kstep.errors import DataError
from torchrec_kstep.types import SPLITS


def with_field(index: int, text: str, row: int = 1) -> str:
    fields = criteo_fields(row)
    fields[index] = text
    return "\t".join(fields)


def columns_of(folder: Path, split: str = "train") -> dict[str, list]:
    return pq.read_table(folder / split).to_pydict()


BAD_LINES: dict[str, tuple[str, str]] = {
    "no label column": ("\t".join(criteo_fields(1)[1:]), "expected 40 columns, got 39.*without labels"),
    "a column too many": (with_field(39, "0000000a\t0000000b"), "expected 40 columns, got 41"),
    "header": ("\t".join(name for name, _ in criteo.FORMAT.columns), r"column 1 \(label\): expected 0 or 1, got 'label'"),
    "commas": (",".join(criteo_fields(1)), "expected 40 columns, got 1 separated by tabs; the line is separated by commas"),
    "blank label": (with_field(0, ""), r"column 1 \(label\): expected 0 or 1, got ''"),
    "NaN label": (with_field(0, "NaN"), r"column 1 \(label\): expected 0 or 1, got 'NaN'"),
    "label 2": (with_field(0, "2"), r"column 1 \(label\): expected 0 or 1, got '2'"),
    "negative label": (with_field(0, "-1"), r"column 1 \(label\): expected 0 or 1, got '-1'"),
    "fractional integer": (with_field(3, "1.5"), r"column 4 \(I3\): expected a whole number.*got '1.5'"),
    "NaN integer": (with_field(3, "nan"), r"column 4 \(I3\): expected a whole number.*got 'nan'"),
    "infinite integer": (with_field(13, "inf"), r"column 14 \(I13\): expected a whole number.*got 'inf'"),
    "integer of 65 bits": (with_field(2, "9223372036854775808"), r"column 3 \(I2\): expected a whole number of at most 64 bits.*got '9223"),
    "hexadecimal id in an integer": (with_field(1, "68fd1e6f"), r"column 2 \(I1\): expected a whole number"),
    "not hexadecimal": (with_field(14, "0xZZ"), r"column 15 \(C1\): expected 1 to 8 hexadecimal digits.*got '0xZZ'"),
    "nine digits": (with_field(39, "123456789"), r"column 40 \(C26\): expected 1 to 8 hexadecimal digits.*got '123456789'"),
    "blank in an id": (with_field(20, "68fd 1e6"), r"column 21 \(C7\): expected 1 to 8 hexadecimal digits"),
    "zero byte": (with_field(20, "68\x001e6"), r"column 21 \(C7\): expected 1 to 8 hexadecimal digits"),
    "no text": ("\xff\xfe\x00", "expected 40 columns, got 1"),
    "cut short": ("\t".join(criteo_fields(1))[:60], "expected 40 columns, got"),
    "spaces only": ("   ", "expected 40 columns, got 1"),
    "return inside": (with_field(20, "68f\r1e6"), r"column 21 \(C7\): expected 1 to 8 hexadecimal digits"),
}


@pytest.fixture(scope="module")
def clean_rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list]]:
    folder = tmp_path_factory.mktemp("clean")
    prepare(criteo_config(write_lines(folder / "train.txt", criteo_lines(80)), folder / "set"))
    return rows_and_columns(folder / "set")


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, 17) for kind in BAD_LINES), ("header", 0), ("not hexadecimal", 80), ("no label column", 0), ("a column too many", 80)],
)
def test_a_malformed_line_is_named_and_can_be_left_out(
    tmp_path: Path, kind: str, place: int, clean_rows: list[dict[str, list]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "read_delimited", small_blocks)
    bad, reason = BAD_LINES[kind]
    lines = criteo_lines(80)
    source = write_lines(tmp_path / "train.txt", [*lines[:place], bad, *lines[place:]])
    with pytest.raises(DataError, match=rf"train\.txt:{place + 1}: {reason}"):
        prepare(criteo_config(source, tmp_path / "set"))
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]
    lenient = prepare(criteo_config(source, tmp_path / "set", max_bad_lines=1))
    assert lenient.num_bad_lines == 1
    assert f":{place + 1}: " in lenient.bad_lines[0]
    assert rows_and_columns(tmp_path / "set") == clean_rows


def small_blocks(files, text_format, bad_lines, max_bad_lines):
    return delimited.read_delimited(files, text_format, bad_lines, max_bad_lines, block_bytes=2000)


def rows_and_columns(folder: Path) -> list[dict[str, list]]:
    return [columns_of(folder, split) for split in SPLITS]


def test_a_budget_counts_over_blocks_and_files_and_names_the_line_beyond_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "read_delimited", small_blocks)
    for day in range(2):
        lines = criteo_lines(60)
        lines[5] = lines[50] = "broken"
        write_lines(tmp_path / "days" / f"day_{day}", lines)
    manifest = prepare(criteo_config(tmp_path / "days", tmp_path / "set", max_bad_lines=4))
    assert manifest.num_bad_lines == 4
    assert [message.rsplit("/", 1)[1].split(": ")[0] for message in manifest.bad_lines] == ["day_0:6", "day_0:51", "day_1:6", "day_1:51"]
    assert sum(manifest.splits[split].num_rows for split in SPLITS) == 116
    with pytest.raises(DataError, match=r"day_1:51: expected 40 columns, got 1; this is malformed line 4 and data.max_bad_lines=3"):
        prepare(criteo_config(tmp_path / "days", tmp_path / "set2", max_bad_lines=3))


@pytest.mark.parametrize(
    "rewrite",
    [
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="CRLF"),
        pytest.param(lambda text: text + "\n", id="blank last line"),
        pytest.param(lambda text: text + "\n\r\n\n", id="blank last lines"),
        pytest.param(lambda text: text.rstrip("\n"), id="no last line end"),
        pytest.param(lambda text: "\n" + text, id="blank first line"),
        pytest.param(str.upper, id="capital digits"),
    ],
)
def test_harmless_variants_give_the_same_rows(tmp_path: Path, rewrite: Callable[[str], str]) -> None:
    source = write_lines(tmp_path / "plain.txt", criteo_lines(120))
    other = tmp_path / "other.txt"
    other.write_bytes(rewrite(source.read_text()).encode())
    prepare(criteo_config(source, tmp_path / "a"))
    prepare(criteo_config(other, tmp_path / "b"))
    assert rows_and_columns(tmp_path / "a") == rows_and_columns(tmp_path / "b")


def test_files_of_several_days_plain_and_packed_are_read_in_order_whatever_the_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(criteo_config(write_lines(tmp_path / "one.txt", criteo_lines(150)), tmp_path / "one"))
    write_lines(tmp_path / "days" / "day_0.gz", criteo_lines(70))
    write_lines(tmp_path / "days" / "day_1", criteo_lines(80, first_row=70))
    monkeypatch.setattr(criteo, "read_delimited", small_blocks)
    for source in (tmp_path / "days", tmp_path / "days" / "day_*"):
        target = tmp_path / f"set{source.name[-1]}"
        prepare(criteo_config(source, target))
        assert rows_and_columns(target) == rows_and_columns(tmp_path / "one")


def test_a_packed_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "day_0.gz", criteo_lines(500))
    source.write_bytes(source.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"cannot read .*day_0\.gz"):
        prepare(criteo_config(source, tmp_path / "set"))


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "read_delimited", small_blocks)
    source = tmp_path / "train.txt"
    source.write_bytes(b"x" * 10_000)
    with pytest.raises(DataError, match=r"train\.txt: no line end within"):
        prepare(criteo_config(source, tmp_path / "set"))


@pytest.mark.parametrize("content", ["", "\n", "\n\n\r\n"])
def test_a_log_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    source = tmp_path / "train.txt"
    source.write_text(content)
    with pytest.raises(DataError, match=rf"no rows to train on: {re.escape(str(source))} gave 0 rows"):
        prepare(criteo_config(source, tmp_path / "set"))
    assert not (tmp_path / "set").exists()


def test_missing_sources_are_named(tmp_path: Path) -> None:
    for source in ("", str(tmp_path / "nothing.txt"), str(tmp_path / "no_*")):
        with pytest.raises(DataError, match=r"data\.source"):
            prepare(DataConfig(name="criteo", source=source, path=str(tmp_path / "set")))


@pytest.mark.parametrize("integer", ["-3", "-4", "-1000", "", "2147483648", "9223372036854775807", "-9223372036854775808", "0"])
def test_every_integer_gives_a_finite_number(tmp_path: Path, integer: str) -> None:
    lines = [with_field(2, integer, row=row) for row in range(40)]
    prepare(criteo_config(write_lines(tmp_path / "train.txt", lines), tmp_path / "set"))
    value = int(integer or "0")
    expected = np.sign(value) * np.log1p(abs(float(value)))
    np.testing.assert_allclose(columns_of(tmp_path / "set")["I2"], expected, rtol=1e-6)


def test_values_keep_their_identity_and_missing_and_unseen_get_ids_of_their_own(tmp_path: Path) -> None:
    lines = criteo_lines(300)
    manifest = prepare(criteo_config(write_lines(tmp_path / "train.txt", lines), tmp_path / "set", min_count=3))
    vocabulary = pq.read_table(tmp_path / "set" / "vocabulary" / "C26.parquet").to_pydict()
    id_of = dict(zip(vocabulary["value"], vocabulary["id"], strict=True))
    assert sorted(id_of.values()) == list(range(NUM_RESERVED_IDS, manifest.sparse[25].num_rows))
    by_split = {split: columns_of(tmp_path / "set", split) for split in SPLITS}
    raw = {tuple(columns[0:2]): columns for columns in (line.split("\t") for line in lines)}
    assert len(raw) > 1
    texts = sorted(line.split("\t")[39] for line in lines)
    ids = sorted(row_id for split in SPLITS for row_id in by_split[split]["C26"])
    num_missing = texts.count("")
    assert ids.count(MISSING_ID) == num_missing > 0
    kept = [id_of[int(text, 16)] for text in texts if text and int(text, 16) in id_of]
    assert sorted(kept) == [row_id for row_id in ids if row_id >= NUM_RESERVED_IDS]
    counts = {value: by_split["train"]["C26"].count(row_id) for value, row_id in id_of.items()}
    assert min(counts.values()) >= 3
    assert ids.count(UNSEEN_ID) == len(texts) - num_missing - len(kept)
    shares = manifest.sparse[25].missing_share
    assert shares["train"] == pytest.approx(by_split["train"]["C26"].count(MISSING_ID) / len(by_split["train"]["C26"]), abs=1e-6)


def test_values_of_the_held_out_rows_do_not_enter_the_vocabulary(tmp_path: Path) -> None:
    lines = [with_field(14, f"{row + 1:08x}", row=row) for row in range(200)]
    manifest = prepare(criteo_config(write_lines(tmp_path / "train.txt", lines), tmp_path / "set"))
    assert manifest.sparse[0].num_values == manifest.splits["train"].num_rows
    for split in ("validation", "test"):
        assert set(columns_of(tmp_path / "set", split)["C1"]) == {UNSEEN_ID}
        assert manifest.sparse[0].unseen_share[split] == 1
    assert manifest.sparse[0].unseen_share["train"] == 0


def test_hashing_needs_no_vocabulary_and_stays_in_its_table(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "train.txt", criteo_lines(200))
    manifest = prepare(criteo_config(source, tmp_path / "set", encoding="hash", num_hash_rows=10))
    assert {column.num_rows for column in manifest.sparse} == {10}
    ids = [row_id for split in SPLITS for row_id in columns_of(tmp_path / "set", split)["C26"]]
    assert max(ids) < 10
    assert UNSEEN_ID not in ids
    assert not (tmp_path / "set" / "vocabulary").exists()
    exact = prepare(criteo_config(source, tmp_path / "exact", encoding="hash", num_hash_rows=3_000_000_000))
    assert exact.sparse[0].num_rows == 3_000_000_000
    large = columns_of(tmp_path / "exact")["C26"]
    assert max(large) > 2**31


def test_row_groups_have_one_size_but_the_last(tmp_path: Path) -> None:
    manifest = prepare(criteo_config(write_lines(tmp_path / "train.txt", criteo_lines(500)), tmp_path / "set"))
    for split in SPLITS:
        sizes = [rows for part in manifest.files(split) for rows in part.row_group_rows]
        assert set(sizes[:-1]) <= {32}
        assert 1 <= sizes[-1] <= 32
        assert sum(sizes) == manifest.splits[split].num_rows


def test_avazu_hours_become_hour_of_day_and_day_of_week(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "train", [AVAZU_HEADER, *avazu_lines(100)])
    manifest = prepare(DataConfig(name="avazu", source=str(source), path=str(tmp_path / "set"), validation_fraction=0, test_fraction=0))
    assert len(manifest.sparse) == 23
    columns = columns_of(tmp_path / "set")
    for name, expected in (("hour_of_day", [row % 24 for row in range(100)]), ("day_of_week", [(1 + row % 7) % 7 for row in range(100)])):
        vocabulary = pq.read_table(tmp_path / "set" / "vocabulary" / f"{name}.parquet").to_pydict()
        value_of = dict(zip(vocabulary["id"], vocabulary["value"], strict=True))
        assert [value_of[row_id] for row_id in columns[name]] == expected
    assert columns["label"] == [row % 2 for row in range(100)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (avazu_lines(3), r"train:1: expected the header 'id,click"),
        ([], r"train:1: expected the header"),
        ([AVAZU_HEADER, *avazu_lines(3), avazu_lines(1)[0] + ",7"], r"train:5: expected 24 columns, got 25"),
        (
            [AVAZU_HEADER, *avazu_lines(3), avazu_lines(1)[0].replace("14102100", "14133125")],
            r"train:5: column 3 \(hour\): expected YYMMDDHH",
        ),
        ([AVAZU_HEADER, *avazu_lines(3), avazu_lines(1)[0].replace(",14102100,", ",,")], r"train:5: column 3 \(hour\): expected YYMMDDHH"),
        ([AVAZU_HEADER, avazu_lines(1)[0].replace(",1005,", ",x,")], r"train:2: column 4 \(C1\): expected a whole number"),
    ],
)
def test_malformed_avazu_files_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    source = write_lines(tmp_path / "train", lines)
    with pytest.raises(DataError, match=message):
        prepare(DataConfig(name="avazu", source=str(source), path=str(tmp_path / "set")))


def test_the_transform_is_odd_and_finite() -> None:
    values = np.array([0, 1, -1, 2.0**63, -(2.0**63), struct.unpack("<f", b"\xff\xff\x7f\x7f")[0], np.nan])
    result = signed_log1p(values)
    assert np.isfinite(result).all()
    assert result[-1] == 0
    np.testing.assert_array_equal(signed_log1p(-values), -result)


def test_the_real_sample_is_read_whole(tmp_path: Path, real_data: Path) -> None:
    table = pq.read_table(real_data / "criteo_sample" / "all_parts.parquet").to_pydict()
    names = [name for name, _ in criteo.FORMAT.columns]
    rows = list(zip(*(table[name] for name in names), strict=True))
    source = write_lines(tmp_path / "train.txt", ["\t".join(text or "" for text in row) for row in rows])
    num_with_decimals = sum(any("." in (text or "") for text in row) for row in rows)  # some rows once passed through a table of floats
    manifest: Manifest = prepare(criteo_config(source, tmp_path / "set", max_bad_lines=num_with_decimals, rows_per_row_group=4096))
    assert manifest.num_bad_lines == num_with_decimals
    assert sum(manifest.splits[split].num_rows for split in SPLITS) == len(rows) - num_with_decimals
    assert manifest.dense[11].missing_share["train"] == pytest.approx(0.78, abs=0.02)
    assert manifest.sparse[21].missing_share["train"] == pytest.approx(0.82, abs=0.06)
