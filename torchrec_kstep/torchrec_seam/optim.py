"""Sharded tensors for optimizer states, whose constructor from existing shards torch keeps private, and fused optimizers."""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (  # type: ignore[attr-defined]  # re-exported without __all__
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule

__all__ = [
    "DeferredUpdate",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "sharded_like",
    "sharded_tensor",
]


class DeferredUpdate(EmptyFusedOptimizer):  # type: ignore[misc]  # torchrec has no type information
    """Marks, in a parameter's `_in_backward_optimizers`, a table whose rows are updated by `step`, not inside backward.

    TorchRec looks at that attribute to keep tables away from dense optimizers; ours also tells by this class which tables
    add up gradients over several backwards.
    """


def sharded_tensor(
    local_shards: Sequence[tuple[torch.Tensor, ShardMetadata]],
    all_shards: Sequence[ShardMetadata],
    size: tuple[int, int],
    dtype: torch.dtype,
    process_group: dist.ProcessGroup | None,
) -> ShardedTensor:
    """Makes a sharded tensor from the shards of this rank and the layout of all. Not collective.

    Args:
        local_shards: values and places of this rank's shards; may be empty.
        all_shards: places of the shards of all ranks.
        size: of the whole tensor.
        dtype: of the values.
        process_group: the ranks that share the tensor.
    """
    metadata = ShardedTensorMetadata(
        shards_metadata=[copy.deepcopy(shard) for shard in all_shards],
        size=torch.Size(size),
        tensor_properties=TensorProperties(dtype=dtype),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=[Shard(values, copy.deepcopy(place)) for values, place in local_shards],
        sharded_tensor_metadata=metadata,
        process_group=process_group,
    )


def sharded_like(weight: ShardedTensor, local_weight: torch.Tensor, local_state: torch.Tensor) -> ShardedTensor:
    """Wraps an optimizer state with the shard layout of its table. Not collective.

    Args:
        weight: the table as `state_dict` shows it; its local shards are views into `local_weight`.
        local_weight: the parameter that the optimizer steps, all local shards of the table in one tensor.
        local_state: contiguous, of the shape and dtype of `local_weight`.

    Returns:
        A sharded tensor whose local shards are views into `local_state`, placed as the shards of `weight` are.
    """
    metadata = copy.deepcopy(weight.metadata())
    metadata.tensor_properties.dtype = local_state.dtype
    metadata.tensor_properties.requires_grad = False
    shards = []
    for shard in weight.local_shards():
        view = shard.tensor.detach()
        offset = view.storage_offset() - local_weight.storage_offset()
        assert view.untyped_storage().data_ptr() == local_weight.untyped_storage().data_ptr(), "a shard that is no view of its parameter"
        shards.append(Shard(local_state.as_strided(view.size(), view.stride(), offset), copy.deepcopy(shard.metadata)))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=shards, sharded_tensor_metadata=metadata, process_group=weight._process_group
    )
