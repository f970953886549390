"""DRAM: streams with all cores of a NUMA node, random rows with one."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_kstep.units import MIB

_ROW_BYTES = 256  # a row of 64 weights
_IDS_PER_CALL = 20_000
_MIN_CALLS = 3


@dataclass(frozen=True)
class MemorySpeed:
    """What was measured.

    Attributes:
        stream_bytes_per_s: read and written by copies, all given cores together.
        gather_bytes_per_s: of random rows brought up by one core.
    """

    stream_bytes_per_s: float
    gather_bytes_per_s: float


def measure_memory(cores: Sequence[int], seconds: float, table_bytes: int = 1024 * MIB) -> MemorySpeed:
    """Measures the memory beside some cores.

    Args:
        cores: of one NUMA node; the calling thread runs there meanwhile.
        seconds: about how long.
        table_bytes: memory used; more than the last-level cache, or that is what is measured.
    """
    before = os.sched_getaffinity(0)
    usable = [core for core in cores if core in before] or sorted(before)
    try:
        os.sched_setaffinity(0, usable)
        table = np.ones((table_bytes // _ROW_BYTES, _ROW_BYTES // 4), dtype=np.float32)  # written, so that pages are on this node
        gather = _gather(table, seconds / 2)
        stream = _stream(table, len(usable), seconds / 2)
    finally:
        os.sched_setaffinity(0, before)
    return MemorySpeed(stream, gather)


def _gather(table: np.ndarray, seconds: float) -> float:
    """Random rows into a small buffer: the median call."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, len(table), _IDS_PER_CALL) for _ in range(8)]
    out = np.empty((_IDS_PER_CALL, table.shape[1]), dtype=table.dtype)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MIN_CALLS or time.perf_counter() < end:
        begin = time.perf_counter()
        np.take(table, ids[len(times) % len(ids)], axis=0, out=out, mode="clip")  # "clip" writes into `out` without a copy
        times.append(time.perf_counter() - begin)
    return _IDS_PER_CALL * _ROW_BYTES / float(np.median(times))


def _stream(table: np.ndarray, num_threads: int, seconds: float) -> float:
    """Copies half of the table onto the other half, each thread its part; bytes read and written."""
    half = len(table) // 2
    parts = [(half * index // num_threads, half * (index + 1) // num_threads) for index in range(num_threads)]
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MIN_CALLS or time.perf_counter() < end:
        threads = [threading.Thread(target=np.copyto, args=(table[half + a : half + b], table[a:b])) for a, b in parts]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times.append(time.perf_counter() - begin)
    return 2 * half * _ROW_BYTES / float(np.median(times))
