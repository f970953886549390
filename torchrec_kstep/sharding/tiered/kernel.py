"""The compute kernels: the lookups of tables in a row group, as TorchRec's grouped lookups call them."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.ops.batch import Dedup
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.sharding.tiered.optimizer import TieredOptimizer
from torchrec_kstep.sharding.tiered.shards import TableShard
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.torchrec_seam.kernel import BaseEmbedding, GroupedEmbeddingConfig
from torchrec_kstep.torchrec_seam.optim import DeferredUpdate, EmptyFusedOptimizer, FusedOptimizerModule

MAX_BATCHES_AHEAD = 64  # whose unique rows are kept; more are told to the rows all the same


class _Known(NamedTuple):
    """A batch that was told ahead."""

    ids: torch.Tensor
    batch: Dedup
    offsets: torch.Tensor


class TieredKernel(BaseEmbedding, FusedOptimizerModule):  # type: ignore[misc]  # torchrec has no type information
    """Tables of one group on this rank. It has no parameters: rows live in the row group, and nothing of torch moves them.

    The parameter that TorchRec wants to see of each table is empty. It stands for the table in names and in what must be
    kept away from dense optimizers; values are in `state_dict`.
    """

    def __init__(
        self, config: GroupedEmbeddingConfig, group: RowGroup, shards: Sequence[TableShard], optimizer: TieredOptimizer, is_deferred: bool
    ) -> None:
        """Takes a row group whose tables are those of `config`, in its order."""
        super().__init__()
        self._config = config
        self._optimizer = optimizer
        self.group = group
        self.shards = tuple(shards)
        update = DeferredUpdate() if is_deferred else EmptyFusedOptimizer()
        self.table_of_shard = {group.tables[shard.index].name: shard.table for shard in shards}
        self._stand_ins = {shard.table: stand_in(update) for shard in shards}
        self._table_of_feature = [index for index, table in enumerate(config.embedding_tables) for _ in range(table.num_features())]
        self._ahead: deque[_Known] = deque(maxlen=MAX_BATCHES_AHEAD)
        self._last: Dedup | None = None  # the batch looked up last
        own = [shards[index] for index in self._table_of_feature]
        is_narrow = all(shard.first_row + shard.num_rows <= 1 << 31 for shard in own)
        first_rows: npt.NDArray[Any] = np.array([shard.first_row for shard in own], np.int32 if is_narrow else np.int64)
        self._first_row_of_feature = first_rows if first_rows.any() else None

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """TorchRec's description of the tables."""
        return self._config

    @property
    def fused_optimizer(self) -> TieredOptimizer:
        """The optimizer of these tables."""
        return self._optimizer

    def dedup(self, features: KeyedJaggedTensor) -> tuple[Dedup, torch.Tensor]:
        """Sorts the ids of features, in the order of `config`, into rows of the tables.

        Returns:
            The rows, and the bags' offsets `[F * B + 1]` int64.
        """
        offsets = int64_here(features.offsets())
        ids = features.values().contiguous()
        if self._first_row_of_feature is not None and ids.numel():
            ids = shifted_here(ids, offsets, self._first_row_of_feature)
        return self.group.dedup(ids, offsets, self._table_of_feature), offsets

    def prefetch(self, features: KeyedJaggedTensor, is_same_later: bool) -> None:
        """Says that these features will be looked up soon, batch after batch in this order; never changes a result.

        Where the lookup will get the same tensors, their rows are kept for it.
        """
        batch, offsets = self.dedup(features)
        self.group.prefetch(batch)
        if is_same_later:
            self._ahead.append(_Known(features.values(), batch, offsets))

    def cancel_prefetch(self) -> None:
        """Forgets the batches that were told ahead and will not come."""
        self._ahead.clear()
        if isinstance(self.group, TieredTables):
            self.group.cancel_prefetch()

    def _rows_of(self, features: KeyedJaggedTensor) -> tuple[Dedup, torch.Tensor]:
        """As `dedup`, without doing it again for the very tensors of which `prefetch` was told.

        They are known by their place in memory, which nothing else can take while they are held here.
        """
        ids = features.values()
        if self._ahead and self._ahead[0].ids.data_ptr() == ids.data_ptr() and self._ahead[0].ids.shape == ids.shape and ids.numel():
            known = self._ahead.popleft()
            batch, offsets = known.batch, known.offsets
        else:
            batch, offsets = self.dedup(features)
        self._last = batch
        return batch, offsets

    def tables_not_finite(self) -> list[str]:
        """Names the tables of which a row of the batch looked up last holds NaN or infinity. Reads those rows; not collective."""
        last = self._last
        if last is None:
            return []
        bounds = last.table_offsets.tolist()
        found = [
            shard.table
            for shard, begin, end in zip(self.shards, bounds[:-1], bounds[1:], strict=True)
            if end > begin and not bool(self.group.read(shard.index, last.unique_rows[begin:end]).isfinite().all())
        ]
        return list(dict.fromkeys(found))

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the stand-in of each table."""
        del recurse, remove_duplicate
        for table, parameter in self._stand_ins.items():
            yield (f"{prefix}.{table}.weight" if prefix else f"{table}.weight"), parameter

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields each table's name and stand-in."""
        yield from self._stand_ins.items()

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """There are none."""
        del prefix, recurse, remove_duplicate
        yield from ()

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Adds nothing: the sharded collection shows the tables."""
        del prefix, keep_vars
        return {} if destination is None else destination

    def flush(self) -> None:
        """Nothing to do before state is read: it is read through the cache."""

    def purge(self) -> None:
        """Nothing to do before state is written: it is written through the cache."""


class TieredBagKernel(TieredKernel):
    """Pooled lookups."""

    def __init__(self, *args: Any, is_row_sharded: bool, **options: Any) -> None:
        """`is_row_sharded`: a bag's ids are spread over ranks, so only sums are taken here and the collection averages."""
        super().__init__(*args, **options)
        is_mean = self._config.pooling == PoolingType.MEAN and not is_row_sharded
        self._pooling: Any = "mean" if is_mean else "sum"

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns `[B, sum of the features' dims]` float32."""
        batch, offsets = self._rows_of(features)
        weights = features.weights().float().contiguous() if self._config.is_weighted else None
        return self.group.pooled_of(batch, offsets, self._table_of_feature, weights, self._pooling)


class TieredSequenceKernel(TieredKernel):
    """Lookups without pooling."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the rows of all ids, flat float32, feature after feature."""
        batch, offsets = self._rows_of(features)
        return self.group.sequence_of(batch, offsets, self._table_of_feature)


