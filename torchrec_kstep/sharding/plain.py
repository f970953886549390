"""Tables that keep TorchRec's own kernels, behind the interface of row groups: what replicas that merge touched rows need of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.ops.batch import RowGradients, TableSpec
from torchrec_kstep.ops.plain_rows import PlainRows
from torchrec_kstep.optim_spec import OptimizerSpec, SgdSpec
from torchrec_kstep.sharding.tiered.optimizer import TieredOptimizer
from torchrec_kstep.sharding.tiered.shards import TableShard, column_parts, ranks_of, shard_of
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.plain_kernel import (
    DenseKernelTables,
    FusedKernelTables,
    dense_kernels,
    fused_kernels,
    on_backward,
    unpooled_dense_tables,
)

STATELESS = ("EXACT_SGD",)  # fused updates that keep nothing beside the weights
WITH_SUMS = ("EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")  # and those whose sums of squares can stay with each replica


@dataclass(frozen=True)
class _LocalShard(TableShard):
    """A shard whose row ids are counted from its own first row, as TorchRec's kernels count them."""

    @property
    def first_row(self) -> int:
        """Row id of the first row in the group."""
        return 0


class _PlainTables:
    """The tables of one kernel of TorchRec's.

    Attributes:
        path: of the tables' names in the model.
        group: the rows.
        shards: what this rank holds of the tables.
    """

    def __init__(self, path: str, tables: DenseKernelTables | FusedKernelTables, optimizer: OptimizerSpec) -> None:
        self.path = path
        self._tables = tables
        self._table_of_feature = [index for index, table in enumerate(tables.tables) for _ in range(table.num_features())]
        specs = [TableSpec(table.name, max(table.local_rows, 1), table.local_cols) for table in tables.tables]
        self.group = PlainRows(specs, optimizer, tables)
        self.shards: Sequence[TableShard] = [
            _LocalShard(**vars(shard_of(config, self.group, index))) for index, config in enumerate(tables.tables)
        ]

    def weights(self) -> list[torch.Tensor]:
        """Returns `[num_rows, dim]` per table, views of the model's parameters."""
        return self._tables.weights()


class DenseKernel(_PlainTables):
    """The tables of one dense kernel, and the optimizer that steps the rows of a batch.

    Attributes:
        fused_optimizer: steps them; in deferred mode, for their gradients wait until `step`.
    """

    def __init__(self, path: str, tables: DenseKernelTables, optimizer: OptimizerSpec, process_group: dist.ProcessGroup | None) -> None:
        """Takes over the update of the tables; `process_group`: the ranks that share them."""
        super().__init__(path, tables, optimizer)
        self.fused_optimizer = TieredOptimizer(self.group, self.shards, optimizer, is_deferred=True, process_group=process_group)

    def note(self, features: KeyedJaggedTensor) -> None:
        """Says that a backward is about to reach these features' rows."""
        self.group.note(features.values().long(), features.offsets().long(), self._table_of_feature)


class FusedKernel(_PlainTables):
    """The tables of one fused kernel, whose update stays with FBGEMM.

    Attributes:
        optimizer: FBGEMM's name of the update.
        fused_optimizer: stands for it; there is nothing to hand over, and no gradient to be had.
    """

    def __init__(self, path: str, tables: FusedKernelTables, num_trackers: int) -> None:
        """Counts the updates of rows in `num_trackers` sets of touches."""
        # The rule is never applied: of a row only its weights are merged, which are all that this one has.
        super().__init__(path, tables, SgdSpec(lr=1.0, touches="count", num_trackers=num_trackers))
        self.optimizer = tables.optimizer
        self.fused_optimizer = _UpdateOfFbgemm()

    def note(self, features: KeyedJaggedTensor) -> None:
        """Says that a backward is about to update these features' rows."""
        self.group.touch(features.values().long(), features.offsets().long(), self._table_of_feature)


class _UpdateOfFbgemm:
    """In the place of a `TieredOptimizer` where FBGEMM updates rows inside backward."""

    is_deferred = False
    num_steps = 0  # not counted here

    def hand_over(self, step: int | None = None) -> None:
        """FBGEMM's optimizer hands its learning rate over by itself."""
        del step

    def take_over(self, gradients: RowGradients) -> None:
        """Must not be called: replicas with fused kernels never average gradients."""
        raise AssertionError(f"{gradients.unique_rows.numel()} rows that were updated inside backward shall be updated once more")


PlainKernel = DenseKernel | FusedKernel


def plain_kernels(model: nn.Module, optimizer: OptimizerSpec, process_group: dist.ProcessGroup | None) -> list[DenseKernel]:
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
        _check_values(tables)
        for table in tables.tables if optimizer.clip is not None else ():
            places = table.global_metadata.shards_metadata
            if len(column_parts(places)) > 1:
                raise ConfigError(
                    f"table {table.name!r} is cut by columns (over ranks {', '.join(map(str, ranks_of(places)))}), has the dense kernel, "
                    "and its optimizer has CowClip, whose bound is the norm of a whole row: shard the table by rows or as a whole, or give "
                    f'it compute_kernel="{CUSTOMIZED_KERNEL}", whose ranks add norms up'
                )
        found.append(DenseKernel(path, tables, optimizer, process_group))
        on_backward(kernel, found[-1].note)
    return found


def watched_kernels(model: nn.Module, num_trackers: int) -> list[FusedKernel]:
    """Begins to count the updates of tables with fused kernels on this rank, in the order of the plan.

    Args:
        model: sharded.
        num_trackers: sets of touches, as `MergeSpec.num_trackers` says.

    Raises:
        ConfigError: weights that are not float32 in the memory of the host; by table.
    """
    found = []
    for path, kernel in fused_kernels(model):
        tables = FusedKernelTables(kernel)
        _check_values(tables)
        found.append(FusedKernel(path, tables, num_trackers))
        on_backward(kernel, found[-1].note)
    return found


def _check_values(tables: DenseKernelTables | FusedKernelTables) -> None:
    for table, weight in zip(tables.tables, tables.weights(), strict=True):
        if table.data_type != DataType.FP32 or weight.device.type != "cpu":
            raise ConfigError(
                f"table {table.name!r} has a kernel of TorchRec with {weight.dtype} on {weight.device}: rows are merged as float32 on "
                "the CPU; give it DataType.FP32 and a plan for the CPU"
            )
