"""The folder of one run: found or made once, by rank 0, and locked against a second job."""

import fcntl
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TextIO

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.runtime.job import Job

_LOCK_NAME = "run.lock"


def open_run_dir(job: Job, path: str, label: str) -> Path:
    """Makes the run directory on rank 0 and returns it on every rank. Must be called on all ranks, once a job.

    Args:
        job: the job, through which the other ranks learn the name.
        path: the folder asked for; "" = a new one below `runs/`, named by date, time and `label`.
        label: model and data set, for the name.

    Raises:
        ConfigError: the folder cannot be made or written, another job is using it, or this host cannot see it.
    """

    def make() -> str:
        folder = _make(path, label)
        job.at_end(_lock(folder).close)
        return str(folder)

    run_dir = Path(job.share("run_dir", make))
    if not run_dir.is_dir():
        raise ConfigError(
            f"rank {job.world.rank} on host {job.world.host} cannot see the run directory {run_dir} that rank 0 made: "
            "set run_dir to a folder on a file system that all hosts share"
        )
    return run_dir


def _make(path: str, label: str) -> Path:
    folder = Path(path).absolute() if path else _new_name(label)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to run_dir {folder}: {error.strerror}; choose a writable folder with run_dir=...") from None
    return folder


def _lock(folder: Path) -> TextIO:
    """Locks the folder for as long as the returned file is open."""
    lock = (folder / _LOCK_NAME).open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"run_dir {folder} is in use by another job: wait for it to end, or choose another run_dir") from None
    return lock


def _new_name(label: str) -> Path:
    """A name that is not taken: jobs that start in the same second get numbers."""
    stem = f"{datetime.now():%Y%m%d_%H%M%S}_{label}"
    base = Path("runs").absolute()
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
