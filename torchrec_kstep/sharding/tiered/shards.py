"""The shards of tiered tables on this rank, and their state as sharded tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_kstep.errors import PlanError
from torchrec_kstep.ops.batch import shard_name
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.sharding.tiered.rows_tensor import RowBlock, RowsTensor
from torchrec_kstep.torchrec_seam.kernel import ShardedEmbeddingTable
from torchrec_kstep.torchrec_seam.optim import ShardedTensor, ShardMetadata, sharded_tensor


@dataclass(frozen=True)
class TableShard:
    """A rectangle of a table on this rank: table `index` of a row group, whose row ids are those of the whole table.

    Attributes:
        table: name of the table.
        group: holds the rows.
        index: position in the group.
        place: rows, columns and rank of this shard.
        all_places: those of all shards of the table, on all ranks.
        size: rows and columns of the whole table.
    """

    table: str
    group: RowGroup
    index: int
    place: ShardMetadata
    all_places: tuple[ShardMetadata, ...]
    size: tuple[int, int]

    @property
    def first_row(self) -> int:
        """Row id of the first row."""
        return int(self.place.shard_offsets[0])

    @property
    def num_rows(self) -> int:
        """Rows on this rank; 0 where a table has fewer rows than ranks."""
        return int(self.place.shard_sizes[0])


def shard_of(config: ShardedEmbeddingTable, group: RowGroup, index: int) -> TableShard:
    """Describes table `index` of a group by what TorchRec's sharding says of it."""
    whole = config.global_metadata
    return TableShard(
        table=config.name,
        group=group,
        index=index,
        place=config.local_metadata,
        all_places=tuple(whole.shards_metadata),
        size=(config.num_embeddings, int(whole.size[1])),
    )


def column_parts(places: Sequence[ShardMetadata]) -> list[int]:
    """Returns the first columns of the parts into which columns are cut, ascending."""
    return sorted({int(place.shard_offsets[1]) for place in places})


def ranks_of(places: Sequence[ShardMetadata]) -> list[int]:
    """Returns the ranks that hold shards of a table, ascending."""
    ranks = {place.placement.rank() for place in places if place.placement is not None}
    return sorted(rank for rank in ranks if rank is not None)


def name_in_group(table: str, place: ShardMetadata, all_places: Sequence[ShardMetadata]) -> str:
    """Names a shard in its row group: as its table, with its columns where these are cut."""
    if len(column_parts(all_places)) == 1:
        return table
    return shard_name(table, int(place.shard_offsets[1]), int(place.shard_sizes[1]))


def sharded_field(shards: Sequence[TableShard], field: str, process_group: dist.ProcessGroup | None) -> ShardedTensor:
    """Shows one record field of a table as a sharded tensor of `RowsTensor`s. Not collective.

    A field with one element per weight has the layout of the table. One with a single element per row is a matrix with one
    column per part into which the columns are cut: `[num_rows, 1]` for a table whose columns are not.

    Args:
        shards: all shards of one table on this rank, at least one.
        field: name of the field.
        process_group: the ranks that share the table.

    Raises:
        PlanError: the plan puts the table on other ranks.
    """
    first = shards[0]
    _check_ranks(first, process_group)
    if first.group.optimizer is None or is_per_column(first.group.optimizer, field):
        return _sharded(shards, [shard.place for shard in shards], first.all_places, first.size, field, process_group)
    parts = column_parts(first.all_places)
    narrow = [_narrowed(shard.place, parts) for shard in shards]
    return _sharded(
        shards, narrow, [_narrowed(place, parts) for place in first.all_places], (first.size[0], len(parts)), field, process_group
    )


def is_per_column(optimizer: OptimizerSpec, field: str) -> bool:
    """Tells whether a field has one element per weight, and not one per row."""
    return any(spec.name == field and spec.width == 2 for spec in optimizer.record_fields(dim=2))


def _check_ranks(shard: TableShard, process_group: dist.ProcessGroup | None) -> None:
    own = set() if process_group is None else set(dist.get_process_group_ranks(process_group))
    if others := sorted(set(ranks_of(shard.all_places)) - own if own else ()):
        raise PlanError(
            f"the plan puts table {shard.table!r} on rank {others[0]}, which is none of those that share it here ({sorted(own)}): with "
            "several replicas give DistributedModelParallel plan=env.localize(plan)"
        )


def _sharded(
    shards: Sequence[TableShard],
    places: Sequence[ShardMetadata],
    all_places: Sequence[ShardMetadata],
    size: tuple[int, int],
    field: str,
    process_group: dist.ProcessGroup | None,
) -> ShardedTensor:
    values = [
        RowsTensor(RowBlock(shard.group, shard.index, field, shard.first_row, shard.num_rows, 0, int(place.shard_sizes[1])))
        for shard, place in zip(shards, places, strict=True)
    ]
    dtype = values[0].dtype
    return sharded_tensor(list(zip(values, places, strict=True)), all_places, size, dtype, process_group)


def _narrowed(place: ShardMetadata, parts: Sequence[int]) -> ShardMetadata:
    """The place of a field with one element per row: column i belongs to part i of the columns."""
    row, column = place.shard_offsets
    return ShardMetadata(shard_offsets=[row, parts.index(int(column))], shard_sizes=[place.shard_sizes[0], 1], placement=place.placement)


def absent_table(all_places: Sequence[ShardMetadata], size: tuple[int, int], process_group: dist.ProcessGroup | None) -> ShardedTensor:
    """Shows the weights of a table of which this rank holds nothing."""
    return sharded_tensor([], all_places, size, torch.float32, process_group)
