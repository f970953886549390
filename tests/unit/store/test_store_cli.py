"""Layer 2, in process: every command of `python -m torchrec_kstep.store`, on small stores, sound and damaged."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from tests.tiers import ADAM, assert_same_state, file_hashes, open_tiered, state_of, store_paths, train, uniform_table
from torchrec_kstep import store
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.storage.export import export
from torchrec_kstep.storage.maintenance import find_stores
from torchrec_kstep.storage.snapshot import Snapshot
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB, parse_bytes
from torchrec_kstep.world import World

TABLES = [uniform_table("user", 3000, 8, 0), uniform_table("a/b", 40, 16, 1)]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, RowGroup]:
    """A closed store with two snapshots, and the same rows in DRAM."""
    expected = RowGroup.in_dram(TABLES, ADAM)
    with open_tiered(tmp_path, TABLES, dram_bytes=4 * KIB) as group:
        for step in range(1, 5):
            for table, rows in ((0, torch.arange(step, 3000, 2)), (1, torch.arange(10))):
                train(group, table, rows, step)
                train(expected, table, rows, step)
            if step == 2:
                group.snapshot("first")
        group.snapshot("second", note="a note")
    return tmp_path, expected


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = store.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_inspect(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = trained
    before = file_hashes(folder)
    status, out, _ = run(capsys, "inspect", folder / "ssd", "--svg", folder / "map.svg")
    assert status == 0
    for part in (
        "snapshot first: 3,009 rows",
        "a note",
        "snapshot second, table by table",
        "weight:f32[8] m:f32[8] v:f32[8]",
        "write amplification",
        "rows of 96 bytes",
        "rows of 192 bytes",
        "█",
    ):
        assert part in out, part
    tree = ElementTree.parse(folder / "map.svg")
    assert tree.getroot().tag.endswith("svg")
    (folder / "map.svg").unlink()
    assert file_hashes(folder) == before
    status, out, _ = run(capsys, "inspect", *store_paths(folder), "--snapshot", "first")
    assert status == 0
    assert "snapshot first, table by table" in out


def test_inspect_tells_that_a_run_has_the_store_open(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = trained
    assert "open for training now" not in run(capsys, "inspect", folder / "ssd")[1]
    with open_tiered(folder, TABLES, restore="second"):
        status, out, _ = run(capsys, "inspect", folder / "ssd")
        assert status == 0
        assert "open for training now" in out
        assert run(capsys, "verify", folder / "ssd")[0] == 0
        assert run(capsys, "export", folder / "ssd", "--out", folder / "out")[0] == 0
        status, _, err = run(capsys, "compact", folder / "ssd")
        assert status == store.EXIT_DAMAGE
        assert "LOCK" in err


def test_verify_finds_every_kind_of_damage(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = trained
    status, out, _ = run(capsys, "verify", folder / "ssd")
    assert status == 0
    assert out.count("sound") == 2
    snapshot = Path(store_paths(folder)[0]) / "snapshots" / "second"
    segments = sorted(snapshot.glob("log-*/seg-*.seg"))
    places = [(segments[0], 4096 + 20), (segments[0], segments[0].stat().st_size - 10), (segments[-1], 50), (snapshot / "MANIFEST", 30)]
    for file, offset in places:
        original = file.read_bytes()
        damaged = bytearray(original)
        damaged[offset] ^= 0x40
        file.write_bytes(damaged)
        status, out, _ = run(capsys, "verify", folder / "ssd", "--snapshot", "second")
        file.write_bytes(original)
        assert status == store.EXIT_DAMAGE, f"{file} at {offset}"
        assert str(file) in out, out
    hidden = segments[0].rename(segments[0].with_suffix(".away"))
    status, out, err = run(capsys, "verify", folder / "ssd")
    assert status == store.EXIT_DAMAGE
    assert str(segments[0]) in out + err
    hidden.rename(segments[0])
    assert run(capsys, "verify", folder / "ssd")[0] == 0


def test_compact_keeps_the_rows_and_gives_space_back(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    folder, expected = trained
    status, out, _ = run(capsys, "compact", folder / "ssd", "--into", "small")
    assert status == 0, out
    assert Snapshot.names(store_paths(folder)) == ["first", "small"]
    small = Snapshot.open(store_paths(folder), "small")
    assert small.note == "a note"
    assert all(segment.live_share == 1 for segment in small.segments())
    assert not small.verify().failures
    with open_tiered(folder, TABLES, restore="small") as group:
        assert_same_state(group, expected)
        train(group, 0, torch.arange(3000), 5)
        train(expected, 0, torch.arange(3000), 5)
        assert_same_state(group, expected)
    status, _, err = run(capsys, "compact", folder / "ssd", "--snapshot", "first", "--into", "small")
    assert status == store.EXIT_USAGE
    assert "exists" in err


def test_damage_stops_compaction_and_export_and_leaves_nothing_behind(
    trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    segment = sorted((Path(store_paths(folder)[0]) / "snapshots" / "second").glob("log-*/seg-*.seg"))[-1]
    damaged = bytearray(segment.read_bytes())
    damaged[4096 + 10] ^= 1
    segment.write_bytes(damaged)
    status, _, err = run(capsys, "compact", folder / "ssd")
    assert (status, str(segment) in err, "offset 4096" in err) == (1, True, True), err
    assert Snapshot.names(store_paths(folder)) == ["first", "second"]
    for file_format in ("parquet", "safetensors"):
        status, _, err = run(capsys, "export", folder / "ssd", "--out", folder / "out", "--format", file_format)
        assert (status, str(segment) in err) == (1, True), err
    assert not [path for path in (folder / "out").iterdir() if path.suffix == ".partial"]


@pytest.mark.parametrize("with_untouched", [False, True])
def test_export_to_parquet_and_safetensors(
    trained: tuple[Path, RowGroup], with_untouched: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = trained
    fields = state_of(expected)
    touched = {"user": torch.arange(1, 3000), "a/b": torch.arange(10)}
    extra = ["--with-untouched"] if with_untouched else []
    for file_format in ("parquet", "safetensors"):
        out = folder / file_format
        assert run(capsys, "export", folder / "ssd", "--out", out, "--format", file_format, *extra)[0] == 0
        assert sorted(path.name for path in out.iterdir()) == [f"a%2Fb.{file_format}", f"user.{file_format}"]
        for spec in TABLES:
            rows = torch.arange(spec.num_rows) if with_untouched else touched[spec.name]
            found = read_export(out, spec.name, file_format)
            assert torch.equal(found["row_id"].flatten(), rows)
            for field in ("weight", "m", "v"):
                assert torch.equal(found[field], fields[f"{spec.name}.{field}"][rows]), f"{file_format} {spec.name} {field}"


def read_export(folder: Path, table: str, file_format: str) -> dict[str, torch.Tensor]:
    path = folder / f"{table.replace('/', '%2F')}.{file_format}"
    if file_format == "safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    columns = pq.read_table(path)
    return {name: torch.tensor(columns[name].to_pylist()) for name in columns.column_names}


def test_export_streams_in_chunks(trained: tuple[Path, RowGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks give the same file content; memory is that of one chunk."""
    folder, expected = trained
    monkeypatch.setattr("torchrec_kstep.storage.export._CHUNK_BYTES", 96 * 100)
    seen: list[int] = []
    snapshot = Snapshot.open(store_paths(folder))
    for file_format in ("parquet", "safetensors"):
        seen.clear()
        export(snapshot, folder / "out", file_format, ["user"], ["weight"], progress=lambda _, rows: seen.append(rows))
        assert seen[:3] == [100, 200, 300]
        assert seen[-1] == 2999
        found = read_export(folder / "out", "user", file_format)
        assert set(found) == {"row_id", "weight"}
        assert torch.equal(found["weight"], expected.read(0, torch.arange(1, 3000)))


