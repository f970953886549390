"""CowClip where a row's columns lie in several places: ranks add up the squares of its norms before the row is updated."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_kstep.ops.batch import RowGradients
from torchrec_kstep.ops.row_clip import cow_clip_factors
from torchrec_kstep.optim_spec import CowClip
from torchrec_kstep.sharding.tiered.kernel import TieredKernel
from torchrec_kstep.sharding.tiered.shards import TableShard, column_parts
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.optim import EmptyFusedOptimizer

Block = tuple[str, int]  # rows of a table that lie in the same places: (table, first row)


@dataclass(frozen=True)
class _Part:
    """A shard of this rank, and where its rows lie among those that wait in its kernel."""

    block: Block
    rows: slice


class ColumnClip(EmptyFusedOptimizer):  # type: ignore[misc]  # torchrec has no type information
    """Finds by how much each row of column-sharded tables is to be scaled, just before their optimizers step.

    It comes first among the optimizers of a collection and has no parameters. The ids of a table are sent to all ranks that hold
    columns of it, so these have the same rows, in the same order, and only squares travel: two float32 per touched row, summed
    over the ranks that share the tables, after one int64 per table part that says how many rows there are. Needs row gradients
    that wait for `step`: a row that is updated inside backward is gone before the others' part of its norm is known.

    Attributes:
        num_bytes: that this rank has given to the sums so far.
        seconds: that it has spent in `step`, waiting for others included.
    """

    def __init__(
        self, clip: CowClip, kernels: Sequence[TieredKernel], blocks: Sequence[Block], process_group: dist.ProcessGroup | None
    ) -> None:
        """Takes over the clip of some tables.

        Args:
            clip: the rule.
            kernels: the tiered kernels of the collection on this rank, in deferred mode.
            blocks: of all tables to be clipped whose columns are cut, in an order that is the same on all ranks.
            process_group: the ranks that share the tables.
        """
        super().__init__()
        self._clip = clip
        self._blocks = {block: index for index, block in enumerate(blocks)}
        self._kernels = [kernel for kernel in kernels if any(block_of(shard) in self._blocks for shard in kernel.shards)]
        self._process_group = process_group
        self.num_bytes = 0
        self.seconds = 0.0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Hands a factor for each waiting row to the optimizers that step next. Collective over the ranks that share the tables."""
        del closure
        begin_s = time.perf_counter()
        waiting = [(kernel, summed) for kernel in self._kernels if (summed := kernel.fused_optimizer.summed_gradients()) is not None]
        parts = [self._parts_of(kernel, summed) for kernel, summed in waiting]
        squares = [torch.stack(kernel.group.row_norms(summed)) for kernel, summed in waiting]
        self._sum_over_parts(parts, squares)
        for (kernel, summed), values in zip(waiting, squares, strict=True):
            kernel.fused_optimizer.scale_rows(self._factors(kernel, summed, values))
        self.seconds += time.perf_counter() - begin_s

    def _parts_of(self, kernel: TieredKernel, summed: RowGradients) -> list[_Part]:
        bounds = summed.table_offsets.tolist()
        return [
            _Part(block, slice(bounds[shard.index], bounds[shard.index + 1]))
            for shard in kernel.shards
            if (block := block_of(shard)) in self._blocks
        ]

    def _sum_over_parts(self, parts: Sequence[Sequence[_Part]], squares: Sequence[torch.Tensor]) -> None:
        """Replaces the squares (`[2, U]` per kernel) of parts of rows by those of whole rows. Collective."""
        sizes = torch.zeros(len(self._blocks), dtype=torch.int64)
        for part in (part for own in parts for part in own):
            sizes[self._blocks[part.block]] = part.rows.stop - part.rows.start
        self._reduce(sizes, dist.ReduceOp.MAX)
        begins = [0, *sizes.cumsum(0).tolist()]
        totals = torch.zeros(2, begins[-1])
        places = []
        for own, values in zip(parts, squares, strict=True):
            for part in own:
                index = self._blocks[part.block]
                place = slice(begins[index], begins[index + 1])
                assert place.stop - place.start == part.rows.stop - part.rows.start, f"ranks disagree on the rows of {part.block}"
                totals[:, place] += values[:, part.rows]
                places.append((values[:, part.rows], place))
        if totals.numel():
            self._reduce(totals, dist.ReduceOp.SUM)
        for values, place in places:
            values.copy_(totals[:, place])

    def _reduce(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> None:
        if dist.is_initialized() and dist.get_world_size(self._process_group) > 1:
            dist.all_reduce(values, how, group=self._process_group)
            self.num_bytes += values.numel() * values.element_size()

    def _factors(self, kernel: TieredKernel, summed: RowGradients, squares: torch.Tensor) -> torch.Tensor:
        """Returns `[U]`, 1 for tables that are exempt."""
        grad_norms, weight_norms = squares.sqrt()
        factors = torch.ones_like(grad_norms)
        bounds = summed.table_offsets.tolist()
        for shard in kernel.shards:
            if not self._clip.covers(shard.table):
                continue
            rows = slice(bounds[shard.index], bounds[shard.index + 1])
            factors[rows] = cow_clip_factors(self._clip, shard.size[1], grad_norms[rows], weight_norms[rows], summed.counts[rows])
        return factors


def block_of(shard: TableShard) -> Block:
    """Names the rows of a shard."""
    return shard.table, shard.first_row


def with_column_clip(
    optimizer: CombinedOptimizer,
    clip: CowClip | None,
    kernels: Sequence[TieredKernel],
    plan: Mapping[str, ParameterSharding],
    process_group: dist.ProcessGroup | None,
) -> CombinedOptimizer:
    """Puts a `ColumnClip` before the optimizers of a collection, on all ranks, where a table that is clipped is cut by columns.

    Args:
        optimizer: of the collection.
        clip: the rule of its tiered tables; None without.
        kernels: its tiered kernels on this rank.
        plan: of all its tables.
        process_group: the ranks that share the tables.

    Returns:
        `optimizer` itself, or one that begins with the clip.
    """
    blocks = []
    for table, sharding in sorted(plan.items()):
        if clip is None or sharding.compute_kernel != CUSTOMIZED_KERNEL or not clip.covers(table):
            continue
        assert sharding.sharding_spec is not None, "a sharded table without a layout"
        places = sharding.sharding_spec.shards
        if len(column_parts(places)) > 1:
            blocks += [(table, row) for row in sorted({int(place.shard_offsets[0]) for place in places})]
    if clip is None or not blocks:
        return optimizer
    return CombinedOptimizer([("", ColumnClip(clip, kernels, blocks, process_group)), *optimizer.optimizers])
