"""From configuration and schema to a model: the one place that knows all models by name."""

import torch
from torch import nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet

from torchrec_kstep.config.schema import ModelConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.models.blocks import HiddenLayers
from torchrec_kstep.models.dcn import DeepCross
from torchrec_kstep.models.deepfm import DeepFM
from torchrec_kstep.models.dlrm import DLRM
from torchrec_kstep.models.tables import check_features, embedding_tables, wide_tables
from torchrec_kstep.models.wide_deep import WideDeep
from torchrec_kstep.types import FeatureSchema

MODELS = ("dlrm", "deepfm", "wide_deep", "dcn", "dcnv2")


def build_model(
    config: ModelConfig,
    schema: FeatureSchema,
    device: torch.device | None = None,
    seed: int = 1,
    table_device: torch.device | None = None,
) -> nn.Module:
    """Makes an unsharded model whose initial weights depend on (`seed`, `config`, `schema`) alone.

    Args:
        config: which model and its sizes.
        schema: the features of the data.
        device: `cpu` (default), or `meta` for a model without memory, e.g. to plan tables larger than this machine.
        seed: seed of all initial weights. The caller's random state is neither read nor changed.
        table_device: where the tables are, by default where the rest is; `meta` for tables whose rows are made elsewhere.

    Returns:
        A module `(dense [B, num_dense] float32, sparse bags with stride B) -> logit [B]`.

    Raises:
        ConfigError: the model is unknown, or the features do not make a model.
    """
    if config.name not in MODELS:
        raise ConfigError(f"model.name={config.name!r}: expected one of {', '.join(MODELS)}")
    check_features(schema)
    device = device or torch.device("cpu")
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return _build(config, schema, table_device or device, seed)


def _build(config: ModelConfig, schema: FeatureSchema, table_device: torch.device, seed: int) -> nn.Module:
    """Makes the model under the device and random state that the caller has set."""
    names, num_dense, dim = schema.sparse_names, schema.num_dense, config.embedding_dim
    embeddings = embedding_tables(schema, dim, config.pooling, config.embedding_init_std, seed, table_device)
    if config.name == "dlrm":
        return DLRM(embeddings, names, num_dense, dim, config.bottom_mlp, config.mlp, config.dropout)
    if config.name in ("deepfm", "wide_deep"):
        wide = wide_tables(schema, config.pooling, table_device)
        if config.name == "wide_deep":
            return WideDeep(embeddings, wide, names, num_dense, dim, config.mlp, config.dropout)
        return DeepFM(embeddings, wide, names, num_dense, dim, config.mlp, config.dropout, config.embedding_init_std)
    in_features = num_dense + len(names) * dim
    hidden = HiddenLayers(in_features, config.mlp, config.dropout)
    cross: nn.Module
    if config.name == "dcn":
        cross = VectorCrossNet(in_features, config.num_cross_layers)
    elif config.cross_rank:
        cross = LowRankCrossNet(in_features, config.num_cross_layers, config.cross_rank)
    else:
        cross = CrossNet(in_features, config.num_cross_layers)
    return DeepCross(embeddings, names, cross, hidden, in_features)
