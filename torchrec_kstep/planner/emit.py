"""From a placement to TorchRec's own `ShardingPlan`."""

from dataclasses import dataclass

import torch
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from torchrec_kstep.planner.placement import PlacedTable, Placement
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.planning import placed_spec

KERNELS = {"dense": "dense", "fused": "fused", "tiered": CUSTOMIZED_KERNEL}  # of the configuration: as TorchRec calls it


@dataclass
class TieredParameterSharding(ParameterSharding):  # type: ignore[misc]  # TorchRec carries no type information
    """A table of a plan, with what TorchRec has no words for.

    TorchRec does not see it: it groups tables, and so fills row stores, by their type and pooling alone. Otherwise a run that gets
    more memory would look for its rows in other stores.

    Attributes:
        tier: where rows rest.
        cache_bytes: of each shard's cache in the tier above.
    """

    tier: str = "dram"
    cache_bytes: int = 0


def sharding_plan(placement: Placement, device: str) -> ShardingPlan:
    """Emits an ordinary plan.

    Args:
        placement: tables with their ranks.
        device: "cpu" or "cuda".
    """
    plan = {}
    for path, tables in placement.by_path().items():
        module_plan = EmbeddingModuleShardingPlan()
        for table in tables:
            module_plan[table.name] = _parameter_sharding(table, placement, device)
        plan[path] = module_plan
    return ShardingPlan(plan)


def _parameter_sharding(table: PlacedTable, placement: Placement, device: str) -> ParameterSharding:
    is_replica = table.sharding == "data_parallel"
    columns = table.dim // len(table.ranks) if table.sharding == "column_wise" else None
    spec = None
    if not is_replica:
        shape = torch.empty((table.num_rows, table.dim), device="meta")
        spec = placed_spec(shape, table.sharding, table.ranks, placement.local_world_size, placement.world_size, columns, device)
    kernel = "dense" if is_replica else KERNELS[placement.kernel]
    values = {"sharding_type": table.sharding, "compute_kernel": kernel, "ranks": list(table.ranks), "sharding_spec": spec}
    if kernel == CUSTOMIZED_KERNEL:
        return TieredParameterSharding(**values, tier=table.tier, cache_bytes=table.cache_bytes)
    return ParameterSharding(**values)
