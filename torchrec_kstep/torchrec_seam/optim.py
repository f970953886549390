"""Sharded tensors for optimizer states: torch keeps their constructor from existing shards private."""

import copy

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]  # re-exported without __all__

__all__ = ["ShardedTensor", "sharded_like"]


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
