"""Layer: runtime. Goal: one directory per job, made by rank 0, writable, used by one job at a time, and gone if nothing came of it."""

import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
from torch._C._distributed_c10d import HashStore

from torchrec_kstep import train
from torchrec_kstep.config.schema import DistributedConfig
from torchrec_kstep.errors import ConfigError, DataError, RankFailure
from torchrec_kstep.runtime import Job, failure, open_run_dir, run
from torchrec_kstep.world import World


@pytest.fixture
def job() -> Iterator[Job]:
    alone = Job(World(), DistributedConfig())
    yield alone
    alone.close()


def pair(timeout_s: float = 5.0) -> tuple[Job, Job]:
    """Two ranks in one process, over one store."""
    store = HashStore()
    return tuple(Job(World(rank, 2, rank, 2), DistributedConfig(timeout_s=timeout_s), store) for rank in range(2))  # type: ignore[return-value]


def test_a_named_folder_is_made_with_its_parents(job: Job, tmp_path: Path) -> None:
    folder = open_run_dir(job, str(tmp_path / "a" / "b"), "m_d")
    assert folder.is_dir()
    assert folder == tmp_path / "a" / "b"


def test_jobs_of_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = set()
    for _ in range(3):
        job = Job(World(), DistributedConfig())
        folders.add(open_run_dir(job, "", "deepfm_tiny"))
        job.close()
    assert len(folders) == 3
    assert all(folder.parent == tmp_path / "runs" and "deepfm_tiny" in folder.name for folder in folders)


def test_every_rank_is_told_the_folder_that_rank_0_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = pair()
    found: list[Path] = []
    waiter = threading.Thread(target=lambda: found.append(open_run_dir(second, "", "m_d")))
    waiter.start()
    made = open_run_dir(first, "", "m_d")
    waiter.join(10)
    assert found == [made]
    assert len(list((tmp_path / "runs").iterdir())) == 1
    for job in (first, second):
        job.close()


