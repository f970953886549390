"""From an unsharded task and a plan to the module that trains."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

from torchrec_kstep.errors import ConfigError, PlanError
from torchrec_kstep.world import World


def shard_task(
    task: nn.Module,
    plan: ShardingPlan,
    sharders: list[ModuleSharder[nn.Module]],
    world: World,
    device: torch.device,
) -> DistributedModelParallel:
    """Shards `task` over the ranks of the default process group, keeping its weights. Collective: call on all ranks.

    Left alone, TorchRec would draw the rows of each shard on the rank that owns it, so that a model would start elsewhere
    for every number of ranks. Here the rows of the unsharded tables are copied into the shards: all plans and world sizes
    start from the same weights. The price is one whole copy of the tables per rank while this runs.

    Args:
        task: the same module with the same weights on every rank; it is consumed.
        plan: the same plan on every rank, as `planner.make_plan` returns it.
        sharders: the sharders that the plan was made with.
        world: this rank's position.
        device: where shards and dense parameters live; `cpu` only for now.

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
    if any(tensor.is_meta for tensor in task.parameters()):
        raise ConfigError("the task has no weights (device meta): build it on cpu to train it")
    weights = task.state_dict()
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(module=task, env=env, device=device, plan=plan, sharders=sharders)
    dmp.load_state_dict(dict(weights))  # a copy, because TorchRec renames keys in place
    return dmp
