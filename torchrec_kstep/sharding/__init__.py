"""Sharders and sharded modules: where TorchRec's `DistributedModelParallel` meets our tables."""

from torchrec_kstep.sharding.sharder import BagSharder, build_sharders
from torchrec_kstep.sharding.task import shard_task
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder, TieredEmbeddingCollectionSharder

__all__ = ["BagSharder", "TieredEmbeddingBagCollectionSharder", "TieredEmbeddingCollectionSharder", "build_sharders", "shard_task"]
