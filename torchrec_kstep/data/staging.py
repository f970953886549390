"""A folder that appears complete or not at all: it is written beside its final place and renamed at the end."""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from torchrec_kstep.errors import DataError
from torchrec_kstep.units import format_bytes


@contextlib.contextmanager
def staged_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Gives a temporary folder beside `target` that takes its place when the block ends without an exception.

    A process that is killed leaves the temporary folder, which no reader opens; the next call on the same host removes it.

    Args:
        target: the final place.
        overwrite: whether an existing target may be replaced. It stays untouched until the new one is complete.

    Raises:
        DataError: the folder cannot be written, its drive is full, or the target came into being meanwhile.
    """
    staging = target.parent / f".{target.name}.partial-{socket.gethostname()}-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(target)
        staging.mkdir()
    except OSError as error:
        raise DataError(f"cannot create a folder in {target.parent}: {error}; choose another data.path") from error
    try:
        yield staging
        _sync(staging)
        _publish(staging, target, overwrite=overwrite)
    except OSError as error:
        free = format_bytes(shutil.disk_usage(target.parent).free)
        raise DataError(f"cannot write {target}: {error}; {free} are free there: free more, or choose another data.path") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, target: Path, *, overwrite: bool) -> None:
    retired = target.parent / f".{target.name}.retired-{socket.gethostname()}-{os.getpid()}"
    try:
        if overwrite and target.exists():
            target.rename(retired)
        staging.rename(target)
    except OSError as error:
        raise DataError(f"cannot move the finished set to {target}: {error}; another process may have made it meanwhile") from error
    shutil.rmtree(retired, ignore_errors=True)


def _remove_orphans(target: Path) -> None:
    """Removes what killed processes of this host left beside the target; puts back a set whose replacement never came."""
    for kind in ("partial", "retired"):
        prefix = f".{target.name}.{kind}-{socket.gethostname()}-"
        for path in list(target.parent.iterdir()):
            process = path.name.removeprefix(prefix)
            if not path.name.startswith(prefix) or not process.isdigit() or Path(f"/proc/{process}").exists():
                continue
            if kind == "retired" and not target.exists():
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes everything in the folder durable, so that no rename is seen before the bytes it stands for."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
