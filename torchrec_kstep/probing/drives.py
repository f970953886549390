"""A drive at the sizes that the row store uses: random reads of 4 KiB and more, sequential writes of a megabyte."""

import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchrec_kstep.errors import StorageIOError
from torchrec_kstep.topology import Drive, DrivePoint
from torchrec_kstep.units import KIB, MIB

REQUESTS_BYTES = (4 * KIB, 16 * KIB, 128 * KIB)
DEPTHS = (1, 16, 64)
_FILE_BYTES = 512 * MIB
_BLOCK_BYTES = MIB


def measure_drive(
    name: str, folder: Path, seconds: float, tell: Callable[[str], object], file_bytes: int = _FILE_BYTES
) -> tuple[Drive, list[str]]:
    """Measures the drive under a folder with a file of its own, which is deleted at the end.

    Reads pass the page cache by (O_DIRECT). They are issued by Python threads, which a fast drive outruns: above some 100,000 reads
    per second the drive can do more than is measured here.

    Args:
        name: of the drive.
        folder: on it; made if it is missing.
        seconds: about how long.
        tell: is told of progress.
        file_bytes: size of the file.

    Returns:
        The drive, and what could not be measured.

    Raises:
        StorageIOError: the folder cannot be written, or has not enough room.
    """
    notes: list[str] = []
    path = folder / f"kstep-probe-{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        if free < 2 * file_bytes:
            raise StorageIOError(f"{folder}: {free >> 20} MiB are free, a probe needs {2 * file_bytes >> 20} MiB: choose another folder")
        tell(f"{name}: sequential writes")
        write_bytes_per_s, is_direct = _write(path, file_bytes)
        if not is_direct:
            notes.append(f"{name}: {folder} refuses O_DIRECT, so reads and writes may have met the page cache")
        points = []
        share = seconds / (len(REQUESTS_BYTES) * len(DEPTHS))
        for request_bytes in REQUESTS_BYTES:
            for depth in DEPTHS:
                tell(f"{name}: reads of {request_bytes // KIB} KiB, {depth} in flight")
                points.append(DrivePoint(request_bytes, depth, _reads_per_s(path, file_bytes, request_bytes, depth, share, is_direct)))
    except OSError as error:
        if isinstance(error, StorageIOError):
            raise
        raise StorageIOError(f"{folder}: cannot be probed: {error}") from error
    finally:
        if folder.is_dir():
            path.unlink(missing_ok=True)
    return Drive(name, free, tuple(points), write_bytes_per_s, str(folder)), notes


def _open(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        return os.open(path, flags, 0o600), False


def _write(path: Path, file_bytes: int) -> tuple[float, bool]:
    """Bytes per second of a sequential write, made durable at the end."""
    descriptor, is_direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    block = mmap.mmap(-1, _BLOCK_BYTES)  # aligned to pages, as O_DIRECT wants it
    block.write(random.Random(1).randbytes(_BLOCK_BYTES))  # not zeros, which some drives keep for free
    begin = time.perf_counter()
    try:
        for _ in range(file_bytes // _BLOCK_BYTES):
            os.write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return file_bytes / (time.perf_counter() - begin), is_direct


def _reads_per_s(path: Path, file_bytes: int, request_bytes: int, depth: int, seconds: float, is_direct: bool) -> float:
    """Reads per second with `depth` threads, each with one read in flight."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    counts = [0] * depth
    failures: list[OSError] = []
    end = time.perf_counter() + seconds

    def work(index: int) -> None:
        generator, buffer = random.Random(index), mmap.mmap(-1, request_bytes)
        num_places = file_bytes // request_bytes
        try:
            while time.perf_counter() < end:
                os.preadv(descriptor, [buffer], generator.randrange(num_places) * request_bytes)
                counts[index] += 1
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(depth)]
    begin = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.close(descriptor)
    if failures:
        raise failures[0]
    return max(sum(counts), 1) / (time.perf_counter() - begin)
