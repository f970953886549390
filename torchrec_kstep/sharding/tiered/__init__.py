"""Embedding tables in tiers, as TorchRec's `DistributedModelParallel` takes them. See docs/tiered_tables.md."""

from torchrec_kstep.sharding.tiered.look_ahead import look_ahead
from torchrec_kstep.sharding.tiered.sharder import TieredEmbeddingBagCollectionSharder, TieredEmbeddingCollectionSharder

__all__ = ["TieredEmbeddingBagCollectionSharder", "TieredEmbeddingCollectionSharder", "look_ahead"]
