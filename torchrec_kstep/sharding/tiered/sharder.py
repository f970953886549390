"""The sharders that users hand to `DistributedModelParallel` and to planners."""

from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.sharding.tiered.collection import ShardedTieredEmbeddingBagCollection
from torchrec_kstep.sharding.tiered.lookups import POOLED_SHARDINGS
from torchrec_kstep.sharding.tiered.tables import RowsOpener, TableMaker, rows_in_dram
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.sharding import EmbeddingBagCollectionSharder, EmbeddingComputeKernel


class TieredEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # torchrec has no type information
    """Shards `EmbeddingBagCollection`s whose tables live in tiers and are updated by our kernels.

    A plan gives a table our kernel by `compute_kernel="customized_kernel"`; tables with other kernels stay TorchRec's own,
    also within one collection. The rows of a tiered table start with values that depend on (seed, table, row, column)
    alone; weights of the module that is sharded are not copied (load them with `load_state_dict`).

    Attributes:
        optimizer: how rows of tiered tables are updated.
    """

    def __init__(
        self,
        optimizer: OptimizerSpec,
        *,
        open_rows: RowsOpener = rows_in_dram,
        deferred: bool = False,
        seed: int = 0,
        fused_params: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Keeps what the tables will be made of.

        Args:
            optimizer: e.g. `AdamSpec(lr=1e-3)`.
            open_rows: where rows live; by default all of them in DRAM.
            deferred: update rows in `optimizer.step()`, once for all backwards since `zero_grad()`, instead of inside each
                backward: gradient accumulation and several losses per step work as with ordinary parameters.
            seed: of the initial rows whose `init_fn` brings none.
            fused_params: parameters of TorchRec's own fused kernels.
            options: of TorchRec's sharder.
        """
        super().__init__(fused_params=fused_params, **options)
        self.optimizer = optimizer
        self._open_rows = open_rows
        self._is_deferred = deferred
        self._seed = seed

    @property
    def copies_per_weight(self) -> int:
        """Values kept per weight, itself and optimizer states: the planner divides memory by it."""
        return sum(field.width for field in self.optimizer.record_fields(dim=1024)) // 1024

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
        maker = TableMaker(
            open_rows=self._open_rows,
            optimizer=self.optimizer,
            is_deferred=self._is_deferred,
            seed=self._seed,
            tables={table.name: table for table in module.embedding_bag_configs()},
            prefix=module_fqn or "",
        )
        return ShardedTieredEmbeddingBagCollection(
            module,
            params,
            env,
            maker,
            device=device,
            fused_params=self.fused_params,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the types that a plan may use; the device does not matter."""
        del compute_device_type
        return [ShardingType.DATA_PARALLEL.value, *POOLED_SHARDINGS]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernels that a plan may use: ours first; a replicated table is never tiered."""
        del compute_device_type
        dense = EmbeddingComputeKernel.DENSE.value
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [dense]
        return [CUSTOMIZED_KERNEL, EmbeddingComputeKernel.FUSED.value, dense]

    @property
    def sharded_module_type(self) -> type[ShardedTieredEmbeddingBagCollection]:
        """The type that `shard` returns."""
        return ShardedTieredEmbeddingBagCollection
