"""Where the rows of tiered tables are opened: in DRAM, or in a cache in DRAM over SSD."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.planner.emit import TieredParameterSharding
from torchrec_kstep.storage.division import BYTES_PER_ELEMENT
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import MIN_SEGMENTS, TierConfig
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.world import World


class RowsOpener(Protocol):
    """Opens the rows of a group of tables."""

    def __call__(
        self, name: str, tables: Sequence[TableSpec], optimizer: OptimizerSpec, share: float, cache_share: float | None = None
    ) -> RowGroup:
        """Returns a row group over `tables`.

        Args:
            name: names the group on this rank, the same in every run of a plan; it can be the name of a folder.
            tables: the rank's shards; `num_rows` is that of the whole table, and row ids are the table's own.
            optimizer: how rows are updated.
            share: the group's part, up to 1, of all bytes that this rank may use.
            cache_share: the group's part of the rank's equal part of the host's DRAM, above 1 where a plan gives this rank more than
                others; None: as `share`.
        """


def open_in_dram(
    name: str, tables: Sequence[TableSpec], optimizer: OptimizerSpec, share: float, cache_share: float | None = None
) -> RowGroup:
    """Opens rows that all live in DRAM, each taking memory from its first update on."""
    del name, share, cache_share
    return RowGroup.in_dram(tables, optimizer)


@dataclass(frozen=True)
class OpenOnSsd:
    """Opens rows in a cache over SSD.

    Attributes:
        tiers: sizes and places of the host.
        world: which rank of the host this is.
    """

    tiers: TierConfig
    world: World

    def __call__(
        self, name: str, tables: Sequence[TableSpec], optimizer: OptimizerSpec, share: float, cache_share: float | None = None
    ) -> TieredTables:
        """Opens one row store, in a folder named after the group below each path.

        Raises:
            ConfigError: two tables of the group are shards of one; or as `TieredTables.open`.
        """
        names = [table.name for table in tables]
        twice = sorted({table for table in names if names.count(table) > 1})
        if twice:
            raise ConfigError(
                f"table {twice[0]!r} has several column shards on rank {self.world.rank}, which cannot share a row store: give them "
                "different ranks, or shard the table by rows"
            )
        quota = self.tiers.num_ssd_bytes
        tiers = replace(
            self.tiers,
            dram_bytes=int(self.tiers.num_dram_bytes * (share if cache_share is None else cache_share)),
            ssd_bytes=None if quota is None else max(int(quota * share), min(quota, self._least_bytes)),
            ssd_paths=[str(Path(path) / name) for path in self.tiers.ssd_paths],
        )
        return TieredTables.open(tables, optimizer, tiers, world=self.world)

    @property
    def _least_bytes(self) -> int:
        """What a store gets of the quota at least, over all ranks of the host: a small table's part would hold no segment."""
        return MIN_SEGMENTS * self.tiers.num_segment_bytes * self.world.local_world_size

    def bytes_per_rank(self) -> int:
        """Returns the rank's part of the quota, or of what is free on the drives of this host where there is none."""
        quota = self.tiers.num_ssd_bytes
        if quota is None:
            folders = [_nearest_folder(Path(path)) for path in self.tiers.ssd_paths]
            quota = sum({folder.stat().st_dev: shutil.disk_usage(folder).free for folder in folders}.values())
        return quota // self.world.local_world_size


def _nearest_folder(path: Path) -> Path:
    """Returns the folder itself, or the one above it in which it would be made."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def planned_cache_shares(plan: ShardingPlan, rank: int, num_ranks_on_host: int, local_world_size: int) -> dict[str, float] | None:
    """Returns the part of a rank's equal part of its host's DRAM that each tiered table on `rank` gets by a plan with caches.

    All of the host's DRAM is given out, in proportion to the planned caches; a rank with larger ones gets more than its equal part.

    Args:
        plan: of all collections, with global ranks.
        rank: whose tables.
        num_ranks_on_host: ranks on a host that share the tables.
        local_world_size: ranks on a host.

    Returns:
        Parts by table; None if the plan says nothing about caches.
    """
    on_host, own = 0, dict[str, int]()
    for module in plan.plan.values():
        for table, sharding in module.items() if isinstance(module, EmbeddingModuleShardingPlan) else ():
            if not isinstance(sharding, TieredParameterSharding) or sharding.sharding_spec is None:
                continue
            for shard in sharding.sharding_spec.shards:
                if shard.placement.rank() // local_world_size == rank // local_world_size:
                    on_host += sharding.cache_bytes
                if shard.placement.rank() == rank:
                    own[table] = own.get(table, 0) + sharding.cache_bytes
    return {table: num_ranks_on_host * cache_bytes / on_host for table, cache_bytes in own.items()} if on_host else None


def plan_record_bytes(plan: ShardingPlan, rank: int, optimizer: OptimizerSpec) -> int:
    """Returns the bytes of all tiered rows, records and all, that a plan gives to `rank`."""
    modules = [module for module in plan.plan.values() if isinstance(module, EmbeddingModuleShardingPlan)]
    return sum(module_record_bytes(module, rank, optimizer) for module in modules)


def module_record_bytes(module: Mapping[str, ParameterSharding], rank: int, optimizer: OptimizerSpec) -> int:
    """As `plan_record_bytes`, for one collection."""
    total = 0
    for sharding in module.values():
        if sharding.compute_kernel != CUSTOMIZED_KERNEL or sharding.sharding_spec is None:
            continue
        for shard in sharding.sharding_spec.shards:
            if shard.placement.rank() == rank:
                total += record_bytes(int(shard.shard_sizes[0]), int(shard.shard_sizes[1]), optimizer)
    return total


def record_bytes(num_rows: int, dim: int, optimizer: OptimizerSpec) -> int:
    """Returns the bytes of the fields of so many rows."""
    return num_rows * BYTES_PER_ELEMENT * sum(field.width for field in optimizer.record_fields(dim))
