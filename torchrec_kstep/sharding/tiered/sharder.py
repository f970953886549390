"""The sharders that users hand to `DistributedModelParallel` and to planners."""

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_kstep.ops.row_group import DramLayout
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.sharding.tiered.collection import ShardedTieredEmbeddingBagCollection
from torchrec_kstep.sharding.tiered.lookups import POOLED_SHARDINGS, SEQUENCE_SHARDINGS
from torchrec_kstep.sharding.tiered.opening import OpenInDram, OpenOnSsd, RowsOpener
from torchrec_kstep.sharding.tiered.sequence_collection import ShardedTieredEmbeddingCollection
from torchrec_kstep.sharding.tiered.shares import ModulePlans, ModuleTables, TierShares, check_quota
from torchrec_kstep.sharding.tiered.state import planned_rank
from torchrec_kstep.sharding.tiered.tables import TableMaker
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.sharding import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, EmbeddingComputeKernel
from torchrec_kstep.world import World


class _TieredSharder:
    """What the sharders of both kinds of collection share.

    Attributes:
        optimizer: how rows of tiered tables are updated.
    """

    def __init__(
        self,
        optimizer: OptimizerSpec,
        tiers: TierConfig | None = None,
        *,
        world: World | None = None,
        deferred: bool = False,
        seed: int = 0,
        dram_layout: DramLayout = "auto",
        fused_params: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Keeps what the tables will be made of.

        Args:
            optimizer: e.g. `AdamSpec(lr=1e-3)`.
            tiers: sizes and places of the host's tiers; without them all rows live in DRAM.
            world: this rank's position, by default torchrun's.
            deferred: update rows in `optimizer.step()`, once for all backwards since `zero_grad()`, instead of inside each
                backward: gradient accumulation and several losses per step work as with ordinary parameters.
            seed: of the initial rows whose `init_fn` brings none.
            dram_layout: of rows that all live in DRAM, as in `RowGroup.in_dram`.
            fused_params: parameters of TorchRec's own fused kernels.
            options: of TorchRec's sharder.
        """
        super().__init__(fused_params=fused_params, **options)  # type: ignore[call-arg]  # TorchRec's sharder, beside this class
        self.optimizer = optimizer
        self._open_rows: RowsOpener = OpenInDram(dram_layout) if tiers is None else OpenOnSsd(tiers, world or World.from_torchrun())
        self._divided: tuple[ModulePlans, ModuleTables] | None = None
        self._is_deferred = deferred
        self._seed = seed

    @property
    def copies_per_weight(self) -> int:
        """Values kept per weight, itself and optimizer states: the planner divides memory by it."""
        return sum(field.width for field in self.optimizer.record_fields(dim=1024)) // 1024

    @property
    def tier_bytes_per_rank(self) -> int:
        """What a rank may hold on SSD; 0 for rows in DRAM. The planner takes it for the rank's memory."""
        return self._open_rows.bytes_per_rank() if isinstance(self._open_rows, OpenOnSsd) else 0

    @property
    def cache_bytes_per_host(self) -> int | None:
        """DRAM for cached rows of all ranks of a host; None for rows that all live in DRAM."""
        return self._open_rows.tiers.num_dram_bytes if isinstance(self._open_rows, OpenOnSsd) else None

    @property
    def ssd_paths(self) -> tuple[str, ...]:
        """Folders of the host's drives; none for rows in DRAM."""
        return tuple(map(str, self._open_rows.tiers.ssd_paths)) if isinstance(self._open_rows, OpenOnSsd) else ()

    def divide_over(self, plan: ShardingPlan, tables: ModuleTables) -> None:
        """Divides the tiers over all collections of `plan`. Without it each collection takes all of what the host may use.

        Args:
            plan: of all collections.
            tables: of all collections, by path.
        """
        self._divided = module_plans(plan), tables

    def check_plan(self, plan: ShardingPlan, tables: ModuleTables, num_ranks: int) -> None:
        """Makes sure that the row stores of a plan fit into the quota of every host. Not collective.

        Args:
            plan: of all collections.
            tables: of all collections, by path.
            num_ranks: ranks that share the tables.

        Raises:
            PlanError: the least that the stores need is more than there is.
        """
        if isinstance(self._open_rows, OpenOnSsd):
            size = self._open_rows.world.local_world_size
            for rank in range(0, num_ranks, size):
                shares = TierShares.of_plan(module_plans(plan), tables, self.optimizer, rank, num_ranks, size)
                check_quota(shares, self._open_rows.tiers)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernels that a plan may use: ours first; a replicated table is never tiered."""
        del compute_device_type
        dense = EmbeddingComputeKernel.DENSE.value
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [dense]
        return [CUSTOMIZED_KERNEL, EmbeddingComputeKernel.FUSED.value, dense]

    def _maker(
        self, tables: Sequence[BaseEmbeddingConfig], params: dict[str, ParameterSharding], env: ShardingEnv, module_fqn: str | None
    ) -> TableMaker:
        """Joins all that a collection's kernels are made of."""
        shares = None
        if isinstance(self._open_rows, OpenOnSsd):
            plan, all_tables = self._divided or ({module_fqn or "": params}, {module_fqn or "": tables})
            size = self._open_rows.world.local_world_size
            shares = TierShares.of_plan(plan, all_tables, self.optimizer, planned_rank(env), env.world_size, size)
            check_quota(shares, self._open_rows.tiers)
        return TableMaker(
            open_rows=self._open_rows,
            optimizer=self.optimizer,
            is_deferred=self._is_deferred,
            seed=self._seed,
            tables={table.name: table for table in tables},
            prefix=module_fqn or "",
            shares=shares,
        )


def module_plans(plan: ShardingPlan) -> ModulePlans:
    """Returns the plans of embedding collections, by path."""
    return {path: module for path, module in plan.plan.items() if isinstance(module, EmbeddingModuleShardingPlan)}


class TieredEmbeddingBagCollectionSharder(_TieredSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]  # torchrec is untyped
    """Shards `EmbeddingBagCollection`s whose tables live in tiers and are updated by our kernels.

    A plan gives a table our kernel by `compute_kernel="customized_kernel"`; tables with other kernels stay TorchRec's own,
    also within one collection. The rows of a tiered table start with values that depend on (seed, name of the table,
    row, column) alone. Weights of the module that is sharded are not copied: load them with
    `load_state_dict`.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTieredEmbeddingBagCollection:
        """Shards a collection by its part of the plan. Called by `DistributedModelParallel`, on all ranks.

        Raises:
            ConfigError: a tiered table asks for what tiers cannot do.
        """
        return ShardedTieredEmbeddingBagCollection(
            module,
            params,
            env,
            self._maker(module.embedding_bag_configs(), params, env, module_fqn),
            device=device,
            fused_params=self.fused_params,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the types that a plan may use; the device does not matter."""
        del compute_device_type
        return [ShardingType.DATA_PARALLEL.value, *POOLED_SHARDINGS]

    @property
    def sharded_module_type(self) -> type[ShardedTieredEmbeddingBagCollection]:
        """The type that `shard` returns."""
        return ShardedTieredEmbeddingBagCollection


class TieredEmbeddingCollectionSharder(_TieredSharder, EmbeddingCollectionSharder):  # type: ignore[misc]  # torchrec is untyped
    """As `TieredEmbeddingBagCollectionSharder`, for `EmbeddingCollection`s: rows are read without pooling.

    Table-wise, row-wise and column-wise. As upstream, a collection that is not on `meta` keeps its weights.
    """

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTieredEmbeddingCollection:
        """Shards a collection by its part of the plan. Called by `DistributedModelParallel`, on all ranks.

        Raises:
            ConfigError: a tiered table asks for what tiers cannot do.
        """
        return ShardedTieredEmbeddingCollection(
            module,
            params,
            env,
            self._maker(module.embedding_configs(), params, env, module_fqn),
            device=device,
            fused_params=self.fused_params,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the types that a plan may use; the device does not matter."""
        del compute_device_type
        return [ShardingType.DATA_PARALLEL.value, *SEQUENCE_SHARDINGS]

    @property
    def sharded_module_type(self) -> type[ShardedTieredEmbeddingCollection]:
        """The type that `shard` returns."""
        return ShardedTieredEmbeddingCollection
