"""The numbers under which tables stand in records and start their rows: from names alone, never from an order."""

import hashlib
from collections.abc import Iterable

NUM_TABLE_IDS = 1 << 20  # what a store takes (docs/format.md)


def table_ids(names: Iterable[str]) -> dict[str, int]:
    """Gives each table of a set its id, the same on every rank, in every run, and in whatever order tables are listed.

    An id is a hash of the name. Of names with equal hashes the first in alphabetical order has it, and the next takes the
    next free one, so that ids of a set never collide; only such a name has another id in another set of tables.

    Args:
        names: all tables that may share a store, e.g. those of a collection on all ranks.

    Raises:
        ValueError: a name stands twice, or there are more names than ids.
    """
    listed = list(names)
    unique = sorted(set(listed))
    if len(unique) < len(listed):
        twice = next(name for name in unique if listed.count(name) > 1)
        raise ValueError(f"table {twice!r} stands {listed.count(twice)} times; names of tables must differ")
    if len(unique) > NUM_TABLE_IDS:
        raise ValueError(f"{len(unique)} tables, expected at most {NUM_TABLE_IDS}")
    taken: set[int] = set()
    ids = {}
    for name in unique:
        number = hash_of(name)
        while number in taken:
            number = (number + 1) % NUM_TABLE_IDS
        taken.add(number)
        ids[name] = number
    return {name: ids[name] for name in listed}


def hash_of(name: str) -> int:
    """Returns the id that a name has unless another of the set has taken it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % NUM_TABLE_IDS
