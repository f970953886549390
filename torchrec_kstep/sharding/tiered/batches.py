"""Checks of a batch at the edge of a collection, while ids still have their features' names."""

from collections.abc import Mapping, Sequence

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.errors import DataError


class IdChecks:
    """Refuses batches that would be computed wrongly further down, on another rank, or under no name.

    Row-wise sharding maps an id beyond its table onto a valid row of some rank, without a word; so ids are compared with
    their table's rows here, in one pass. TorchRec looks features up by the places they had in the first batch; so a batch with others,
    or in another order, would be read under wrong names.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig]) -> None:
        """Checks the features of `tables`; a feature of several tables must fit the smallest."""
        self._smallest: dict[str, BaseEmbeddingConfig] = {}
        for table in tables:
            for feature in table.feature_names:
                known = self._smallest.get(feature)
                if known is None or table.num_embeddings < known.num_embeddings:
                    self._smallest[feature] = table
        self._keys: list[str] = []

    def check(self, features: KeyedJaggedTensor) -> None:
        """Checks one batch.

        Raises:
            DataError: a feature is missing, features are others than in the first batch, batch sizes differ between features, or an id
                is outside of its table; names feature, table and id.
        """
        if not self._smallest:
            return
        if features.keys() != self._keys:
            self._check_keys(features.keys())
        if features.variable_stride_per_key():
            strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
            tables = sorted({table.name for table in self._smallest.values()})
            raise DataError(
                f"a variable batch is not supported for tiered tables ({', '.join(tables[:5])}): every feature must have one bag per "
                f"row, got {strides}"
            )
        ids, keys = features.values(), features.keys()
        if not ids.numel():
            return
        begin = 0
        for key, length in zip(keys, features.length_per_key(), strict=True):
            table = self._smallest.get(key)
            if table is not None and length:
                low, high = torch.aminmax(ids[begin : begin + length])
                if int(low) < 0 or int(high) >= table.num_embeddings:
                    raise DataError(
                        f"feature {key!r} holds the id {int(low) if int(low) < 0 else int(high)}, but table {table.name!r} has "
                        f"{table.num_embeddings} rows, so ids are 0 to {table.num_embeddings - 1}"
                    )
            begin += length

    def _check_keys(self, keys: list[str]) -> None:
        if missing := [feature for feature in self._smallest if feature not in keys]:
            tables = ", ".join(f"{feature!r} of table {self._smallest[feature].name!r}" for feature in missing[:5])
            raise DataError(
                f"the batch lacks {len(missing)} of {len(self._smallest)} features: {tables}; it has {', '.join(keys[:20]) or 'none'}. "
                "Give a feature without ids empty bags (lengths of 0)"
            )
        if self._keys:
            raise DataError(
                f"the batch has the features {', '.join(keys[:20])}, the first one had {', '.join(self._keys[:20])}: all batches need the "
                "same ones in the same order"
            )
        self._keys = list(keys)


def feature_lengths(features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """Returns the bag sizes `[B]` of each feature."""
    lengths = features.lengths().view(len(features.keys()), -1)
    return dict(zip(features.keys(), lengths, strict=True))


def embedding_names(tables: Sequence[BaseEmbeddingConfig]) -> Mapping[str, tuple[str, BaseEmbeddingConfig]]:
    """Maps the names of a collection's outputs to their feature and table: TorchRec adds the table where a feature has several."""
    num_tables: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            num_tables[feature] = num_tables.get(feature, 0) + 1
    return {
        (f"{feature}@{table.name}" if num_tables[feature] > 1 else feature): (feature, table)
        for table in tables
        for feature in table.feature_names
    }
