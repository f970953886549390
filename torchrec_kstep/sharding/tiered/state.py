"""State of the tiered tables of a sharded collection: what TorchRec leaves to us for kernels that are not its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.errors import CheckpointError
from torchrec_kstep.sharding.tiered.kernel import TieredKernel, stand_in
from torchrec_kstep.sharding.tiered.lookups import tiered_kernels
from torchrec_kstep.sharding.tiered.shards import TableShard, absent_table, sharded_field
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL, KJTList
from torchrec_kstep.torchrec_seam.optim import DeferredUpdate, EmptyFusedOptimizer, ShardedTensor


@dataclass
class TieredState:
    """The tiered tables of one collection.

    Attributes:
        weights: every tiered table as a sharded tensor over its rows, also those of which this rank holds nothing.
        shards: what this rank holds of each.
    """

    weights: dict[str, ShardedTensor] = field(default_factory=dict)
    shards: dict[str, list[TableShard]] = field(default_factory=dict)

    @classmethod
    def of_collection(
        cls,
        lookups: Iterable[nn.Module],
        tables: Iterable[BaseEmbeddingConfig],
        plan: Mapping[str, ParameterSharding],
        process_group: dist.ProcessGroup | None,
    ) -> "TieredState":
        """Gathers the tiered tables of a collection. Not collective."""
        state = cls()
        for kernel in kernels_of(lookups):
            for shard in kernel.shards:
                state.shards.setdefault(shard.table, []).append(shard)
        for table in tables:
            if plan[table.name].compute_kernel != CUSTOMIZED_KERNEL:
                continue
            own = state.shards.setdefault(table.name, [])
            if own:
                state.weights[table.name] = sharded_field(own, "weight", process_group)
            else:
                spec = plan[table.name].sharding_spec
                assert spec is not None, "a sharded table without a layout"
                state.weights[table.name] = absent_table(spec.shards, (table.num_embeddings, table.embedding_dim), process_group)
        return state

    def load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Writes the tiered tables found in `state_dict` into their rows; leaves what the empty stand-ins can take.

        Args:
            state_dict: of a sharded collection of the same plan, or with whole tensors, e.g. of an unsharded model.
            prefix: of the keys: `<prefix><table>.weight`.

        Raises:
            CheckpointError: a table has another size or other shards.
        """
        for table, weight in self.weights.items():
            key = f"{prefix}{table}.weight"
            if key not in state_dict:
                continue
            source = state_dict[key]
            if tuple(source.size()) != tuple(weight.size()):
                raise CheckpointError(f"{key}: expected {tuple(weight.size())} rows and columns, got {tuple(source.size())}")
            places = {tuple(shard.metadata.shard_offsets): shard for shard in weight.local_shards()}
            if isinstance(source, ShardedTensor):
                parts = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in source.local_shards()}
            else:
                parts = {place: _part(source, shard.metadata) for place, shard in places.items()}
            _check_parts(key, places, parts)
            for place, shard in places.items():
                shard.tensor.copy_(parts[place].detach())
            state_dict[key] = torch.empty(0)


def kernels_of(lookups: Iterable[nn.Module]) -> list[TieredKernel]:
    """Returns the tiered kernels of a collection's lookups."""
    return [kernel for lookup in lookups for kernel in tiered_kernels(lookup)]


def kernels_of_model(model: nn.Module) -> list[TieredKernel]:
    """Returns the tiered kernels of all collections inside `model` on this rank, in an order that depends on the plan alone."""
    return [kernel for module in model.modules() if isinstance(module, PrefetchesRows) for kernel in kernels_of(module._lookups)]


class PrefetchesRows:
    """What sharded collections with tiered tables offer to pipelines that look ahead."""

    _lookups: list[Any]  # TorchRec's, in the order of their shardings
    _optim: Any  # TorchRec's: the optimizers of the tables of this rank

    def prefetch_rows(self, dist_input: KJTList, is_same_later: bool = True) -> None:
        """Says that a batch, already sent to the ranks of its rows, will be looked up soon. Not collective; changes no result.

        Args:
            dist_input: what `input_dist` made of the batch.
            is_same_later: the lookup will get these very tensors, so what is worked out of them now can be kept.
        """
        for lookup, features in zip(self._lookups, dist_input, strict=True):
            if tiered_kernels(lookup):
                lookup.prefetch(features, is_same_later=is_same_later)

    def prefetch_features(self, features: KeyedJaggedTensor) -> None:
        """Sends the ids of a batch to the ranks of their rows, only to say that they will be looked up soon. Collective."""
        awaitable = self.input_dist(self.create_context(), features)  # type: ignore[attr-defined]  # of the sharded collection
        self.prefetch_rows(awaitable.wait().wait(), is_same_later=False)

    def cancel_prefetch(self) -> None:
        """Forgets batches that were told ahead and will not come."""
        for kernel in kernels_of(self._lookups):
            kernel.cancel_prefetch()


def add_stand_ins(modules: nn.ModuleDict, tables: Iterable[str], is_deferred: bool) -> None:
    """Gives a stand-in to each of `tables` of which this rank holds nothing."""
    for table in tables:
        if not hasattr(modules[table], "weight"):
            update = DeferredUpdate() if is_deferred else EmptyFusedOptimizer()
            modules[table].register_parameter("weight", stand_in(update))


def sharding_group(env: ShardingEnv) -> dist.ProcessGroup | None:
    """Returns the ranks that share one copy of the tables: with several replicas not all of `env`."""
    group: dist.ProcessGroup | None = getattr(env, "sharding_pg", env.process_group)
    return group


def planned_rank(env: ShardingEnv) -> int:
    """Returns this rank as plans count it: among all ranks, where `env` counts within one of several replicas."""
    rank: int = getattr(env, "global_rank", env.rank)
    return rank


def _part(whole: torch.Tensor, place: Any) -> torch.Tensor:
    """Cuts one shard out of a whole table."""
    (row, column), (num_rows, num_columns) = place.shard_offsets, place.shard_sizes
    return whole[row : row + num_rows, column : column + num_columns]


def _check_parts(key: str, places: Mapping[tuple[int, ...], Any], parts: Mapping[tuple[int, ...], torch.Tensor]) -> None:
    """Refuses shards of another plan."""
    mine = {place: tuple(shard.metadata.shard_sizes) for place, shard in places.items()}
    theirs = {place: tuple(part.shape) for place, part in parts.items()}
    if mine != theirs:
        raise CheckpointError(
            f"{key}: the state has shards {theirs} (first row and column: size) on this rank, the plan {mine}; load it through "
            "torch.distributed.checkpoint, which reads any layout, or with the plan that saved it"
        )
