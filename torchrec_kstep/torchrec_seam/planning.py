"""Parts of TorchRec's planner that its `planner` package does not export, and two of its habits kept from the user."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, PlannerError, Topology, TopologyFactory, TrainerConfig

__all__ = ["FixedPercentageStorageReservation", "NoopEmbeddingStats", "PlannerError", "cpu_topology", "without_replica_warnings"]


def cpu_topology(world_size: int, local_world_size: int, memory_per_rank_bytes: int) -> Topology:
    """Describes ranks that compute on CPUs, `memory_per_rank_bytes` of DRAM each.

    Made through the factory, because a directly constructed `Topology` warns that its job will fail.
    """
    trainer = TrainerConfig(world_size=world_size, local_world_size=local_world_size, ddr_cap_bytes=memory_per_rank_bytes)
    return TopologyFactory.create_topology(trainer_config=trainer, kernel_config=KernelConfig(compute_device="cpu"))


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
