"""A seeded stream in the shape of Criteo logs: Zipf ids, multi-hot bags, labels from a planted teacher.

Every row is a function of (seed, split, index of the row), computed when it is read. So a stream of any length over tables of
any size costs no memory, and any rank can make any row.
"""

import hashlib
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from torchrec_kstep.config.schema import SyntheticConfig
from torchrec_kstep.data.collate import Bags, pad_batch
from torchrec_kstep.data.dataset import BatchStream
from torchrec_kstep.data.mixing import mix64, scatter, uniform
from torchrec_kstep.data.order import BatchOrder, shares
from torchrec_kstep.data.teacher import Teacher, expected_auc
from torchrec_kstep.data.zipf import Zipf
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.types import SPLITS, Batch, FeatureSchema, SparseFeature, Split

POSITIVE_RATE_AT_MEAN_LOGIT = 0.25
_NUM_ROWS_FOR_BIAS = 4096
_NUM_ROWS_FOR_AUC = 100_000
_LABEL, _DENSE, _BAG_SIZE, _ID = (stream << 32 for stream in range(4))  # tags that keep the draws of one row apart


@dataclass(frozen=True)
class _Rows:
    """Made rows: `ids` and `is_in_bag` are `[num_features, B, max_ids_per_bag]`, the others `[B, ...]`."""

    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.uint64]
    is_in_bag: npt.NDArray[np.bool_]
    probability: npt.NDArray[np.float64]
    label: npt.NDArray[np.float32]


class SyntheticStream:
    """The stream as a `Dataset`.

    Args:
        config: sizes, seed and distribution.
        limit: rows of the training split that are used, the first ones; 0 = all.
        prefetch_batches: batches made ahead per stream; 0 = none.

    Raises:
        ConfigError: a size is impossible.
    """

    def __init__(self, config: SyntheticConfig, limit: int = 0, prefetch_batches: int = 2) -> None:
        """See the class."""
        _check(config)
        self._config = config
        self._prefetch_batches = prefetch_batches
        num_train_rows = min(limit or config.num_train_rows, config.num_train_rows)
        self._num_rows: dict[str, int] = {"train": num_train_rows, "validation": config.num_eval_rows, "test": config.num_eval_rows}
        self._zipfs = {num_rows: Zipf(num_rows, config.zipf_exponent) for num_rows in set(config.num_rows_per_table)}
        self._teacher = Teacher(config.seed, config.num_dense)
        self._bias = 0.0
        mean_logit = self._logits_of_first_rows().mean()
        self._bias = float(np.log(POSITIVE_RATE_AT_MEAN_LOGIT / (1 - POSITIVE_RATE_AT_MEAN_LOGIT)) - mean_logit)

    @property
    def schema(self) -> FeatureSchema:
        """Dense columns I1.., sparse features C1.. ."""
        return FeatureSchema(
            dense_names=tuple(f"I{index + 1}" for index in range(self._config.num_dense)),
            sparse=tuple(
                SparseFeature(f"C{index + 1}", num_rows, self._config.max_ids_per_bag)
                for index, num_rows in enumerate(self._config.num_rows_per_table)
            ),
        )

    @property
    def fingerprint(self) -> str:
        """Digest of the configuration."""
        return hashlib.sha256(json.dumps(asdict(self._config), sort_keys=True).encode()).hexdigest()[:32]

    def num_rows(self, split: Split) -> int:
        """Rows of a split over all ranks, after the limit."""
        return self._num_rows[split]

    def batches(self, split: Split, order: BatchOrder, start_step: int = 0) -> BatchStream:
        """Makes the stream of the order's rank, see `Dataset.batches`; a shuffle is a bijection of the rows' indices."""
        return BatchStream(
            num_steps=order.num_steps(self.num_rows(split)),
            start_step=start_step,
            micro_batches=order.micro_batches,
            prefetch_batches=self._prefetch_batches,
            make_batches=lambda: self._iterate(split, order, start_step),
        )

    def bayes_auc(self, split: Split = "test", num_rows: int = _NUM_ROWS_FOR_AUC) -> float:
        """Estimates the AUC of the teacher itself, which no model exceeds but by chance, over the first rows of a split."""
        rows = self._make(split, np.arange(min(num_rows, self.num_rows(split)), dtype=np.uint64))
        return expected_auc(rows.probability)

    def _iterate(self, split: Split, order: BatchOrder, start_step: int) -> Generator[Batch, None, None]:
        num_rows = self.num_rows(split)
        schema = self.schema
        for share in shares(order, num_rows, start_step):
            positions = share.first_position + order.world_size * np.arange(share.num_rows, dtype=np.uint64)
            if order.shuffle:
                positions = scatter(positions, num_rows, order.seed * 1_000_003 + order.epoch)
            rows = self._make(split, positions)
            yield pad_batch(schema, rows.dense, _bags(rows), rows.label, share.num_padded_rows, share.num_global_rows)

    def _logits_of_first_rows(self) -> npt.NDArray[np.float64]:
        probability = self._make("train", np.arange(_NUM_ROWS_FOR_BIAS, dtype=np.uint64)).probability
        logits: npt.NDArray[np.float64] = np.log(probability / (1 - probability))
        return logits

    def _make(self, split: Split, indices: npt.NDArray[np.uint64]) -> _Rows:
        config = self._config
        row_keys = mix64(indices, config.seed * len(SPLITS) + SPLITS.index(split))
        dense = _bell_shaped(row_keys, config.num_dense)
        num_features, max_ids = len(config.num_rows_per_table), config.max_ids_per_bag
        ids = np.empty((num_features, len(indices), max_ids), dtype=np.uint64)
        is_in_bag = np.ones((num_features, len(indices), max_ids), dtype=np.bool_)
        for feature, num_table_rows in enumerate(config.num_rows_per_table):
            for slot in range(max_ids):
                draws = uniform(mix64(row_keys, _ID + feature * max_ids + slot))
                ranks = self._zipfs[num_table_rows].ranks(draws)
                ids[feature, :, slot] = scatter(ranks, num_table_rows, config.seed * 7919 + feature)
            if max_ids > 1:
                bag_size = 1 + (uniform(mix64(row_keys, _BAG_SIZE + feature)) * max_ids).astype(np.int64)
                is_in_bag[feature] = np.arange(max_ids) < bag_size[:, None]
        logit = self._bias + self._teacher.logit(dense, list(ids), is_in_bag)
        probability = 1 / (1 + np.exp(-logit))
        label = (uniform(mix64(row_keys, _LABEL)) < probability).astype(np.float32)
        return _Rows(dense, ids, is_in_bag, probability, label)


