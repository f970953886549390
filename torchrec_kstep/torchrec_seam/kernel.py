"""Where a compute kernel of our own enters TorchRec: lookups, shardings and the contract of a kernel.

Upstream makes a kernel in `Grouped...Lookup._create_embedding_kernel`, a lookup in `<X>Sharding.create_lookup`, and exports
none of these names. `customized_kernel` is the member of `EmbeddingComputeKernel` that it keeps for kernels of others; it
leaves all handling of their state to the sharded collection.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torchrec.distributed import comm_ops
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, KJTList, ShardedEmbeddingTable
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding

__all__ = [
    "CUSTOMIZED_KERNEL",
    "BaseEmbedding",
    "CwPooledEmbeddingSharding",
    "CwSequenceEmbeddingSharding",
    "EmbeddingShardingInfo",
    "GridPooledEmbeddingSharding",
    "GroupedEmbeddingConfig",
    "GroupedEmbeddingsLookup",
    "GroupedPooledEmbeddingsLookup",
    "KJTList",
    "RwPooledEmbeddingSharding",
    "RwSequenceEmbeddingSharding",
    "ShardedEmbeddingTable",
    "TwPooledEmbeddingSharding",
    "TwRwPooledEmbeddingSharding",
    "TwSequenceEmbeddingSharding",
    "collectives_for",
]

CUSTOMIZED_KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value


def collectives_for(batch_sizes: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """Returns the context in which pooled rows are sent to the ranks whose batches have these sizes.

    Where sizes differ, the backward of TorchRec's reduce-scatter gathers tensors of different lengths, which gloo cannot;
    its synchronous collectives use all-to-all instead, which can. All ranks know all sizes, so all take the same way.
    """
    return _sync_collectives() if any(len(set(sizes)) > 1 for sizes in batch_sizes) else nullcontext()


@contextmanager
def _sync_collectives() -> Iterator[None]:
    """As upstream's `torchrec_use_sync_collectives`, but also put back when an exception passes."""
    was_on = comm_ops.USE_SYNC_COLLECTIVES
    comm_ops.set_use_sync_collectives(True)
    try:
        yield
    finally:
        comm_ops.set_use_sync_collectives(was_on)
