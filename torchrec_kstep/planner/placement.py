"""A plan as values: where each table goes, what the step will take, and the same as JSON, complete by itself."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from torchrec_kstep.cost import PhaseTime, StepTime, Tier
from torchrec_kstep.cost.work import Sharding
from torchrec_kstep.errors import PlanError

FORMAT = 1


@dataclass(frozen=True)
class PlacedTable:
    """One table of a plan. All shards are alike.

    Attributes:
        path: of its collection inside the task.
        name: of the table.
        num_rows: rows.
        dim: columns.
        sharding: how it is cut.
        ranks: of its shards, in order.
        tier: where rows rest.
        cached_rows: of the whole table, in the tier above.
        cache_bytes: of one shard's cache.
        hit_rate: part of the ids that its cache will hold; 1 without a tier below.
        missed_rows: that one shard reads per step.
        bytes_per_rank: weights and optimizer states of one shard, where rows rest.
    """

    path: str
    name: str
    num_rows: int
    dim: int
    sharding: Sharding
    ranks: tuple[int, ...]
    tier: Tier
    cached_rows: float
    cache_bytes: int
    hit_rate: float
    missed_rows: float
    bytes_per_rank: int


@dataclass(frozen=True)
class PoolUse:
    """A memory and what the plan takes of it."""

    name: str
    used_bytes: float
    capacity_bytes: float


@dataclass(frozen=True)
class Placement:
    """A plan with its prediction.

    Attributes:
        key: hash over everything that the plan was made from: machines, tables, use, wishes, versions.
        topology: name of the machines.
        world_size: ranks that share the tables.
        local_world_size: of them, on one host.
        kernel: "dense", "fused" or "tiered".
        k: steps between merge rounds; 0 for one replica.
        num_replicas: whole copies of the model.
        tables: in the order of the task.
        step: predicted.
        pools: memory taken.
        method: how it was found; see `search.Solution`.
        gap: bound on how much longer the step is than the best one's; -1 without a bound.
    """

    key: str
    topology: str
    world_size: int
    local_world_size: int
    kernel: str
    k: int
    num_replicas: int
    tables: tuple[PlacedTable, ...]
    step: StepTime
    pools: tuple[PoolUse, ...]
    method: str
    gap: float

    def to_json(self) -> str:
        """Writes the plan."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> "Placement":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: it is no plan, or one of another format.
        """
        try:
            values = cast(dict[str, Any], json.loads(text))
            if values.pop("format") != FORMAT:
                raise PlanError(f"{where}: a plan of another format than {FORMAT}: plan anew")
            step = values.pop("step")
            return cls(
                **values
                | {
                    "tables": tuple(PlacedTable(**table | {"ranks": tuple(table["ranks"])}) for table in values["tables"]),
                    "pools": tuple(PoolUse(**pool) for pool in values["pools"]),
                    "step": StepTime(step["seconds"], step["error_s"], tuple(PhaseTime(**phase) for phase in step["phases"])),
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{where}: not a plan: {type(error).__name__}: {error}") from error

    def by_path(self) -> Mapping[str, list[PlacedTable]]:
        """Tables by the path of their collection."""
        found: dict[str, list[PlacedTable]] = {}
        for table in self.tables:
            found.setdefault(table.path, []).append(table)
        return found