def test_export_refuses_what_is_not_there(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = trained
    status, _, err = run(capsys, "export", folder / "ssd", "--out", folder / "out", "--table", "item")
    assert (status, "no table 'item'; it has 'user', 'a/b'" in err) == (1, True)
    status, _, err = run(capsys, "export", folder / "ssd", "--out", folder / "out", "--field", "sum")
    assert (status, "no field 'sum'; it has m, v, weight" in err) == (2, True)
    (folder / "taken").write_text("")
    status, _, err = run(capsys, "export", folder / "ssd", "--out", folder / "taken")
    assert (status, str(folder / "taken") in err) == (1, True)
    assert not list(folder.rglob("*.partial"))


def test_a_place_without_store_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["verify"], ["compact"], ["export", "--out", tmp_path]):
        status, _, err = run(capsys, *command, tmp_path)
        assert status == 1
        assert f"{tmp_path} holds no row store" in err
    assert not list(tmp_path.iterdir())
    open_tiered(tmp_path, TABLES).close()
    assert "no snapshots" in run(capsys, "inspect", tmp_path / "ssd")[1]
    assert "has no snapshot" in run(capsys, "export", tmp_path / "ssd", "--out", tmp_path / "out")[2]


def test_paths_of_one_store_must_be_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TieredTables.open(TABLES, ADAM, TierConfig(0, [tmp_path / "a", tmp_path / "b"])) as group:
        group.snapshot("s")
    assert run(capsys, "verify", tmp_path / "a", tmp_path / "b")[0] == 0
    for paths in (["a"], ["b", "a"]):
        status, _, err = run(capsys, "verify", *(tmp_path / path for path in paths))
        assert status == 1
        assert "name all paths of the store, in its order" in err


