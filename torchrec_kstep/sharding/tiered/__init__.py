"""Embedding tables in tiers, as TorchRec's `DistributedModelParallel` takes them. See docs/tiered_sharding.md."""

from torchrec_kstep.sharding.tiered.counters import clip_warnings, tier_scalars
from torchrec_kstep.sharding.tiered.finite import tables_not_finite
from torchrec_kstep.sharding.tiered.look_ahead import look_ahead
from torchrec_kstep.sharding.tiered.sharder import TieredEmbeddingBagCollectionSharder, TieredEmbeddingCollectionSharder

__all__ = [
    "TieredEmbeddingBagCollectionSharder",
    "TieredEmbeddingCollectionSharder",
    "clip_warnings",
    "look_ahead",
    "tables_not_finite",
    "tier_scalars",
]
