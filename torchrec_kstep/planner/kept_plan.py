"""The plan of a run, kept in its directory: a run that continues shards its tables as it began, whatever memory it has now."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_kstep.config.schema import PlannerConfig
from torchrec_kstep.errors import PlanError
from torchrec_kstep.planner.checks import check_plan, check_tiers
from torchrec_kstep.planner.emit import TieredParameterSharding
from torchrec_kstep.world import World

FORMAT = "torchrec_kstep.plan"
VERSION = 1
PLAN_NAME = "plan.json"  # of the file in a run directory

Wishes = Mapping[str, str]


@dataclass(frozen=True)
class KeptPlan:
    """A plan, and what it was asked for.

    Attributes:
        plan: for the ranks that share the tables.
        wishes: what a user asked for, as `plan_wishes` tells it. Sizes of tiers are not among them.
    """

    plan: ShardingPlan
    wishes: Wishes

    def to_json(self) -> str:
        """Writes it."""
        modules = {
            path: {name: _described(sharding) for name, sharding in module.items()}
            for path, module in self.plan.plan.items()
            if isinstance(module, EmbeddingModuleShardingPlan)
        }
        return json.dumps({"format": FORMAT, "version": VERSION, "wishes": dict(self.wishes), "modules": modules}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> "KeptPlan":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: it is no plan, or of another version.
        """
        try:
            body = json.loads(text)
            if (body["format"], body["version"]) != (FORMAT, VERSION):
                raise PlanError(
                    f"{where} has format {body['format']!r}, version {body['version']!r}; expected {FORMAT!r}, {VERSION}: {_REMEDY}"
                )
            plan = {}
            for path, tables in body["modules"].items():
                plan[path] = EmbeddingModuleShardingPlan()
                for name, table in tables.items():
                    plan[path][name] = _sharding(table)
            return cls(ShardingPlan(plan), {str(name): str(value) for name, value in body["wishes"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise PlanError(f"{where} cannot be read as a plan: {type(error).__name__}: {error}; {_REMEDY}") from error


_REMEDY = (
    "put the file back from a copy, or set planner.renew=true to plan anew, which checkpoints of tables on SSD allow only if they "
    "were saved with checkpoint.tables=full"
)


def plan_wishes(config: PlannerConfig, tiers_name: str, world: World, tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> Wishes:
    """What a user asks of a plan, one entry each; a kept plan is used as long as these are the same.

    Args:
        config: sharding, kernel, planner.
        tiers_name: "dram" or "dram_ssd".
        world: ranks that share the tables.
        tables: by path of their collection.
    """
    sizes = {
        f"table {table.name}": f"{table.num_embeddings} rows of {table.embedding_dim}, {table.pooling.value.lower()}, in {path}"
        for path, configs in tables.items()
        for table in configs
    }
    return {
        "planner.sharding": config.sharding,
        "planner.tables": json.dumps(dict(sorted(config.tables.items()))),
        "planner.kernel": config.kernel,
        "planner.engine": config.engine,
        "planner.topology": config.topology,
        "tiers.name": tiers_name,
        "ranks": f"{world.world_size}, {world.local_world_size} on a host",
        **sizes,
    }


def reuse_plan(
    folder: Path,
    wishes: Wishes,
    tables: Mapping[str, Sequence[EmbeddingBagConfig]],
    sharders: Sequence[ModuleSharder[nn.Module]],
    world: World,
    process_group: dist.ProcessGroup,
) -> tuple[ShardingPlan | None, str]:
    """Returns the plan that a run directory keeps, if it was made for the same wishes, and what to say about it. Collective.

    Args:
        folder: the run directory; rank 0 reads it.
        wishes: what is asked for now.
        tables: by path of their collection.
        sharders: which may refuse the plan because the tiers are too small for it now.
        world: ranks that share the tables.
        process_group: all ranks.

    Raises:
        PlanError: the file is damaged, or the tiers have become too small for the plan.
    """
    outcome: list[tuple[ShardingPlan | None, str] | PlanError | None] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            plan, note = read_kept_plan(folder, wishes)
            if plan is not None:
                check_plan(plan, tables)
                check_tiers(plan, tables, sharders, world.world_size)
            outcome[0] = plan, note
        except PlanError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(process_group, 0), group=process_group)
    found = outcome[0]
    if isinstance(found, PlanError):
        raise found
    assert found is not None
    return found


def read_kept_plan(folder: Path, wishes: Wishes) -> tuple[ShardingPlan | None, str]:
    """Returns the kept plan if it was made for the same wishes, and what to say about it ("": none was kept). Not collective.

    Raises:
        PlanError: the file is damaged.
    """
    path = folder / PLAN_NAME
    try:
        kept = KeptPlan.from_json(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}; {_REMEDY}") from error
    changed = [name for name in sorted(kept.wishes.keys() | wishes.keys()) if kept.wishes.get(name) != wishes.get(name)]
    if not changed:
        return kept.plan, f"sharded as it began, by {path}"
    name = changed[0]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return None, f"planned anew: {name} was {kept.wishes.get(name, 'not there')}, is {wishes.get(name, 'not there')}{more}"


def keep_plan(folder: Path, kept: KeptPlan) -> None:
    """Writes a plan into a run directory; a reader never sees half of it."""
    unfinished = folder / f"{PLAN_NAME}.tmp"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(kept.to_json())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / PLAN_NAME)


def _described(sharding: ParameterSharding) -> dict[str, Any]:
    spec = sharding.sharding_spec
    shards = None
    if spec is not None:
        shards = [
            {"offsets": list(shard.shard_offsets), "sizes": list(shard.shard_sizes), "placement": str(shard.placement)}
            for shard in spec.shards
        ]
    described = {
        "sharding_type": sharding.sharding_type,
        "compute_kernel": sharding.compute_kernel,
        "ranks": None if sharding.ranks is None else list(sharding.ranks),
        "shards": shards,
    }
    if isinstance(sharding, TieredParameterSharding):
        described |= {"tier": sharding.tier, "cache_bytes": sharding.cache_bytes}
    return described


def _sharding(table: Mapping[str, Any]) -> ParameterSharding:
    spec = None
    if table["shards"] is not None:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[int(offset) for offset in shard["offsets"]],
                    shard_sizes=[int(size) for size in shard["sizes"]],
                    placement=str(shard["placement"]),
                )
                for shard in table["shards"]
            ]
        )
    values = {
        "sharding_type": str(table["sharding_type"]),
        "compute_kernel": str(table["compute_kernel"]),
        "ranks": None if table["ranks"] is None else [int(rank) for rank in table["ranks"]],
        "sharding_spec": spec,
    }
    if "tier" in table:
        return TieredParameterSharding(**values, tier=str(table["tier"]), cache_bytes=int(table["cache_bytes"]))
    return ParameterSharding(**values)
