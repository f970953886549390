"""From an unsharded task and a plan to the module that trains."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingEnv, ShardingPlan

from torchrec_kstep.errors import ConfigError, PlanError
from torchrec_kstep.planner.tables import find_tables
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.world import World


def shard_task(
    task: nn.Module,
    plan: ShardingPlan,
    sharders: list[ModuleSharder[nn.Module]],
    world: World,
    device: torch.device,
    replicas: Mapping[str, Any] | None = None,
) -> DistributedModelParallel:
    """Shards `task` over the ranks of the default process group, keeping its weights. Collective: call on all ranks.

    Left alone, TorchRec would draw the rows of each shard on the rank that owns it, so that a model would start elsewhere
    for every number of ranks. Here the rows of the unsharded tables are copied into the shards: all plans and world sizes
    start from the same weights. The price is one whole copy of the tables per rank while this runs. Tiered tables are the
    exception: their rows start by themselves, alike everywhere, so their weights are not looked at and may be on `meta`.

    Args:
        task: the same module with the same weights on every rank; it is consumed.
        plan: the same plan on every rank, as `planner.make_plan` returns it.
        sharders: the sharders that the plan was made with.
        world: this rank's position.
        device: where shards and dense parameters live; `cpu` only for now.
        replicas: `KStepEnv.dmp_kwargs()`, with the plan of this rank's replica; None: all ranks share the tables.

    Raises:
        ConfigError: the weights of `task` are on `meta`, so there is nothing to copy, or `device` is no CPU.
        PlanError: there is no process group, or one of another size than `world`.
    """
    if not dist.is_initialized() or dist.get_world_size() != world.world_size:
        size = dist.get_world_size() if dist.is_initialized() else None
        raise PlanError(f"expected a process group of {world.world_size} ranks before sharding, got {size}: call init_process_group first")
    if device.type != "cpu":
        raise ConfigError(
            f"sharding to device {str(device)!r}: plans are made for cpu ranks, and nothing else has been proven yet; use cpu"
        )
    tiered = _tiered_weights(plan)
    weights = {name: weight for name, weight in task.state_dict().items() if name not in tiered}
    if any(weight.is_meta for weight in weights.values()):
        raise ConfigError("the task has no weights (device meta): build it on cpu to train it")
    tables = find_tables(task)
    for sharder in sharders:
        if isinstance(sharder, TieredEmbeddingBagCollectionSharder):
            sharder.divide_over(plan, tables)
    where = replicas or {"env": ShardingEnv.from_process_group(dist.GroupMember.WORLD)}
    dmp = DistributedModelParallel(module=task, device=device, plan=plan, sharders=sharders, **where)
    missing, _ = dmp.load_state_dict(dict(weights), strict=False)  # a copy, because TorchRec renames keys in place
    lost = [name for name in missing if not any(weight.endswith(name) for weight in tiered)]  # TorchRec leaves out some paths
    assert not lost, f"weights were lost on the way: {lost}"
    return dmp


def _tiered_weights(plan: ShardingPlan) -> set[str]:
    """Names the weights of tiered tables as `state_dict` does."""
    return {
        f"{path}.embedding_bags.{table}.weight"
        for path, module in plan.plan.items()
        if isinstance(module, EmbeddingModuleShardingPlan)
        for table, sharding in module.items()
        if sharding.compute_kernel == CUSTOMIZED_KERNEL
    }
