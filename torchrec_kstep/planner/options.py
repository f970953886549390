"""What may be done with a table: every way to cut it, to rank it, to tier it and to cache it that the search looks at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from torchrec_kstep.cost import ShardWork, StepSetup, Table, Tier, shard_work
from torchrec_kstep.cost.work import Sharding
from torchrec_kstep.planner.search import Option, TableClass

CACHED_SHARES = (0.0, 0.002, 0.01, 0.03, 0.08, 0.2, 0.45, 1.0)  # of a table's rows, in the tier above the one where they rest
COLUMN_MULTIPLE = 4
_FEW_RANKS = 16  # up to here column shards may begin at any rank


@dataclass(frozen=True)
class Wishes:
    """What a user allows for one table, and what is known of good places for it.

    Attributes:
        shardings: types that may be used, at least one.
        tiers: where rows may rest, at least one.
        min_columns: of a column shard; None: as the search likes.
        cached_rows: rows in the tier above, of the whole table; None: as the search likes.
        places: (sharding, ranks) that are options besides those that are looked at anyway.
    """

    shardings: tuple[Sharding, ...]
    tiers: tuple[Tier, ...]
    min_columns: int | None = None
    cached_rows: float | None = None
    places: tuple[tuple[Sharding, tuple[int, ...]], ...] = ()


def options_of(table: Table, setup: StepSetup, wishes: Wishes, on_device: bool) -> tuple[Option, ...]:
    """Returns the options of one table.

    Ranks: any one for a whole table; all, or all of one host, for row shards; all, those of one host, or 2, 4, ... neighbours for column
    shards, which on many ranks begin at multiples of their number.
    """

    @cache
    def work(sharding: Sharding, num_shards: int, tier: Tier, cached_rows: float) -> ShardWork:
        return shard_work(table, setup, sharding, num_shards, tier, cached_rows, on_device)

    places = [(sharding, ranks) for sharding in wishes.shardings for ranks in rank_sets(sharding, setup, table.dim, wishes.min_columns)]
    found = []
    for sharding, ranks in dict.fromkeys([*places, *wishes.places]):
        for tier, cached_rows in _tier_choices(table, sharding, wishes, on_device):
            found.append(Option(sharding, ranks, tier, cached_rows, work(sharding, len(ranks), tier, cached_rows)))
    return tuple(found)


def rank_sets(sharding: Sharding, setup: StepSetup, dim: int, min_columns: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yields the sets of ranks that a type of sharding may use."""
    everyone = tuple(range(setup.world_size))
    hosts = [everyone[first : first + setup.local_world_size] for first in range(0, setup.world_size, setup.local_world_size)]
    if sharding == "table_wise":
        yield from ((rank,) for rank in everyone)
    elif sharding in ("row_wise", "data_parallel"):
        yield everyone
    elif sharding == "table_row_wise":
        yield from hosts
    else:
        sizes = {len(everyone), setup.local_world_size} | {2**power for power in range(1, setup.world_size.bit_length())}
        for size in sorted(sizes):
            width = dim // size
            if size < 2 or size > setup.world_size or dim % size or width % COLUMN_MULTIPLE or (min_columns and width < min_columns):
                continue
            stride = 1 if setup.world_size <= _FEW_RANKS else size
            yield from (everyone[first : first + size] for first in range(0, setup.world_size - size + 1, stride))
        if len(everyone) == 1 or not any(_is_column_size(dim, size, min_columns) for size in sizes if 2 <= size <= setup.world_size):
            yield from ((rank,) for rank in everyone)


def _is_column_size(dim: int, size: int, min_columns: int | None) -> bool:
    width = dim // size
    return dim % size == 0 and width % COLUMN_MULTIPLE == 0 and not (min_columns and width < min_columns)


def _tier_choices(table: Table, sharding: Sharding, wishes: Wishes, on_device: bool) -> Iterator[tuple[Tier, float]]:
    top: Tier = "device" if on_device else "dram"
    if sharding == "data_parallel":
        yield top, 0.0
        return
    for tier in wishes.tiers:
        if tier == "device" and not on_device:
            continue
        if tier == top:
            yield tier, 0.0
        elif wishes.cached_rows is not None:
            yield tier, min(wishes.cached_rows, table.num_rows)
        else:
            yield from dict.fromkeys((tier, float(round(share * table.num_rows))) for share in CACHED_SHARES)


def classes_of(tables: Sequence[Table], setup: StepSetup, wishes: Sequence[Wishes], on_device: bool) -> list[TableClass]:
    """Groups tables that are alike in size, use and wishes, so that their options are made and priced once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, (table, wish) in enumerate(zip(tables, wishes, strict=True)):
        key = (table.num_rows, table.dim, table.ids_per_sample, table.num_features, table.state_bytes, id(table.curve), wish)
        groups.setdefault(key, []).append(index)
    return [TableClass(tuple(members), options_of(tables[members[0]], setup, wishes[members[0]], on_device)) for members in groups.values()]
