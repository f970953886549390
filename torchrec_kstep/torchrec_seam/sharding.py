"""Sharders and compute kernels of TorchRec, and the names of FBGEMM's fused optimizers."""

# The sharder to derive from, and the module type it makes: `torchrec.distributed.embeddingbag` exports neither.
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection

__all__ = ["EmbOptimType", "EmbeddingBagCollectionSharder", "EmbeddingComputeKernel", "ShardedEmbeddingBagCollection"]
