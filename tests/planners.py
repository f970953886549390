"""Planners on machines that come with the package, and tasks for them, for tests of what plans and predictions are."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.config.schema import OptimConfig, PlannerConfig
from torchrec_kstep.planner.topology_planner import Job, TopologyShardingPlanner
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.topology import ClusterTopology, find_topology, load_topology

SMALL = load_topology(find_topology("small_cpu"))
SOCKETS = load_topology(find_topology("two_socket_cpu"))


def task(rows: list[int], dim: int = 32, pooling: PoolingType = PoolingType.SUM) -> nn.Module:
    """Tables t0, t1, ... that features f0, f1, ... read."""
    tables = [
        EmbeddingBagConfig(name=f"t{index}", feature_names=[f"f{index}"], num_embeddings=num, embedding_dim=dim, pooling=pooling)
        for index, num in enumerate(rows)
    ]
    return nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")), nn.Linear(8, 8))


def sharders(kernel: str) -> list[Any]:
    """Those of `train`."""
    return build_sharders(PlannerConfig(kernel=kernel), OptimConfig(embedding="adagrad" if kernel == "fused" else "adam"))


def planner(topology: ClusterTopology = SMALL, world: int = 2, per_host: int = 2, **options: Any) -> TopologyShardingPlanner:
    """Takes the options of a job and those of the planner."""
    job = {name: options.pop(name) for name in list(options) if name in Job.__dataclass_fields__}
    return TopologyShardingPlanner(
        topology, Job(**{"batch_size": 256, "world_size": world, "local_world_size": per_host, **job}), **options
    )


def without_drives(topology: ClusterTopology) -> ClusterTopology:
    """The same hosts without their drives."""
    host = topology.hosts[0]
    names = {drive.name for drive in host.drives}
    links = tuple(link for link in host.links if not names & set(link.ends))
    return replace(topology, hosts=(replace(host, drives=(), links=links),))