@pytest.mark.parametrize("path", ["/proc/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_written_is_refused_with_the_way_out(job: Job, path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot write to run_dir /.*; choose a writable folder with run_dir=\.\.\."):
        open_run_dir(job, path, "m_d")


def test_a_file_in_the_way_is_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to run_dir .*file"):
        open_run_dir(job, str(tmp_path / "file"), "m_d")


def test_two_jobs_cannot_share_a_folder_at_a_time(job: Job, tmp_path: Path) -> None:
    open_run_dir(job, str(tmp_path), "m_d")
    other = Job(World(), DistributedConfig())
    with pytest.raises(ConfigError, match="in use by another job"):
        open_run_dir(other, str(tmp_path), "m_d")
    job.close()
    assert open_run_dir(Job(World(), DistributedConfig()), str(tmp_path), "m_d") == tmp_path


def test_a_host_that_cannot_see_the_folder_says_so(tmp_path: Path) -> None:
    first, second = pair()
    first.store.set("shared/run_dir", '"/nonexistent/elsewhere"')
    with pytest.raises(ConfigError, match=r"rank 1 on host 0 cannot see the run directory /nonexistent/elsewhere"):
        open_run_dir(second, str(tmp_path), "m_d")
    first.close()


def test_waiting_for_rank_0_ends_with_its_failure_or_the_deadline() -> None:
    first, second = pair(timeout_s=0.3)
    with pytest.raises(RankFailure, match=r"waited for rank 0 to provide 'prepared'; it did not answer in time"):
        second.share("prepared", lambda: 1)
    failure.record(first.store, failure.Failure(0, "no disk", 0))
    with pytest.raises(RankFailure, match="rank 0 failed: no disk"):
        second.share("prepared", lambda: 1, timeout_s=60)


def test_only_the_first_failure_is_on_record() -> None:
    store = HashStore()
    assert failure.recorded(store) is None
    assert failure.record(store, failure.Failure(1, "first", 1))
    assert not failure.record(store, failure.Failure(0, "second", 0))
    assert failure.recorded(store) == failure.Failure(1, "first", 1)
    assert failure.silent_ranks(store, [], 60.0) == [], "nobody to wait for"
    store.set(failure.heartbeat_key(2), "5")
    assert failure.silent_ranks(store, [1, 2], 0.01) == [2], "a rank that never beat is not known to be silent"


def fail() -> int:
    raise DataError("no data")


def paths_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def failed_in(run_dir: str, write: Callable[[Path], object] = Path.exists) -> None:
    """A job that opens `run_dir`, writes there, and fails."""

    def body(job: Job) -> int:
        write(open_run_dir(job, run_dir, "m_d"))
        return fail()

    assert run(World(), DistributedConfig(), body) == failure.EXIT_FAILURE


@pytest.mark.parametrize("run_dir", ["", "a/b", "a", "kept/new"])
def test_a_job_that_failed_before_it_wrote_leaves_nothing(run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    failed_in(run_dir)
    assert paths_below(tmp_path) == {"kept"}


def test_other_runs_stay_where_a_job_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(World(), DistributedConfig())
    running = open_run_dir(job, "", "m_d")
    before = paths_below(tmp_path)
    failed_in("")
    assert run(World(), DistributedConfig(), lambda job: fail() if open_run_dir(job, str(running), "m_d") else 0) == failure.EXIT_CONFIG
    assert paths_below(tmp_path) == before
    job.close()


@pytest.mark.parametrize("earlier", [(), ("run.lock",), ("notes.txt",), ("run.lock", "checkpoints")])
def test_a_folder_that_was_there_stays_with_all_it_held(earlier: tuple[str, ...], tmp_path: Path) -> None:
    for name in earlier:
        (tmp_path / name).write_text("")
    failed_in(str(tmp_path))
    assert tmp_path.is_dir()
    assert paths_below(tmp_path) - {"run.lock"} == set(earlier) - {"run.lock"}
    assert (tmp_path / "run.lock").exists() == bool(earlier), "an empty folder is left empty"


def test_what_a_job_wrote_before_it_failed_stays(tmp_path: Path) -> None:
    failed_in(str(tmp_path / "a" / "b"), write=lambda folder: (folder / "log.txt").write_text("step 1"))
    assert paths_below(tmp_path) == {"a", "a/b", "a/b/run.lock", "a/b/log.txt"}


def test_a_folder_that_turns_out_not_writable_is_removed_again(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ConfigError, match=r"cannot write to run_dir .*No space left"):
        open_run_dir(job, str(tmp_path / "a" / "b"), "m_d")
    assert paths_below(tmp_path) == set()


def test_a_lock_that_another_job_took_away_meanwhile_is_made_again(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two jobs could hold the lock of one folder: one on the file that is gone, one on the file that is there."""
    lock = fcntl.flock
    calls = []

    def late(file: TextIO, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            (tmp_path / "run.lock").unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    open_run_dir(job, str(tmp_path), "m_d")
    other = Job(World(), DistributedConfig())
    with pytest.raises(ConfigError, match="in use by another job"):
        open_run_dir(other, str(tmp_path), "m_d")


def test_a_clean_up_that_fails_is_told_and_the_others_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    def body(job: Job) -> int:
        job.on_failure(lambda: done.append("first"))
        job.on_failure(lambda: os.rmdir("/nonexistent/folder"))
        return fail()

    assert run(World(), DistributedConfig(), body) == failure.EXIT_FAILURE
    told = capsys.readouterr().err
    assert done == ["first"]
    assert told.index("no data") < told.index("cleaning up after this failed as well: [Errno 2]")
    done.clear()
    assert run(World(), DistributedConfig(), lambda job: job.on_failure(lambda: done.append("never")) or 0) == 0
    assert done == []


@pytest.mark.parametrize("chdir", ["false", "true"])
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [(["data=movielens_1m", "data.source=none"], "none"), (["data=criteo", "data.path=none"], "prepare")],
    ids=["no source", "not prepared"],
)
def test_training_without_its_data_leaves_no_folder(
    overrides: list[str], reason: str, chdir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main(["planner=dense", f"chdir={chdir}", *overrides]) == failure.EXIT_FAILURE
    assert reason in capsys.readouterr().err
    assert paths_below(tmp_path) == set()
    assert Path.cwd() == tmp_path
