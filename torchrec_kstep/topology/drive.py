"""What a drive can do, by request size and number of requests in flight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LARGE_READ_BYTES = 1 << 20
_SMALL_READ_BYTES = 1 << 12
_TYPICAL_DEPTH = 128  # reads that the row store keeps in flight


@dataclass(frozen=True)
class DrivePoint:
    """One measured point of random reads.

    Attributes:
        request_bytes: size of one read.
        depth: reads in flight.
        operations_per_s: reads finished per second.
    """

    request_bytes: int
    depth: int
    operations_per_s: float


@dataclass(frozen=True)
class Drive:
    """An SSD. Reads and writes share its time.

    Attributes:
        name: unique on its host.
        capacity_bytes: space for rows.
        reads: points of the curve of random reads, at least one.
        write_bytes_per_s: sequential writes of large blocks, the only kind that the row store issues.
        path: a folder on the drive, "" where that is not known.
    """

    name: str
    capacity_bytes: int
    reads: tuple[DrivePoint, ...]
    write_bytes_per_s: float
    path: str = ""

    @property
    def rows_per_s(self) -> float:
        """Rows that can be read from a page and written to one per second, many in flight: what drives are compared by."""
        return 1 / (1 / self.read_operations_per_s(_SMALL_READ_BYTES, _TYPICAL_DEPTH) + _SMALL_READ_BYTES / self.write_bytes_per_s)

    def read_operations_per_s(self, request_bytes: int, depth: int) -> float:
        """Random reads per second, interpolated between the points in log scale; outside of them, the nearest holds.

        Larger requests than any point keep that point's bytes per second, smaller ones its operations per second.
        """
        depths = sorted({point.depth for point in self.reads})
        return _interpolated(depth, depths, [self._at_depth(request_bytes, measured) for measured in depths])

    def read_seconds(self, depth: int) -> tuple[float, float]:
        """Splits the time of one random read into a part per read and a part per byte (seconds; seconds per byte).

        Small reads are bound by operations, large ones by bytes; the sum of both parts meets the curve at 4 KiB and at 1 MiB.
        """
        small_s = 1 / self.read_operations_per_s(_SMALL_READ_BYTES, depth)
        large_s = 1 / self.read_operations_per_s(_LARGE_READ_BYTES, depth)
        per_byte_s = max(large_s - small_s, 0.0) / (_LARGE_READ_BYTES - _SMALL_READ_BYTES)
        return max(small_s - per_byte_s * _SMALL_READ_BYTES, 0.0), per_byte_s

    def _at_depth(self, request_bytes: int, depth: int) -> float:
        points = sorted((point for point in self.reads if point.depth == depth), key=lambda point: point.request_bytes)
        largest = points[-1]
        if request_bytes > largest.request_bytes:
            return largest.operations_per_s * largest.request_bytes / request_bytes
        return _interpolated(request_bytes, [point.request_bytes for point in points], [point.operations_per_s for point in points])


def _interpolated(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Piecewise linear in log-log scale, constant outside."""
    if at <= places[0]:
        return values[0]
    for left in range(len(places) - 1):
        if at <= places[left + 1]:
            share = math.log(at / places[left]) / math.log(places[left + 1] / places[left])
            return values[left] * float((values[left + 1] / values[left]) ** share)
    return values[-1]
