"""One plan for all replicas: made for one of them, moved to the ranks of each."""

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.remote_device import _remote_device as _RemoteDevice  # noqa: N812 - torch's only name for a shard's place
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from torchrec_kstep.errors import PlanError


def localize(plan: ShardingPlan, first_rank: int, ranks_per_replica: int) -> ShardingPlan:
    """Returns a plan made for ranks 0 to `ranks_per_replica` - 1, moved to the replica that begins at `first_rank`.

    Raises:
        PlanError: the plan uses a rank beyond one replica: it was made for the whole job.
    """
    moved = copy.deepcopy(plan)
    for path, module in moved.plan.items():
        if not isinstance(module, EmbeddingModuleShardingPlan):
            continue
        for table, sharding in module.items():
            beyond = [rank for rank in _ranks(sharding) if rank >= ranks_per_replica]
            if beyond:
                raise PlanError(
                    f"the plan puts table {table!r} of {path!r} on rank {beyond[0]}, but a replica has {ranks_per_replica} ranks: make the "
                    "plan for one replica (`env.replica_world`), it is then used by all of them"
                )
            if sharding.ranks is not None:
                sharding.ranks = [rank + first_rank for rank in sharding.ranks]
            for shard in _shards(sharding):
                shard.placement = _RemoteDevice(f"rank:{_rank_of(shard) + first_rank}/{_device_of(shard)}")
    return moved


def plan_digest(plan: ShardingPlan, first_rank: int = 0) -> str:
    """Returns a digest that is equal for plans which shard all tables alike; `first_rank` is taken off all ranks."""
    described: dict[str, Any] = {}
    for path, module in plan.plan.items():
        if not isinstance(module, Mapping):  # a plan, or what a sharded collection keeps of it
            described[path] = str(module)
            continue
        for table, sharding in module.items():
            described[f"{path}.{table}"] = [
                sharding.sharding_type,
                sharding.compute_kernel,
                [rank - first_rank for rank in sharding.ranks or []],
                [[list(shard.shard_offsets), list(shard.shard_sizes), _rank_of(shard) - first_rank] for shard in _shards(sharding)],
            ]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _shards(sharding: ParameterSharding) -> list[ShardMetadata]:
    spec = sharding.sharding_spec
    return [] if spec is None else list(spec.shards)


def _rank_of(shard: ShardMetadata) -> int:
    assert isinstance(shard.placement, _RemoteDevice), "a shard of a plan without a place"
    rank = shard.placement.rank()
    assert rank is not None, "a shard of a plan without a rank"
    return int(rank)


def _device_of(shard: ShardMetadata) -> torch.device:
    assert isinstance(shard.placement, _RemoteDevice), "a shard of a plan without a place"
    return shard.placement.device()


def _ranks(sharding: ParameterSharding) -> list[int]:
    return [*(sharding.ranks or []), *(_rank_of(shard) for shard in _shards(sharding))]
