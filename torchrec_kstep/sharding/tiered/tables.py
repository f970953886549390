"""From TorchRec's description of a rank's tables to a row group with its optimizer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, PoolingType

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec, RowwiseAdagradSpec
from torchrec_kstep.sharding.tiered.initial import initial_values
from torchrec_kstep.sharding.tiered.kernel import TieredBagKernel, TieredKernel, TieredSequenceKernel
from torchrec_kstep.sharding.tiered.opening import RowsOpener
from torchrec_kstep.sharding.tiered.optimizer import TieredOptimizer
from torchrec_kstep.sharding.tiered.shards import TableShard, column_parts, name_in_group, ranks_of, shard_of
from torchrec_kstep.sharding.tiered.shares import StoreShare, TierShares, record_bytes
from torchrec_kstep.storage.table_ids import table_ids
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL, GroupedEmbeddingConfig, ShardedEmbeddingTable


@dataclass(frozen=True)
class TableMaker:
    """All that turns tables of a collection into kernels.

    Attributes:
        open_rows: where rows live.
        optimizer: how rows are updated.
        is_deferred: update rows in `optimizer.step()` instead of inside backward.
        seed: seed of initial rows whose `init_fn` brings none.
        tables: the collection's tables by name; they know the `init_fn` that TorchRec's own description lacks.
        prefix: names the collection, for the names of row groups.
        shares: how groups share what the host may use; None where there is nothing to divide.
    """

    open_rows: RowsOpener
    optimizer: OptimizerSpec
    is_deferred: bool
    seed: int
    tables: dict[str, BaseEmbeddingConfig]
    prefix: str
    shares: TierShares | None = None

    @cached_property
    def _table_ids(self) -> dict[str, int]:
        """Ids of the collection's tables, those of other ranks included."""
        return table_ids(self.tables)

    def bag_kernel(
        self, config: GroupedEmbeddingConfig, name: str, is_row_sharded: bool, process_group: dist.ProcessGroup | None
    ) -> TieredKernel:
        """Makes the kernel of pooled tables; `name` tells it from the collection's other kernels on this rank."""
        return self._kernel(
            config,
            name,
            process_group,
            lambda group, shards, update: TieredBagKernel(config, group, shards, update, self.is_deferred, is_row_sharded=is_row_sharded),
        )

    def sequence_kernel(self, config: GroupedEmbeddingConfig, name: str, process_group: dist.ProcessGroup | None) -> TieredKernel:
        """Makes the kernel of tables that are read without pooling."""
        return self._kernel(
            config, name, process_group, lambda group, shards, update: TieredSequenceKernel(config, group, shards, update, self.is_deferred)
        )

    def _kernel(
        self,
        config: GroupedEmbeddingConfig,
        name: str,
        process_group: dist.ProcessGroup | None,
        make: Callable[[RowGroup, list[TableShard], TieredOptimizer], TieredKernel],
    ) -> TieredKernel:
        specs = [self._spec(table) for table in config.embedding_tables]
        table_bytes = [(table.name, record_bytes(table.local_rows, table.local_cols, self.optimizer)) for table in config.embedding_tables]
        share = StoreShare() if self.shares is None else self.shares.of_store(table_bytes)
        group = self.open_rows(f"{self.prefix}.{name}" if self.prefix else name, specs, self.optimizer, share)
        shards = [shard_of(table, group, index) for index, table in enumerate(config.embedding_tables)]
        optimizer = TieredOptimizer(group, shards, self.optimizer, self.is_deferred, process_group)
        return make(group, shards, optimizer)

    def _spec(self, table: ShardedEmbeddingTable) -> TableSpec:
        """Describes a shard to the row group. Row ids and columns count in the whole table, so initial rows do not depend on shards.

        A table that is cut by columns may have several shards in a group, so each has a name of its own.
        """
        first_column = int(table.local_metadata.shard_offsets[1])
        self._check_columns(table)
        values = initial_values(self.tables[table.name], self.seed)
        return TableSpec(
            name=name_in_group(table.name, table.local_metadata, table.global_metadata.shards_metadata),
            num_rows=table.num_embeddings,
            dim=table.local_cols,
            table_id=self._table_ids[table.name],
            seed=values.seed,
            init=values.init,
            init_a=values.init_a,
            init_b=values.init_b,
            first_column=first_column,
        )

    def _check_columns(self, table: ShardedEmbeddingTable) -> None:
        """Refuses rules that look at a whole row where a rank holds only some of its columns, and updates it before it knows the rest."""
        places = table.global_metadata.shards_metadata
        if len(column_parts(places)) == 1:
            return
        where = f"table {table.name!r} is cut by columns (over ranks {', '.join(map(str, ranks_of(places)))})"
        if isinstance(self.optimizer, RowwiseAdagradSpec):
            raise ConfigError(
                f"{where}, and its optimizer has row-wise Adagrad, whose accumulator is the mean over all columns of a row: shard the "
                "table by rows or as a whole, or choose another optimizer"
            )
        if self.optimizer.clip is not None and not self.is_deferred:
            raise ConfigError(
                f"{where}, and its optimizer has CowClip, whose bound is the norm of a whole row, which ranks add up in "
                "`optimizer.step()`; rows are updated inside backward here: give the sharder deferred=True, or shard the table by rows or "
                "as a whole"
            )


def check_collection(
    tables: Iterable[BaseEmbeddingConfig], kernel_by_table: dict[str, str], device: torch.device | None, is_weighted: bool
) -> None:
    """Refuses what tiered tables cannot do, before any row is opened.

    Args:
        tables: of one collection.
        kernel_by_table: compute kernels of the plan.
        device: where the collection is to live.
        is_weighted: whether ids carry weights.

    Raises:
        ConfigError: lists every finding.
    """
    own = [table for table in tables if kernel_by_table[table.name] == CUSTOMIZED_KERNEL]
    findings = []
    if own and device is not None and device.type != "cpu":
        findings.append(f"device {str(device)!r}: rows of tiered tables are looked up on the CPU; shard to cpu")
    for table in own:
        if table.data_type != DataType.FP32:
            findings.append(f"table {table.name!r} is {table.data_type.value}: rows are float32; set data_type=DataType.FP32")
        if table.use_virtual_table:
            findings.append(f"table {table.name!r} has use_virtual_table: row ids of tiered tables are below num_embeddings; switch it off")
        if table.need_pos:
            findings.append(f"table {table.name!r} has need_pos: position weights are not supported; switch it off")
        if is_weighted and getattr(table, "pooling", None) == PoolingType.MEAN:
            findings.append(
                f"table {table.name!r} has MEAN pooling in a weighted collection, which torch's own EmbeddingBag refuses: choose SUM"
            )
    if findings:
        raise ConfigError("these tables cannot be tiered as asked:\n  " + "\n  ".join(findings))