# The two below compute with numpy, in this thread alone. Torch would share the work with its own threads, which go on
# spinning for a while on the cores that the row group's threads need next: that costs more than the work itself.


def int64_here(offsets: torch.Tensor) -> torch.Tensor:
    """Returns int64 offsets as they are, and others converted; contiguous."""
    if offsets.dtype == torch.int64:
        return offsets.contiguous()
    return torch.from_numpy(offsets.numpy().astype(np.int64))


def shifted_here(ids: torch.Tensor, offsets: torch.Tensor, first_row_of_feature: npt.NDArray[Any]) -> torch.Tensor:
    """Adds to the ids of each feature the first row that this rank has of its table.

    Args:
        ids: `[N]`, counted from that row.
        offsets: `[F * B + 1]` int64.
        first_row_of_feature: `[F]`, int64 where a row of the table may be beyond int32.

    Returns:
        `[N]`, of the wider of both types.
    """
    bounds = offsets.numpy()[:: (offsets.numel() - 1) // len(first_row_of_feature)]
    return torch.from_numpy(ids.numpy() + np.repeat(first_row_of_feature, np.diff(bounds)))


def stand_in(update: EmptyFusedOptimizer) -> nn.Parameter:
    """Makes the empty parameter that stands for a table; `update` tells optimizers who updates it."""
    parameter = nn.Parameter(torch.empty(0))
    parameter._in_backward_optimizers = [update]  # type: ignore[attr-defined]  # the mark that torch and TorchRec look at
    return parameter
