"""Goal: what our shardings, lookups and collections override exists upstream, with the arguments that they pass on. Layer: unit."""

import inspect
from typing import Any

import pytest

from torchrec_kstep.torchrec_seam import kernel, optim, sharding
from torchrec_kstep.torchrec_seam.pipeline import TrainPipelineSparseDist

POOLED = (
    kernel.TwPooledEmbeddingSharding,
    kernel.RwPooledEmbeddingSharding,
    kernel.CwPooledEmbeddingSharding,
    kernel.TwRwPooledEmbeddingSharding,
    kernel.GridPooledEmbeddingSharding,
)
SEQUENCES = (kernel.TwSequenceEmbeddingSharding, kernel.RwSequenceEmbeddingSharding, kernel.CwSequenceEmbeddingSharding)
BAGS, ROWS = sharding.ShardedEmbeddingBagCollection, sharding.ShardedEmbeddingCollection

# What is overridden or called, and the arguments that it must take.
METHODS: list[tuple[Any, str, set[str]]] = [
    *((cls, "create_lookup", {"device", "fused_params", "feature_processor"}) for cls in (*POOLED, *SEQUENCES)),
    *((cls, "__init__", {"sharding_infos", "env", "device", "qcomm_codecs_registry"}) for cls in (*POOLED, *SEQUENCES)),
    (kernel.CwPooledEmbeddingSharding, "__init__", {"permute_embeddings"}),
    (kernel.GroupedPooledEmbeddingsLookup, "__init__", {"grouped_configs", "pg", "device", "feature_processor", "sharding_type", "env"}),
    (kernel.GroupedPooledEmbeddingsLookup, "_create_embedding_kernel", {"config", "device", "pg", "sharding_type", "env"}),
    (kernel.GroupedPooledEmbeddingsLookup, "prefetch", {"sparse_features", "forward_stream"}),
    (kernel.GroupedEmbeddingsLookup, "__init__", {"grouped_configs", "pg", "device", "env"}),
    (kernel.GroupedEmbeddingsLookup, "_create_embedding_kernel", {"config", "pg", "device", "env"}),
    (kernel.GroupedEmbeddingsLookup, "prefetch", {"sparse_features", "forward_stream"}),
    (
        BAGS,
        "__init__",
        {"module", "table_name_to_parameter_sharding", "env", "fused_params", "device", "qcomm_codecs_registry", "module_fqn"},
    ),
    (BAGS, "create_embedding_bag_sharding", {"sharding_infos", "env", "device", "permute_embeddings", "qcomm_codecs_registry"}),
    (BAGS, "_create_lookups", set()),
    (BAGS, "_pre_load_state_dict_hook", {"self", "state_dict", "prefix"}),
    (BAGS, "reset_parameters", set()),
    (BAGS, "input_dist", {"ctx", "features"}),
    (BAGS, "output_dist", {"ctx", "output"}),
    (BAGS, "compute_and_output_dist", {"ctx", "input"}),
    (BAGS, "update_shards", set()),
    (
        ROWS,
        "__init__",
        {"module", "table_name_to_parameter_sharding", "env", "fused_params", "device", "qcomm_codecs_registry", "module_fqn"},
    ),
    (ROWS, "create_embedding_sharding", {"sharding_type", "sharding_infos", "env", "device", "qcomm_codecs_registry"}),
    (ROWS, "_create_lookups", set()),
    (ROWS, "_pre_load_state_dict_hook", {"self", "state_dict", "prefix"}),
    (ROWS, "reset_parameters", set()),
    (ROWS, "input_dist", {"ctx", "features"}),
    (sharding.EmbeddingBagCollectionSharder, "shard", {"module", "params", "env", "device", "module_fqn"}),
    (sharding.EmbeddingCollectionSharder, "shard", {"module", "params", "env", "device", "module_fqn"}),
    (TrainPipelineSparseDist, "wait_sparse_data_dist", {"context"}),
    (TrainPipelineSparseDist, "reset", set()),
    (optim.FusedOptimizer, "post_load_state_dict", set()),
]


@pytest.mark.parametrize(("owner", "name", "arguments"), METHODS, ids=[f"{owner.__name__}.{name}" for owner, name, _ in METHODS])
def test_upstream_has_what_is_overridden(owner: Any, name: str, arguments: set[str]) -> None:
    """A renamed method would be overridden in vain, and upstream's would run in its place without a word."""
    parameters = inspect.signature(getattr(owner, name)).parameters
    assert arguments <= set(parameters)


def test_a_kernel_of_others_is_still_known() -> None:
    assert kernel.CUSTOMIZED_KERNEL == "customized_kernel"


def test_synchronous_collectives_are_put_back_when_an_exception_passes() -> None:
    """Upstream's own context manager leaves them on."""
    context = kernel.collectives_for([[2, 3]])
    context.__enter__()
    assert kernel.comm_ops.get_use_sync_collectives()
    error = ValueError("passing")
    assert not context.__exit__(ValueError, error, None)
    assert not kernel.comm_ops.get_use_sync_collectives()
    with kernel.collectives_for([[2, 2], [5, 5, 5]]):
        assert not kernel.comm_ops.get_use_sync_collectives()
