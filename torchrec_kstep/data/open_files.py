"""Parquet files kept open between row groups: reading a footer takes about a tenth of the time of decoding a row group."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq

_MAX_IDLE = 16  # a footer takes about 100 KB in memory for each row group of the file

_Key = tuple[Path, bool]  # files that verify checksums are other ones than those that do not


class OpenFiles:
    """Lends open files, each to one thread at a time, and keeps some of those that were given back."""

    def __init__(self) -> None:
        """Opens nothing yet."""
        self._idle: list[tuple[_Key, pq.ParquetFile]] = []  # the one given back last stands last
        self._is_closed = False
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, path: Path, with_checksums: bool) -> Iterator[pq.ParquetFile]:
        """Lends a file, which verifies the checksums of the pages read where they have some and `with_checksums`; a failure closes it."""
        key = (path, with_checksums)
        file = self._take(key) or pq.ParquetFile(path, memory_map=True, page_checksum_verification=with_checksums)
        try:
            yield file
        except BaseException:
            file.close()
            raise
        self._give_back(key, file)

    def close(self) -> None:
        """Closes the idle files, and those that are lent when they come back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, file in idle:
            file.close()

    def _take(self, key: _Key) -> "pq.ParquetFile | None":
        with self._lock:
            for index in range(len(self._idle) - 1, -1, -1):
                if self._idle[index][0] == key:
                    return self._idle.pop(index)[1]
        return None

    def _give_back(self, key: _Key, file: pq.ParquetFile) -> None:
        with self._lock:
            if self._is_closed:
                surplus: list[pq.ParquetFile] = [file]
            else:
                self._idle.append((key, file))
                surplus = [idle for _, idle in self._idle[:-_MAX_IDLE]]
                self._idle = self._idle[-_MAX_IDLE:]
        for idle in surplus:
            idle.close()
