"""How the tiers of a host are divided over the row stores of a plan. Pure functions; nothing is opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType

from torchrec_kstep.errors import PlanError
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.planner.emit import TieredParameterSharding
from torchrec_kstep.storage.division import BYTES_PER_ELEMENT
from torchrec_kstep.tier_config import MIN_SEGMENTS, TierConfig
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.optim import ShardMetadata
from torchrec_kstep.units import format_bytes

ModulePlans = Mapping[str, Mapping[str, ParameterSharding]]  # by path of the collection and name of the table
ModuleTables = Mapping[str, Sequence[BaseEmbeddingConfig]]  # by path of the collection


@dataclass(frozen=True)
class StoreShare:
    """A row store's part of what its host may use.

    Attributes:
        dram: part of the rank's equal part of the DRAM; above 1 where a plan gives this rank more than others.
        ssd: part of what is left of the quota when every store of the host has the least that a store needs.
        num_stores: row stores on the host, which share the quota.
    """

    dram: float = 1.0
    ssd: float = 1.0
    num_stores: int = 1


@dataclass(frozen=True)
class TierShares:
    """What the row stores of one rank get.

    Attributes:
        rank_bytes: of all tiered rows of the rank, records and all.
        host_bytes: the same of all ranks of the host.
        num_stores: row stores of the host.
        cache_shares: the part of the rank's equal part of the DRAM that each table gets by the plan; None: the plan leaves it to the
            bytes of rows.
    """

    rank_bytes: int
    host_bytes: int
    num_stores: int
    cache_shares: Mapping[str, float] | None = None

    @classmethod
    def of_plan(
        cls, plan: ModulePlans, tables: ModuleTables, optimizer: OptimizerSpec, rank: int, num_ranks: int, local_world_size: int
    ) -> "TierShares":
        """Divides the tiers of a host over all collections of a plan.

        Args:
            plan: with the ranks of the job.
            tables: of the collections of the plan.
            optimizer: says how large the record of a row is.
            rank: which rank of the job.
            num_ranks: ranks that share the tables; fewer than the job has where it trains several replicas.
            local_world_size: ranks of the job on each host.
        """
        host = rank // local_world_size
        ranks_of_plan = min(local_world_size, num_ranks)  # on a host
        num_copies = local_world_size // ranks_of_plan  # replicas on a host, all alike
        stores, record_bytes_of = set(), dict[int, int]()
        on_host, own = 0, dict[str, int]()
        for path, module in plan.items():
            groups = {table.name: (path, module[table.name].sharding_type, *_grouping(table)) for table in tables.get(path, ())}
            for name, sharding in module.items():
                for shard in tiered_shards(sharding):
                    holder = rank_of(shard)
                    if holder // local_world_size != host:
                        continue
                    stores.add((holder, groups[name]))
                    num_bytes = record_bytes(int(shard.shard_sizes[0]), int(shard.shard_sizes[1]), optimizer)
                    record_bytes_of[holder] = record_bytes_of.get(holder, 0) + num_bytes
                    cache_bytes = sharding.cache_bytes if isinstance(sharding, TieredParameterSharding) else 0
                    on_host += cache_bytes
                    if holder == rank:
                        own[name] = own.get(name, 0) + cache_bytes
        return cls(
            rank_bytes=record_bytes_of.get(rank, 0),
            host_bytes=num_copies * sum(record_bytes_of.values()),
            num_stores=num_copies * len(stores),
            cache_shares={name: ranks_of_plan * cache_bytes / on_host for name, cache_bytes in own.items()} if on_host else None,
        )

    def of_store(self, table_bytes: Sequence[tuple[str, int]]) -> StoreShare:
        """Returns the share of the store that holds these shards of tables, each with the bytes of its rows."""
        num_bytes = sum(one for _, one in table_bytes)
        if self.cache_shares is None:
            dram = min(num_bytes / self.rank_bytes, 1.0) if self.rank_bytes else 1.0
        else:
            dram = sum(self.cache_shares.get(name, 0.0) for name in {name for name, _ in table_bytes})
        return StoreShare(dram, num_bytes / self.host_bytes if self.host_bytes else 1 / max(self.num_stores, 1), self.num_stores)


def check_quota(shares: TierShares, tiers: TierConfig) -> None:
    """Makes sure that every row store of a host gets the least that it needs of the quota.

    Raises:
        PlanError: it does not; with numbers, and what would.
    """
    least_bytes = MIN_SEGMENTS * tiers.num_segment_bytes
    if tiers.num_ssd_bytes is None or shares.num_stores * least_bytes <= tiers.num_ssd_bytes:
        return
    fitting_bytes = tiers.num_ssd_bytes // (shares.num_stores * MIN_SEGMENTS)
    raise PlanError(
        f"tiers.ssd_bytes={format_bytes(tiers.num_ssd_bytes)} is less than the {shares.num_stores} row stores of a host need at least: "
        f"{shares.num_stores} x {MIN_SEGMENTS} segments of {format_bytes(tiers.num_segment_bytes)} = "
        f"{format_bytes(shares.num_stores * least_bytes)}. Raise tiers.ssd_bytes to that, or lower tiers.segment_bytes to at most "
        f"{format_bytes(fitting_bytes)} (not below 64 KiB); rows of {format_bytes(shares.host_bytes)} come on top once all are touched"
    )


def quota_of(share: StoreShare, tiers: TierConfig) -> int | None:
    """Returns a store's part of the quota: the least that each needs, and its part of the rest by its bytes; None without a quota."""
    if tiers.num_ssd_bytes is None:
        return None
    least_bytes = MIN_SEGMENTS * tiers.num_segment_bytes
    return least_bytes + int(max(tiers.num_ssd_bytes - share.num_stores * least_bytes, 0) * share.ssd)


def tiered_shards(sharding: ParameterSharding) -> Sequence[ShardMetadata]:
    """Returns the shards of a table of a plan whose rows are ours; none of another kernel."""
    if sharding.compute_kernel != CUSTOMIZED_KERNEL or sharding.sharding_spec is None:
        return ()
    shards: Sequence[ShardMetadata] = sharding.sharding_spec.shards
    return shards


def rank_of(shard: ShardMetadata) -> int:
    """Returns the rank that a plan puts a shard on."""
    placement: Any = shard.placement
    return int(placement.rank())


def record_bytes(num_rows: int, dim: int, optimizer: OptimizerSpec) -> int:
    """Returns the bytes of the fields of so many rows."""
    return num_rows * BYTES_PER_ELEMENT * sum(field.width for field in optimizer.record_fields(dim))


def _grouping(table: BaseEmbeddingConfig) -> tuple[object, ...]:
    """What TorchRec tells groups of tables with one kernel and sharding type apart by; each group is a row store."""
    return (
        getattr(table, "pooling", PoolingType.NONE),
        getattr(table, "enable_embedding_update", False),
        getattr(table, "stash_weights", False),
    )
