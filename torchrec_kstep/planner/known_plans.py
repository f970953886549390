"""Plans that somebody else made, as starts for the search."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_kstep.cost import Table
from torchrec_kstep.cost.work import Sharding
from torchrec_kstep.planner.options import Wishes
from torchrec_kstep.planner.search import Problem

Place = tuple[Sharding, tuple[int, ...]]


def known_places(plan: ShardingPlan, named: Sequence[tuple[str, EmbeddingBagConfig]]) -> list[Place | None]:
    """Returns the place of each table under a plan; None where the search has no like: several shards of a table on one rank."""
    places: list[Place | None] = []
    for path, config in named:
        module = plan.plan.get(path)
        sharding = module.get(config.name) if isinstance(module, EmbeddingModuleShardingPlan) else None
        ranks = tuple(sharding.ranks or ()) if sharding is not None else ()
        is_uneven = sharding is not None and sharding.sharding_type == "column_wise" and config.embedding_dim % (4 * max(len(ranks), 1))
        if sharding is None or not ranks or len(set(ranks)) < len(ranks) or is_uneven:
            places.append(None)
        else:
            places.append((sharding.sharding_type, ranks))
    return places


def with_places(tables: Sequence[Table], wishes: Sequence[Wishes], known: Sequence[Sequence[Place | None]]) -> list[Wishes]:
    """Adds places to the wishes of tables; tables that are alike get the places of all of them, so that they stay one class."""
    kinds: dict[tuple[object, ...], dict[Place, None]] = {}
    keys = [(table.num_rows, table.dim, table.ids_per_sample, table.num_features, id(table.curve)) for table in tables]
    for places in known:
        for key, wish, place in zip(keys, wishes, places, strict=True):
            found = kinds.setdefault((*key, wish), {})
            if place is not None and place[0] in wish.shardings:
                found[place] = None
    return [replace(wish, places=tuple(kinds[(*key, wish)])) for key, wish in zip(keys, wishes, strict=True)]


def start_of(problem: Problem, places: Sequence[Place | None]) -> npt.NDArray[np.int64]:
    """Returns the assignment that puts tables where a plan does, in the first tier of their options; -1 where it cannot."""
    start = np.full(problem.num_tables, -1, dtype=np.int64)
    for group in problem.classes:
        first: dict[Place, int] = {}
        for index, option in enumerate(group.options):
            first.setdefault((option.sharding, option.ranks), index)
        for table in group.tables:
            place = places[table]
            if place is not None:
                start[table] = first.get(place, -1)
    return start
