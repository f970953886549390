"""What is done to a store from outside a run: finding it on its paths, compacting it, deleting snapshots."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchrec_kstep.errors import StorageError
from torchrec_kstep.ops import _library
from torchrec_kstep.storage._errors import store_errors
from torchrec_kstep.storage.snapshot import check_store
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import MIB

_HEADER = "STORE"


@dataclass(frozen=True)
class CompactReport:
    """What compacting did.

    Attributes:
        num_rows: rows copied.
        bytes_before: segments of the old snapshot.
        bytes_after: segments of the new one.
    """

    num_rows: int
    bytes_before: int
    bytes_after: int


def find_stores(paths: Sequence[str | Path]) -> list[list[str]]:
    """Returns the paths of each store that lies on `paths`: one store if they are its own folders, else those of a run below.

    A run has a store per rank, in `rank-<n>` or, where it has several groups of tables, in `<group>/rank-<n>`.

    Raises:
        StorageError: there is no store, or the paths do not hold the same ones.
    """
    if (Path(paths[0]) / _HEADER).is_file():
        return [check_store(paths)]
    found = [_stores_below(Path(path)) for path in paths]
    if not found[0]:
        raise StorageError(
            f"{paths[0]} holds no row store: there is neither a file {paths[0]}/{_HEADER} nor one in a folder rank-* below; a run has its "
            "stores in its tiers.ssd_paths, by default RUN_DIR/rows/host<n>"
        )
    for path, names in zip(paths, found, strict=True):
        if names != found[0]:
            raise StorageError(
                f"{path} holds {', '.join(names) or 'no store'}, but {paths[0]} holds {', '.join(found[0])}: name all paths of one run"
            )
    return [check_store([Path(path) / name for path in paths]) for name in found[0]]


def _stores_below(path: Path) -> list[str]:
    folders = [file.parent.relative_to(path) for pattern in (f"rank-*/{_HEADER}", f"*/rank-*/{_HEADER}") for file in path.glob(pattern)]
    return [str(folder) for folder in sorted(folders, key=lambda folder: (str(folder.parent), len(folder.name), folder.name))]


def is_open_elsewhere(paths: Sequence[str]) -> bool:
    """Whether a process of this machine has the store open for writing; takes no lock to find out."""
    lock = Path(paths[0]) / "LOCK"
    try:
        status = lock.stat()
        held = Path("/proc/locks").read_text()
    except OSError:
        return False
    file_id = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any("FLOCK" in line and file_id in line.split() for line in held.splitlines())


def compact(paths: Sequence[str], source: str, into: str, segment_bytes: int = 64 * MIB) -> CompactReport:
    """Writes the newest version of every row of snapshot `source` into new files and commits them as snapshot `into`.

    `source` stays, so both must fit on the drive. Takes the store's lock.

    Raises:
        ConfigError: `into` exists or is no name.
        StorageError: a run has the store open, `source` is damaged, or the medium fails.
    """
    _library.load()
    config = TierConfig(0, paths, segment_bytes=segment_bytes)
    options = {"quota_bytes": 0, "segment_bytes": segment_bytes, "space_percent": round(config.space_factor * 100)}
    with store_errors(paths):
        report = torch.classes.kstep.Snapshot.compact(
            list(paths), source, into, config.io_backend, {**options, "queue_depth": config.queue_depth}
        )
    return CompactReport(**dict(report))


def remove_snapshot(paths: Sequence[str], name: str) -> None:
    """Deletes a snapshot of a store that no run has open.

    Raises:
        StorageError: a run has it open, or there is no such snapshot.
    """
    _library.load()
    with store_errors(paths):
        torch.classes.kstep.Snapshot.remove(list(paths), name)
