"""What TorchRec needs to be told of several replicas: its two-dimensional environment, and whose dense gradients are averaged.

`ShardingEnv2D` is made for `DMPCollection` and not exported. It keeps all ranks as its `process_group`, so that TorchRec's own
wrapper would average dense gradients over all replicas in every step; the wrapper here does so within one replica.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D

__all__ = ["ReplicaDataParallelWrapper", "ShardingEnv", "ShardingEnv2D", "default_store", "replica_sharding_env"]


def replica_sharding_env(
    sharding_group: dist.ProcessGroup, merge_group: dist.ProcessGroup, ranks_by_replica: list[list[int]], ranks_per_host: int
) -> ShardingEnv2D:
    """Makes the environment in which tables are sharded over one replica. Not collective.

    Args:
        sharding_group: the ranks of this rank's replica.
        merge_group: the ranks at this rank's position of all replicas.
        ranks_by_replica: consecutive ranks, one list a replica.
        ranks_per_host: ranks that a replica has on each of its hosts.
    """
    mesh = DeviceMesh.from_group([merge_group, sharding_group], "cpu", mesh=ranks_by_replica, mesh_dim_names=("replicate", "shard"))
    env = ShardingEnv2D(
        sharding_pg=sharding_group,
        replica_pg=merge_group,
        global_pg=dist.GroupMember.WORLD,
        device_mesh=mesh,
        node_group_size=ranks_per_host,
        use_inter_host_allreduce=True,  # consecutive ranks share a replica
    )
    env.output_dtensor = False  # our kernels show their state as ShardedTensor
    return env


class ReplicaDataParallelWrapper(DefaultDataParallelWrapper):  # type: ignore[misc]  # torchrec has no type information
    """Averages dense gradients over the ranks of one replica only."""

    def __init__(self, sharding_group: dist.ProcessGroup, **options: Any) -> None:
        """Keeps the ranks of this rank's replica; `options` are TorchRec's."""
        super().__init__(**options)
        self._sharding_group = sharding_group

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wraps the dense part of `dmp`. Called by `DistributedModelParallel`, on all ranks of the replica."""
        del env  # its process group holds all replicas
        super().wrap(dmp, ShardingEnv.from_process_group(self._sharding_group), device)


def default_store() -> Store:
    """Returns the store of the default process group, which torch keeps private."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store