def _bags(rows: _Rows) -> list[Bags]:
    if rows.ids.shape[2] == 1:
        return [Bags(ids[:, 0].view(np.int64)) for ids in rows.ids]
    return [Bags(ids[in_bag].view(np.int64), in_bag.sum(axis=1)) for ids, in_bag in zip(rows.ids, rows.is_in_bag, strict=True)]


def _bell_shaped(row_keys: npt.NDArray[np.uint64], num_columns: int) -> npt.NDArray[np.float32]:
    """Makes `[B, num_columns]` numbers of mean 0 and variance 1: sums of four uniform numbers of 16 bits each."""
    columns = np.empty((len(row_keys), num_columns), dtype=np.float32)
    for column in range(num_columns):
        parts = mix64(row_keys, _DENSE + column).view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64)
        columns[:, column] = (parts * 2.0**-16 - 2) * 3**0.5
    return columns


def _check(config: SyntheticConfig) -> None:
    if config.num_train_rows < 1 or config.num_eval_rows < 0 or config.num_dense < 0:
        raise ConfigError("data.synthetic: expected num_train_rows of at least 1, num_eval_rows and num_dense of at least 0")
    if not config.num_rows_per_table or min(config.num_rows_per_table) < 1:
        raise ConfigError(f"data.synthetic.num_rows_per_table={list(config.num_rows_per_table)}: expected tables of at least 1 row")
    if config.max_ids_per_bag < 1 or config.zipf_exponent < 0 or config.seed < 0:
        raise ConfigError("data.synthetic: expected max_ids_per_bag of at least 1, zipf_exponent and seed of at least 0")