def test_all_stores_of_a_run_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks and groups of tables: each has a store of its own below the paths of the run."""
    drives = [tmp_path / "a", tmp_path / "b"]
    for group in ("user", "item"):
        for rank in (0, 2, 10):
            tiers = TierConfig(0, [drive / group for drive in drives])
            with TieredTables.open(TABLES, ADAM, tiers, world=World(rank, 11, rank, 11)) as tables:
                train(tables, 0, torch.arange(10 + rank))
                tables.snapshot("s")
    names = [f"{group}/rank-{rank}" for group in ("item", "user") for rank in (0, 2, 10)]
    assert find_stores(drives) == [[str(drive / name) for drive in drives] for name in names]
    assert run(capsys, "verify", *drives)[1].count("sound") == 6
    assert run(capsys, "export", *drives, "--out", tmp_path / "out", "--format", "safetensors")[0] == 0
    for name in names:
        rows = read_export(tmp_path / "out" / name, "user", "safetensors")["row_id"]
        assert rows.numel() == 10 + int(name.rpartition("-")[2])
    status, _, err = run(capsys, "verify", drives[0], tmp_path)
    assert (status, "name all paths of one run" in err) == (1, True)
    assert run(capsys, "inspect", *drives, "--svg", tmp_path / "x.svg")[0] == store.EXIT_USAGE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "rows=10"], "expected rows=N,dim=N"),
        (["--table", "rows=ten,dim=8"], "'ten' is no number"),
        (["--table", "rows=1.5,dim=8"], "no whole number"),
        (["--table", "rows=nan,dim=8"], "'nan' is no whole number"),
        (["--table", "rows=inf,dim=8"], "'inf' is no whole number"),
        (["--table", "rows=1e400,dim=8"], "'1e400' is no whole number"),
        (["--table", "rows=10,dim=8,color=red"], "expected rows=N,dim=N"),
        (["--table", "rows=10,dim=8,touched=11"], "touched at most rows"),
        (["--table", "rows=10,dim=4096"], "dim 1 to 2048"),
    ],
)
def test_estimate_refuses_what_it_cannot_read(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "estimate", *arguments)
    assert (status, message in err) == (store.EXIT_USAGE, True), err


def test_estimate_of_a_large_table_is_immediate(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "estimate", "--table", "rows=1e9,dim=64", "--optimizer", "adam", "--dram", "8GiB")
    assert status == 0
    assert "table0" in out
    assert "4.0 bytes a row" in out
    status, out, _ = run(capsys, "estimate", "--table", "rows=1e6,dim=16,count=3,name=f", "--table", "rows=5,dim=8", "--dram", "1GiB")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["f_0", "f_1", "f_2", "table3"]


def test_the_module_runs_as_a_program(trained: tuple[Path, RowGroup]) -> None:
    command = [sys.executable, "-m", "torchrec_kstep.store", "verify", str(trained[0] / "ssd")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sound") == 2
    done = subprocess.run([*command[:3], "estimate", "--dram", "8"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2
    assert "cannot read '8' as a size" in done.stderr


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_inspect_tells_of_a_snapshot_that_cannot_be_opened(
    damage: str, trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    (manifest,) = trained[0].rglob("second/MANIFEST")
    content = manifest.read_bytes()
    if damage == "missing":
        manifest.unlink()
    else:
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        manifest.write_bytes({"truncated": content[:half], "flipped": flipped, "empty": b""}[damage])
    status, out, _ = run(capsys, "inspect", trained[0] / "ssd")
    assert status == store.EXIT_DAMAGE
    assert "snapshot second: cannot be opened: " in out
    assert "snapshot first, table by table" in out
    status, out, _ = run(capsys, "verify", trained[0] / "ssd")
    assert (status, "snapshot first: " in out, "snapshot second: cannot be opened" in out) == (store.EXIT_DAMAGE, True, True)
    shutil.rmtree(manifest.parent.parent / "first")
    status, out, _ = run(capsys, "inspect", trained[0] / "ssd")
    assert (status, "no snapshots" in out) == (store.EXIT_DAMAGE, False)


@pytest.mark.parametrize("arguments", [["--snapshot", ""], ["--into", ""]])
def test_an_empty_name_does_not_stand_for_the_newest_snapshot(
    arguments: list[str], trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    before = file_hashes(trained[0])
    with pytest.raises(SystemExit, match="2"):
        store.main(["compact", str(trained[0] / "ssd"), *arguments])
    assert f"argument {arguments[0]}: expected the name of a snapshot" in capsys.readouterr().err
    assert file_hashes(trained[0]) == before


def test_a_picture_that_cannot_be_written_is_told(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "inspect", trained[0] / "ssd", "--svg", trained[0] / "nowhere" / "a.svg")
    assert status == 2
    assert "the picture cannot be written: No such file or directory" in err


def test_live_bytes_are_a_part_of_all(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "compact", trained[0] / "ssd")[0] == 0
    (live, total), *_ = re.findall(r"live (\S+ \S+) of (\S+ \S+) in", run(capsys, "inspect", trained[0] / "ssd")[1])
    assert 0.95 * parse_bytes(total) < parse_bytes(live) <= parse_bytes(total)


def test_compacting_what_is_not_there_names_what_was_asked_for(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "compact", trained[0] / "ssd", "--snapshot", "a/b")
    assert status == store.EXIT_USAGE
    assert "a/b" in err
    assert "a/b-compact" not in err


def test_a_damaged_header_comes_with_what_to_do(trained: tuple[Path, RowGroup], capsys: pytest.CaptureFixture[str]) -> None:
    (header, *_) = (trained[0] / "ssd").rglob("STORE")
    header.write_text(header.read_text()[:-20])
    status, _, err = run(capsys, "inspect", trained[0] / "ssd")
    assert status == store.EXIT_DAMAGE
    assert "put it back from a copy" in err
