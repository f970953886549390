"""DRAM of the index that finds the rows of a table on SSD, from the numbers of rows alone."""

import math

# The compiled store's own constants (kernels/storage, row_index).
_CHUNK_ROWS = 1 << 16  # rows per chunk
_CHUNK_HEADER_BYTES, _POINTER_BYTES = 24, 8
_SPARSE_CAPACITIES = [1 << bits for bits in range(4, 16)]
_SPARSE_LOAD, _SPARSE_ENTRY_BYTES, _DENSE_ENTRY_BYTES = 0.75, 6, 4


def index_memory_bytes(num_rows: int, touched_rows: float) -> int:
    """Expected DRAM of the index of one table whose touched rows are spread evenly over it.

    A row that was never touched takes nothing but its share of a pointer; where most rows were touched each takes 4 bytes, where few
    were each of these takes 8 to 16, as full as its chunk's hash table is.
    """
    num_full_chunks, rest_rows = divmod(num_rows, _CHUNK_ROWS)
    density = min(touched_rows / num_rows, 1.0)
    chunk_bytes = num_full_chunks * _chunk_memory_bytes(_CHUNK_ROWS, density) + _chunk_memory_bytes(rest_rows, density)
    return round((num_full_chunks + bool(rest_rows)) * _POINTER_BYTES + chunk_bytes)


def _chunk_memory_bytes(num_rows: int, density: float) -> float:
    """Expected bytes of a chunk of `num_rows` rows, each touched with probability `density`."""
    if not num_rows:
        return 0.0
    mean = num_rows * density
    deviation = math.sqrt(mean * (1 - density))
    share_used = 1.0 if density >= 1 else -math.expm1(num_rows * math.log1p(-density))
    expected, capacity_bytes = 0.0, 0
    for capacity, next_bytes in _capacity_steps():
        # A chunk is made with its first row, when the normal distribution is no guide yet.
        share = share_used if capacity == 0 else _share_above(_SPARSE_LOAD * capacity + 0.5, mean, deviation)
        expected += (next_bytes - capacity_bytes) * share
        capacity_bytes = next_bytes
    return expected + _CHUNK_HEADER_BYTES * share_used


def _capacity_steps() -> list[tuple[int, int]]:
    """(capacity that is outgrown, bytes of the next one) of a chunk of the index."""
    steps = [(0, _SPARSE_CAPACITIES[0] * _SPARSE_ENTRY_BYTES)]
    steps += [(small, 2 * small * _SPARSE_ENTRY_BYTES) for small in _SPARSE_CAPACITIES[:-1]]
    return [*steps, (_SPARSE_CAPACITIES[-1], _CHUNK_ROWS * _DENSE_ENTRY_BYTES)]


def _share_above(threshold: float, mean: float, deviation: float) -> float:
    if deviation == 0.0:
        return float(mean > threshold)
    return 0.5 * math.erfc((threshold - mean) / (deviation * math.sqrt(2)))
