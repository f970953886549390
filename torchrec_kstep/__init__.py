"""TorchRec extension for click-through-rate models larger than memory.

The names below are imported when they are first used, so that `import torchrec_kstep` alone loads no tensor library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrec_kstep._version import __version__

if TYPE_CHECKING:
    from torchrec_kstep.merge_spec import MergeSpec
    from torchrec_kstep.optim.cowclip import cow_clip
    from torchrec_kstep.optim.kstep import KStepAdam
    from torchrec_kstep.optim_spec import AdamSpec, CowClip, RowwiseAdagradSpec, SgdSpec
    from torchrec_kstep.planner import TopologyShardingPlanner
    from torchrec_kstep.replicas import KStepEnv
    from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder, TieredEmbeddingCollectionSharder
    from torchrec_kstep.tier_config import TierConfig
    from torchrec_kstep.topology import ClusterTopology

_HOMES = {
    "AdamSpec": "torchrec_kstep.optim_spec",
    "ClusterTopology": "torchrec_kstep.topology",
    "CowClip": "torchrec_kstep.optim_spec",
    "KStepAdam": "torchrec_kstep.optim.kstep",
    "KStepEnv": "torchrec_kstep.replicas",
    "MergeSpec": "torchrec_kstep.merge_spec",
    "RowwiseAdagradSpec": "torchrec_kstep.optim_spec",
    "SgdSpec": "torchrec_kstep.optim_spec",
    "TierConfig": "torchrec_kstep.tier_config",
    "TieredEmbeddingBagCollectionSharder": "torchrec_kstep.sharding.tiered",
    "TieredEmbeddingCollectionSharder": "torchrec_kstep.sharding.tiered",
    "TopologyShardingPlanner": "torchrec_kstep.planner",
    "cow_clip": "torchrec_kstep.optim.cowclip",
}

__all__ = [
    "AdamSpec",
    "ClusterTopology",
    "CowClip",
    "KStepAdam",
    "KStepEnv",
    "MergeSpec",
    "RowwiseAdagradSpec",
    "SgdSpec",
    "TierConfig",
    "TieredEmbeddingBagCollectionSharder",
    "TieredEmbeddingCollectionSharder",
    "TopologyShardingPlanner",
    "__version__",
    "cow_clip",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'torchrec_kstep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted(__all__)
