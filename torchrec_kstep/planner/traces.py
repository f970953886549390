"""How often which rows are asked for, counted in batches of a run's own data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_kstep.cost import AccessCurve
from torchrec_kstep.types import Batch


@dataclass(frozen=True)
class Usage:
    """What data asks of tables.

    Attributes:
        curves: how often which rows are asked for, by table; a table that is not named follows a Zipf law.
        ids_per_sample: ids of one row of data, by table; a table that is not named has one per feature.
    """

    curves: Mapping[str, AccessCurve] = field(default_factory=dict)
    ids_per_sample: Mapping[str, float] = field(default_factory=dict)


def traced_usage(batches: Iterable[Batch], tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> Usage:
    """Counts the ids of some batches; tables without an id there are not named."""
    counted: dict[str, list[torch.Tensor]] = {}
    num_rows = 0
    for batch in batches:
        num_rows += batch.label.numel()
        for feature, jagged in batch.sparse.to_dict().items():
            counted.setdefault(feature, []).append(jagged.values().clone())  # a reader may use memory again
    curves: dict[str, AccessCurve] = {}
    ids_per_sample: dict[str, float] = {}
    for config in (config for configs in tables.values() for config in configs):
        ids = [part for feature in config.feature_names for part in counted.get(feature, [])]
        if num_ids := sum(part.numel() for part in ids):
            curves[config.name] = AccessCurve.from_ids(torch.cat(ids).numpy(), config.num_embeddings)
            ids_per_sample[config.name] = num_ids / num_rows
    return Usage(curves, ids_per_sample)
