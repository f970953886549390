"""Parts of TorchRec's planner that its `planner` package does not export, and two of its habits kept from the user."""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.planner import types as planner_types
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

__all__ = [
    "EmbeddingEnumerator",
    "FixedPercentageStorageReservation",
    "NoopEmbeddingStats",
    "PlannerError",
    "cpu_topology",
    "placed_spec",
    "quiet_topology",
    "without_replica_warnings",
]


def cpu_topology(world_size: int, local_world_size: int, memory_per_rank_bytes: int) -> Topology:
    """Describes ranks that compute on CPUs, `memory_per_rank_bytes` of DRAM each.

    Made through the factory where TorchRec has one (1.8), because there a directly constructed `Topology` warns that its job
    will fail.
    """
    factory = getattr(planner_types, "TopologyFactory", None)
    if factory is None:
        return Topology(world_size=world_size, compute_device="cpu", local_world_size=local_world_size, ddr_cap=memory_per_rank_bytes)
    trainer = planner_types.TrainerConfig(world_size=world_size, local_world_size=local_world_size, ddr_cap_bytes=memory_per_rank_bytes)
    return factory.create_topology(trainer_config=trainer, kernel_config=planner_types.KernelConfig(compute_device="cpu"))


@contextmanager
def without_replica_warnings() -> Iterator[None]:
    """Drops the planner's warning that a replicated table has no sharding spec: it has none by design."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Sharding spec not found")

    root = logging.getLogger()
    root.addFilter(is_wanted)
    try:
        yield
    finally:
        root.removeFilter(is_wanted)


def placed_spec(
    tensor: torch.Tensor,
    sharding_type: str,
    ranks: Sequence[int],
    local_world_size: int,
    world_size: int,
    shard_columns: int | None,
    device: str,
) -> EnumerableShardingSpec:
    """Cuts a table as TorchRec's planner does, and puts the shards on `ranks` in order.

    Args:
        tensor: of the table's shape, on any device.
        sharding_type: any type but data_parallel.
        ranks: one per shard.
        local_world_size: ranks per host.
        world_size: ranks.
        shard_columns: columns of a column shard.
        device: type of the device that shards live on.
    """
    sizes, offsets = calculate_shard_sizes_and_offsets(tensor, world_size, local_world_size, sharding_type, shard_columns)
    return EnumerableShardingSpec(
        [
            ShardMetadata(shard_sizes=size, shard_offsets=offset, placement=placement(device, rank, local_world_size))
            for size, offset, rank in zip(sizes, offsets, ranks, strict=True)
        ]
    )


def quiet_topology(values: Mapping[str, Any]) -> Topology:
    """Makes a `Topology` from its constructor's arguments, without the warning that the job will fail because no factory made it."""
    takes_note = "created_by_factory" in inspect.signature(Topology.__init__).parameters  # TorchRec 1.8
    return Topology(**values, **({"created_by_factory": True} if takes_note else {}))
