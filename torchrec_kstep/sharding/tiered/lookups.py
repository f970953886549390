"""Lookups with tiered kernels, and the shardings that make them. Only `create_lookup` differs from TorchRec's shardings."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.sharding.tiered.kernel import TieredKernel
from torchrec_kstep.sharding.tiered.tables import TableMaker
from torchrec_kstep.torchrec_seam.kernel import (
    CUSTOMIZED_KERNEL,
    BaseEmbedding,
    CwPooledEmbeddingSharding,
    CwSequenceEmbeddingSharding,
    GridPooledEmbeddingSharding,
    GroupedEmbeddingConfig,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    TwSequenceEmbeddingSharding,
)

ROW_SHARDED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


class _Prefetches:
    """Tells tiered kernels of a batch ahead; upstream knows four kernels of its own only."""

    _emb_modules: torch.nn.ModuleList
    _feature_splits: list[int]

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None, is_same_later: bool = False) -> None:
        """Says that these features will be looked up soon. Stock kernels of the lookup have nothing to bring up on the CPU."""
        del forward_stream
        for kernel, features in zip(self._emb_modules, sparse_features.split(self._feature_splits), strict=True):
            if isinstance(kernel, TieredKernel):
                kernel.prefetch(features, is_same_later)


def is_tiered(config: GroupedEmbeddingConfig) -> bool:
    """Tells whether a group of tables is ours; TorchRec never mixes kernels in a group."""
    return bool(config.compute_kernel.value == CUSTOMIZED_KERNEL)


class TieredPooledLookup(_Prefetches, GroupedPooledEmbeddingsLookup):  # type: ignore[misc]  # torchrec has no type information
    """TorchRec's pooled lookup, with our kernel for the groups that ask for it."""

    def __init__(self, maker: TableMaker, name: str, is_row_sharded: bool, **options: Any) -> None:
        """`name` tells this lookup from others of the collection; the rest is upstream's, passed by name."""
        self._maker, self._name, self._is_row_sharded = maker, name, is_row_sharded
        self._num_kernels = 0
        super().__init__(**options)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: torch.device | None, pg: dist.ProcessGroup | None, sharding_type: Any, env: Any
    ) -> BaseEmbedding:
        if not is_tiered(config):
            return super()._create_embedding_kernel(config, device, pg, sharding_type, env)
        self._num_kernels += 1
        return self._maker.bag_kernel(config, f"{self._name}.{self._num_kernels}", self._is_row_sharded, pg)


class TieredSequenceLookup(_Prefetches, GroupedEmbeddingsLookup):  # type: ignore[misc]  # torchrec has no type information
    """TorchRec's sequence lookup, with our kernel for the groups that ask for it."""

    def __init__(self, maker: TableMaker, name: str, **options: Any) -> None:
        """As `TieredPooledLookup`."""
        self._maker, self._name = maker, name
        self._num_kernels = 0
        super().__init__(**options)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, device: torch.device | None, env: Any = None
    ) -> BaseEmbedding:
        if not is_tiered(config):
            return super()._create_embedding_kernel(config, pg, device, env)
        self._num_kernels += 1
        return self._maker.sequence_kernel(config, f"{self._name}.{self._num_kernels}", pg)


def tiered_kernels(lookup: torch.nn.Module) -> list[TieredKernel]:
    """Returns our kernels inside a lookup, in its order."""
    return [module for module in lookup.modules() if isinstance(module, TieredKernel)]


class _MakesLookups:
    """What our shardings share. The collection hands `maker` over before it asks for a lookup."""

    maker: TableMaker
    sharding_type: ShardingType
    _env: ShardingEnv
    _pg: dist.ProcessGroup
    _device: torch.device | None
    _rank: int

    def _options(self, device: torch.device | None) -> dict[str, Any]:
        per_rank = getattr(self, "_grouped_embedding_configs_per_rank", None)
        configs = self._grouped_embedding_configs if per_rank is None else per_rank[self._rank]  # type: ignore[attr-defined]  # upstream's
        return {"grouped_configs": configs, "pg": self._pg, "device": device or self._device, "env": self._env}


class _MakesPooledLookups(_MakesLookups):
    def create_lookup(
        self, device: torch.device | None = None, fused_params: dict[str, Any] | None = None, feature_processor: Any = None
    ) -> TieredPooledLookup:
        """Makes the lookup of this rank's tables."""
        del fused_params
        is_row_sharded = self.sharding_type.value in ROW_SHARDED
        # Stock kernels of row-sharded tables must sum, as ours; they know it from this, where upstream passes no grid either.
        kind = ShardingType.TABLE_ROW_WISE if self.sharding_type == ShardingType.GRID_SHARD else self.sharding_type
        return TieredPooledLookup(
            self.maker,
            self.sharding_type.value,
            is_row_sharded,
            feature_processor=feature_processor,
            sharding_type=kind if is_row_sharded else None,
            **self._options(device),
        )


class _MakesSequenceLookups(_MakesLookups):
    def create_lookup(
        self, device: torch.device | None = None, fused_params: dict[str, Any] | None = None, feature_processor: Any = None
    ) -> TieredSequenceLookup:
        """Makes the lookup of this rank's tables."""
        del fused_params, feature_processor
        return TieredSequenceLookup(self.maker, self.sharding_type.value, **self._options(device))


class TieredTableWise(_MakesPooledLookups, TwPooledEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Whole tables."""

    sharding_type = ShardingType.TABLE_WISE


class TieredRowWise(_MakesPooledLookups, RwPooledEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Rows over all ranks."""

    sharding_type = ShardingType.ROW_WISE


class TieredColumnWise(_MakesPooledLookups, CwPooledEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Columns over ranks."""

    sharding_type = ShardingType.COLUMN_WISE


class TieredTableRowWise(_MakesPooledLookups, TwRwPooledEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Rows over the ranks of one host."""

    sharding_type = ShardingType.TABLE_ROW_WISE


class TieredGrid(_MakesPooledLookups, GridPooledEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Columns over hosts, and rows over the ranks of each."""

    sharding_type = ShardingType.GRID_SHARD


class TieredSequenceTableWise(_MakesSequenceLookups, TwSequenceEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Whole tables."""

    sharding_type = ShardingType.TABLE_WISE


class TieredSequenceRowWise(_MakesSequenceLookups, RwSequenceEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Rows over all ranks."""

    sharding_type = ShardingType.ROW_WISE


class TieredSequenceColumnWise(_MakesSequenceLookups, CwSequenceEmbeddingSharding):  # type: ignore[misc]  # torchrec has no type information
    """Columns over ranks."""

    sharding_type = ShardingType.COLUMN_WISE


POOLED_SHARDINGS: dict[str, type[_MakesPooledLookups]] = {
    cls.sharding_type.value: cls for cls in (TieredTableWise, TieredRowWise, TieredColumnWise, TieredTableRowWise, TieredGrid)
}
SEQUENCE_SHARDINGS: dict[str, type[_MakesSequenceLookups]] = {
    cls.sharding_type.value: cls for cls in (TieredSequenceTableWise, TieredSequenceRowWise, TieredSequenceColumnWise)
}
