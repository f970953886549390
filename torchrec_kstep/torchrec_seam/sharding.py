"""Sharders and sharded modules of TorchRec, and the names of FBGEMM's fused optimizers."""

# The sharders to derive from, and the module types they make: `torchrec.distributed` exports neither.
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection

__all__ = [
    "EmbOptimType",
    "EmbeddingBagCollectionContext",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
]
