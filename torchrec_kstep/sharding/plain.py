"""Tables with TorchRec's dense kernel under our update of rows: what replicas that merge touched rows need of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.plain_rows import PlainRows
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.sharding.tiered.optimizer import TieredOptimizer
from torchrec_kstep.sharding.tiered.shards import TableShard, column_parts, shard_of
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.plain_kernel import DenseKernelTables, dense_kernels, on_backward, unpooled_dense_tables


@dataclass(frozen=True)
class _LocalShard(TableShard):
    """A shard whose row ids are counted from its own first row, as TorchRec's kernels count them."""

    @property
    def first_row(self) -> int:
        """Row id of the first row in the group."""
        return 0


class PlainKernel:
    """The tables of one dense kernel: their rows, and the optimizer that steps the rows of a batch.

    Attributes:
        path: of the tables' names in the model.
        group: the rows.
        shards: what this rank holds of the tables.
        fused_optimizer: steps them; in deferred mode, for their gradients wait until `step`.
    """

    def __init__(self, path: str, tables: DenseKernelTables, optimizer: OptimizerSpec, process_group: dist.ProcessGroup | None) -> None:
        """Takes over the update of the tables; `process_group`: the ranks that share them."""
        self.path = path
        self._tables = tables
        self._table_of_feature = [index for index, table in enumerate(tables.tables) for _ in range(table.num_features())]
        specs = [TableSpec(table.name, max(table.local_rows, 1), table.local_cols) for table in tables.tables]
        self.group = PlainRows(specs, optimizer, tables)
        self.shards: Sequence[TableShard] = [
            _LocalShard(**vars(shard_of(config, self.group, index))) for index, config in enumerate(tables.tables)
        ]
        self.fused_optimizer = TieredOptimizer(self.group, self.shards, optimizer, is_deferred=True, process_group=process_group)

    def note(self, features: KeyedJaggedTensor) -> None:
        """Says that a backward is about to reach these features' rows."""
        self.group.note(features.values().long(), features.offsets().long(), self._table_of_feature)

    def weights(self) -> list[torch.Tensor]:
        """Returns `[num_rows, dim]` per table, views of the model's parameters."""
        return self._tables.weights()


def plain_kernels(model: nn.Module, optimizer: OptimizerSpec, process_group: dist.ProcessGroup | None) -> list[PlainKernel]:
    """Takes over the tables with the dense kernel on this rank, in the order of the plan.

    Args:
        model: sharded.
        optimizer: how their rows are updated from now on, those of a batch only.
        process_group: the ranks that share the tables.

    Raises:
        ConfigError: tables that are read without pooling, whose weights are not float32 in the memory of the host, or that are cut by
            columns where rows are clipped; by name.
    """
    if unpooled := ", ".join(unpooled_dense_tables(model)):
        raise ConfigError(
            f"tables {unpooled} are read without pooling and have the dense kernel, which on the CPU pools all the same; give them "
            f'compute_kernel="{CUSTOMIZED_KERNEL}" and TieredEmbeddingCollectionSharder'
        )
    found = []
    for path, kernel in dense_kernels(model):
        tables = DenseKernelTables(kernel)
        for table, weight in zip(tables.tables, tables.weights(), strict=True):
            if table.data_type != DataType.FP32 or weight.device.type != "cpu":
                raise ConfigError(
                    f"table {table.name!r} has the dense kernel with {weight.dtype} on {weight.device}: rows are merged as float32 on the "
                    "CPU; give it DataType.FP32 and a plan for the CPU"
                )
            if optimizer.clip is not None and len(column_parts(table.global_metadata.shards_metadata)) > 1:
                raise ConfigError(
                    f"table {table.name!r} is cut by columns, and its optimizer has CowClip, whose bound is the norm of a whole row: shard "
                    "the table by rows or as a whole"
                )
        plain = PlainKernel(path, tables, optimizer, process_group)
        on_backward(kernel, plain.note)
        found.append(plain)
    return found
