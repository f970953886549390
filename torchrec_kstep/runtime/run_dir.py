"""The folder of one run: found or made once, by rank 0, and locked against a second job."""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.runtime.job import Job

_LOCK_NAME = "run.lock"


def open_run_dir(job: Job, path: str, label: str) -> Path:
    """Makes the run directory on rank 0 and returns it on every rank. Must be called on all ranks, once a job.

    A job that fails before it wrote anything there leaves no trace: what was made here is removed again.

    Args:
        job: the job, through which the other ranks learn the name.
        path: the folder asked for; "" = a new one below `runs/`, named by date, time and `label`.
        label: model and data set, for the name.

    Raises:
        ConfigError: the folder cannot be made or written, another job is using it, or this host cannot see it.
    """

    def make() -> str:
        folder, made = _make(path, label)
        lock, is_new = _lock(folder)
        job.at_end(lock.close)
        if is_new:
            job.on_failure(lambda: _take_back(lock, folder, made))
        return str(folder)

    run_dir = Path(job.share("run_dir", make))
    if not run_dir.is_dir():
        raise ConfigError(
            f"rank {job.world.rank} on host {job.world.host} cannot see the run directory {run_dir} that rank 0 made: "
            "set run_dir to a folder on a file system that all hosts share"
        )
    return run_dir


def _make(path: str, label: str) -> tuple[Path, list[Path]]:
    """Returns the folder, and which of it and its parents were not there before, innermost first."""
    base = Path(path or "runs").absolute()
    made = [place for place in (base, *base.parents) if not os.path.lexists(place)]
    folder = base
    if not path:
        folder = _new_name(base, label)
        made.insert(0, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _remove_empty(made)
        raise ConfigError(f"cannot write to run_dir {folder}: {error.strerror}; choose a writable folder with run_dir=...") from None
    return folder, made


def _lock(folder: Path) -> tuple[TextIO, bool]:
    """Locks the folder for as long as the returned file is open, and tells whether that file is new."""
    path = folder / _LOCK_NAME
    while True:
        try:
            lock, is_new = path.open("x", encoding="utf-8"), True
        except FileExistsError:
            lock, is_new = path.open("w", encoding="utf-8"), False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(f"run_dir {folder} is in use by another job: wait for it to end, or choose another run_dir") from None
        if os.fstat(lock.fileno()).st_nlink:
            return lock, is_new
        lock.close()  # a job that failed removed it between the two calls: nobody else would find this lock


def _take_back(lock: TextIO, folder: Path, made: Sequence[Path]) -> None:
    """Removes the lock and the folders that this job made, unless anything else lies there."""
    if os.listdir(folder) != [_LOCK_NAME]:
        return
    (folder / _LOCK_NAME).unlink()
    lock.close()  # not before: nobody may lock what is about to go
    _remove_empty(made)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders, innermost first, up to one that holds something."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _new_name(base: Path, label: str) -> Path:
    """A name that is not taken: jobs that start in the same second get numbers."""
    stem = f"{datetime.now():%Y%m%d_%H%M%S}_{label}"
    for number in range(1, 1000):
        folder = base / (stem if number == 1 else f"{stem}_{number}")
        try:
            folder.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            continue
        except OSError:
            return folder  # `_make` meets the same error and says what to do
        return folder
    raise ConfigError(f"{base} holds 999 runs of the same second: clean it up, or set run_dir")
