"""What this package overrides or calls inside TorchRec, and the arguments that each must take.

A renamed method would be overridden in vain, and upstream's would run in its place without a word; so `missing` compares
this list with an installed TorchRec. The tests do so for the proven release and for its neighbours.
"""

import importlib
import inspect
from typing import NamedTuple


class Needed(NamedTuple):
    """One function that must exist.

    Attributes:
        module: below `torchrec`.
        owner: class in it.
        name: its method.
        arguments: names of parameters that it must have.
    """

    module: str
    owner: str
    name: str
    arguments: frozenset[str]

    def __str__(self) -> str:
        """The dotted name."""
        return f"torchrec.{self.module}.{self.owner}.{self.name}"


def _needed(module: str, owner: str, name: str, arguments: str = "") -> Needed:
    return Needed(module, owner, name, frozenset(arguments.split()))


_SHARDINGS = (
    ("distributed.sharding.tw_sharding", "TwPooledEmbeddingSharding"),
    ("distributed.sharding.rw_sharding", "RwPooledEmbeddingSharding"),
    ("distributed.sharding.cw_sharding", "CwPooledEmbeddingSharding"),
    ("distributed.sharding.twrw_sharding", "TwRwPooledEmbeddingSharding"),
    ("distributed.sharding.grid_sharding", "GridPooledEmbeddingSharding"),
    ("distributed.sharding.tw_sequence_sharding", "TwSequenceEmbeddingSharding"),
    ("distributed.sharding.rw_sequence_sharding", "RwSequenceEmbeddingSharding"),
    ("distributed.sharding.cw_sequence_sharding", "CwSequenceEmbeddingSharding"),
)
_LOOKUPS, _BAGS, _ROWS = "distributed.embedding_lookup", "distributed.embeddingbag", "distributed.embedding"
_COLLECTION = "module table_name_to_parameter_sharding env fused_params device qcomm_codecs_registry module_fqn"

NEEDED: tuple[Needed, ...] = (
    *(_needed(*sharding, "create_lookup", "device fused_params feature_processor") for sharding in _SHARDINGS),
    *(_needed(*sharding, "__init__", "sharding_infos env device qcomm_codecs_registry") for sharding in _SHARDINGS),
    _needed("distributed.sharding.cw_sharding", "CwPooledEmbeddingSharding", "__init__", "permute_embeddings"),
    _needed(_LOOKUPS, "GroupedPooledEmbeddingsLookup", "__init__", "grouped_configs pg device feature_processor sharding_type env"),
    _needed(_LOOKUPS, "GroupedPooledEmbeddingsLookup", "_create_embedding_kernel", "config device pg sharding_type env"),
    _needed(_LOOKUPS, "GroupedPooledEmbeddingsLookup", "prefetch", "sparse_features forward_stream"),
    _needed(_LOOKUPS, "GroupedEmbeddingsLookup", "__init__", "grouped_configs pg device env"),
    _needed(_LOOKUPS, "GroupedEmbeddingsLookup", "_create_embedding_kernel", "config pg device env"),
    _needed(_LOOKUPS, "GroupedEmbeddingsLookup", "prefetch", "sparse_features forward_stream"),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "__init__", _COLLECTION),
    _needed(
        _BAGS,
        "ShardedEmbeddingBagCollection",
        "create_embedding_bag_sharding",
        "sharding_infos env device permute_embeddings qcomm_codecs_registry",
    ),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "_create_lookups"),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "_pre_load_state_dict_hook", "self state_dict prefix"),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "reset_parameters"),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "input_dist", "ctx features"),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "output_dist", "ctx output"),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "compute_and_output_dist", "ctx input"),
    _needed(_BAGS, "ShardedEmbeddingBagCollection", "update_shards"),
    _needed(_BAGS, "EmbeddingBagCollectionSharder", "shard", "module params env device module_fqn"),
    _needed(_ROWS, "ShardedEmbeddingCollection", "__init__", _COLLECTION),
    _needed(
        _ROWS, "ShardedEmbeddingCollection", "create_embedding_sharding", "sharding_type sharding_infos env device qcomm_codecs_registry"
    ),
    _needed(_ROWS, "ShardedEmbeddingCollection", "_create_lookups"),
    _needed(_ROWS, "ShardedEmbeddingCollection", "_pre_load_state_dict_hook", "self state_dict prefix"),
    _needed(_ROWS, "ShardedEmbeddingCollection", "reset_parameters"),
    _needed(_ROWS, "ShardedEmbeddingCollection", "input_dist", "ctx features"),
    _needed(_ROWS, "EmbeddingCollectionSharder", "shard", "module params env device module_fqn"),
    _needed("distributed.train_pipeline", "TrainPipelineSparseDist", "wait_sparse_data_dist", "context"),
    _needed("distributed.train_pipeline", "TrainPipelineSparseDist", "reset"),
    _needed("optim.fused", "FusedOptimizer", "post_load_state_dict"),
    _needed("distributed.batched_embedding_kernel", "BatchedDenseEmbeddingBag", "forward", "features"),
)


def missing(needed: Needed) -> str:
    """Says what the TorchRec that this process imports lacks of `needed`; "" if nothing."""
    owner = getattr(importlib.import_module(f"torchrec.{needed.module}"), needed.owner, None)
    function = getattr(owner, needed.name, None)
    if function is None:
        return f"{needed} does not exist"
    absent = sorted(needed.arguments - set(inspect.signature(function).parameters))
    return f"{needed} has no parameter {', '.join(absent)}" if absent else ""
