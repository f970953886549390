"""Goal: a prepared set is complete or absent, made once, and never opened after its sources changed. Layer: preparation."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.unit.data.raw import criteo_config, criteo_lines, write_lines, write_movielens_100k
from torchrec_kstep.config.schema import DataConfig, PrepareConfig
from torchrec_kstep.data import ensure_prepared, open_dataset, passes
from torchrec_kstep.data.manifest import MANIFEST_NAME
from torchrec_kstep.data.preparation import prepare
from torchrec_kstep.errors import ConfigError, DataError
from torchrec_kstep.prepare import run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "raw" / "train.txt", criteo_lines(100))


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_the_same_sources_and_options_reuse_the_set(tmp_path: Path, source: Path) -> None:
    first = prepare(criteo_config(source, tmp_path / "set"))
    stamp = (tmp_path / "set" / MANIFEST_NAME).stat()
    assert prepare(criteo_config(source, tmp_path / "set")) == first
    assert prepare(criteo_config(source, tmp_path / "set", limit=5, shuffle=False, prefetch_batches=0)) == first  # options of the reader
    assert (tmp_path / "set" / MANIFEST_NAME).stat().st_mtime_ns == stamp.st_mtime_ns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_count": 2}, "min_count was 1, now 2"),
        ({"encoding": "hash"}, "encoding was vocabulary, now hash"),
        ({"rows_per_row_group": 64}, "rows_per_row_group was 32, now 64"),
        ({"split_seed": 1}, "split_seed was 2026, now 1"),
        ({"test_fraction": 0.2}, "test_fraction was 0.1, now 0.2"),
    ],
)
def test_other_options_are_refused_unless_overwritten(tmp_path: Path, source: Path, options: dict[str, object], message: str) -> None:
    before = prepare(criteo_config(source, tmp_path / "set"))
    with pytest.raises(DataError, match=message):
        prepare(criteo_config(source, tmp_path / "set", **options))
    after = prepare(criteo_config(source, tmp_path / "set", **options), overwrite=True)
    assert after.fingerprint != before.fingerprint
    assert not leftovers(tmp_path)


def test_a_set_with_lines_left_out_is_reused_only_within_the_budget(tmp_path: Path, source: Path) -> None:
    source.write_text(source.read_text() + "broken\n")
    first = prepare(criteo_config(source, tmp_path / "set", max_bad_lines=3))
    assert prepare(criteo_config(source, tmp_path / "set", max_bad_lines=1)) == first
    with pytest.raises(DataError, match=r"1 malformed lines left out, but data\.max_bad_lines=0"):
        prepare(criteo_config(source, tmp_path / "set"))


def test_a_changed_source_is_refused_in_preparation_and_in_training(tmp_path: Path, source: Path) -> None:
    prepare(criteo_config(source, tmp_path / "set"))
    text = source.read_text()
    source.write_text(text.replace(text[-3], "0" if text[-3] != "0" else "1"))
    for act in (prepare, ensure_prepared):
        with pytest.raises(DataError, match=r"file train\.txt was changed"):
            act(criteo_config(source, tmp_path / "set"))
    write_lines(source.parent / "more.txt", criteo_lines(3))
    with pytest.raises(DataError, match=r"file more\.txt is new"):
        prepare(criteo_config(source.parent, tmp_path / "set"))


def test_a_folder_that_is_no_prepared_set_is_never_replaced(tmp_path: Path, source: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="is no prepared set"):
        prepare(criteo_config(source, tmp_path / "mine"), overwrite=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_damaged_set_is_refused_and_can_be_overwritten(tmp_path: Path, source: Path) -> None:
    prepare(criteo_config(source, tmp_path / "set"))
    part = next((tmp_path / "set" / "train").iterdir())
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DataError, match="cut short"):
        prepare(criteo_config(source, tmp_path / "set"))
    prepare(criteo_config(source, tmp_path / "set"), overwrite=True)
    open_dataset(criteo_config(source, tmp_path / "set"))


def test_a_failure_in_the_middle_leaves_nothing_and_keeps_the_old_set(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DataError("the disk is full")

    before = prepare(criteo_config(source, tmp_path / "set"))
    monkeypatch.setattr(passes, "_dense_columns", fail)
    with pytest.raises(DataError, match="the disk is full"):
        prepare(criteo_config(source, tmp_path / "new"))
    with pytest.raises(DataError, match="the disk is full"):
        prepare(criteo_config(source, tmp_path / "set", min_count=2), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "set"]
    assert prepare(criteo_config(source, tmp_path / "set")) == before


def test_a_process_killed_in_the_middle_leaves_nothing_that_opens(tmp_path: Path, source: Path) -> None:
    config = criteo_config(source, tmp_path / "set")
    program = (
        "import os, signal, sys\n"
        "from torchrec_kstep.config.schema import DataConfig, SyntheticConfig\n"
        "from torchrec_kstep.data.preparation import prepare\n"
        f"prepare({config!r}, progress=lambda what, _: os.kill(os.getpid(), signal.SIGKILL) if what == 'writing' else None)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], timeout=100, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(DataError, match="no prepared set"):
        open_dataset(config)
    prepare(config)
    assert not leftovers(tmp_path)
    assert open_dataset(config).num_rows("train") > 0


def test_sources_that_change_while_they_are_read_are_refused(tmp_path: Path, source: Path) -> None:
    def touch(what: str, _: int) -> None:
        if what == "writing":
            write_lines(source, criteo_lines(101))

    with pytest.raises(DataError, match=f"{re.escape(str(source))} changed while being read"):
        prepare(criteo_config(source, tmp_path / "set"), progress=touch)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError("7200 requested and 4112 written")], ids=str)
def test_a_full_drive_is_named_and_leaves_nothing(tmp_path: Path, source: Path, error: OSError) -> None:
    def fail(_what: str, _num_rows: int) -> None:
        raise error

    with pytest.raises(DataError, match=rf"cannot write {re.escape(str(tmp_path / 'set'))}: .*{error.args[-1]}; .* are free there"):
        prepare(criteo_config(source, tmp_path / "set"), progress=fail)
    assert not (tmp_path / "set").exists()
    assert not leftovers(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_place_is_named(tmp_path: Path, source: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(DataError, match=r"cannot create a folder in .*locked"):
        prepare(criteo_config(source, tmp_path / "locked" / "set"))


def test_a_place_below_a_file_is_named(source: Path) -> None:
    with pytest.raises(DataError, match=r"choose another data\.path"):
        prepare(criteo_config(source, source / "set"))


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "magic"},
        {"encoding": "hash", "min_count": 2},
        {"encoding": "hash", "num_hash_rows": 3},
        {"min_count": 0},
        {"rows_per_row_group": 0},
        {"max_bad_lines": -1},
        {"validation_fraction": 0.6, "test_fraction": 0.4},
        {"test_fraction": -0.1},
        {"name": "movielens_10m"},
    ],
)
def test_impossible_options_are_refused_before_any_row_is_read(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"data\."):
        prepare(criteo_config(tmp_path, tmp_path / "set", **options))


def test_the_split_takes_the_asked_shares_and_depends_on_the_seed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "train.txt", criteo_lines(2000))
    manifest = prepare(criteo_config(source, tmp_path / "a", validation_fraction=0.2, test_fraction=0.05))
    assert manifest.splits["validation"].num_rows == pytest.approx(400, abs=60)
    assert manifest.splits["test"].num_rows == pytest.approx(100, abs=35)
    prepare(criteo_config(source, tmp_path / "b", validation_fraction=0.2, test_fraction=0.05, split_seed=1))
    assert pq.read_table(tmp_path / "a" / "test") != pq.read_table(tmp_path / "b" / "test")


def test_the_command_reports_and_ends_with_an_exit_code(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = criteo_config(source, tmp_path / "set")
    assert run(PrepareConfig(data=config)) == 0
    output = capsys.readouterr()
    assert "is ready" in output.out
    assert "reading: 100 rows" in output.err
    assert run(PrepareConfig(data=criteo_config(source, tmp_path / "set", min_count=2))) == 1
    assert capsys.readouterr().err.startswith("torchrec_kstep.prepare: ")
    assert run(PrepareConfig(data=criteo_config(source, tmp_path / "set", min_count=2), overwrite=True)) == 0
    with pytest.raises(ConfigError, match="nothing to prepare"):
        run(PrepareConfig(data=DataConfig(name="synthetic")))


def test_small_sets_are_prepared_on_first_use_and_open_without_their_source(tmp_path: Path) -> None:
    raw = write_movielens_100k(tmp_path / "raw")
    config = DataConfig(name="movielens_100k", source=str(raw), path=str(tmp_path / "set"))
    ensure_prepared(config)
    assert open_dataset(config).num_rows("train") == 48
    with pytest.raises(DataError, match=r"holds the prepared set of movielens_100k, but data\.name=criteo"):
        open_dataset(DataConfig(name="criteo", path=str(tmp_path / "set")))
    with pytest.raises(DataError, match=r"python -m torchrec_kstep\.prepare"):
        open_dataset(DataConfig(name="criteo", path=str(tmp_path / "other")))
    ensure_prepared(DataConfig(name="criteo", path=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()
