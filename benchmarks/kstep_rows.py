"""Rows of a prepared set in memory, for studies that train it many times: with feature crosses, and shared out by user.

Pure functions of numpy arrays but for reading the set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.collate import Bags, pad_batch
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.manifest import NUM_RESERVED_IDS, UNSEEN_ID
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.types import SPLITS, Batch, FeatureSchema, SparseFeature, Split

Ints = npt.NDArray[np.int64]
_READ_ROWS = 65_536


@dataclass(frozen=True)
class Column:
    """Ids of one feature.

    Attributes:
        ids: `[num_ids]`, row after row.
        offsets: `[num_rows + 1]`, where the bag of each row begins; None = one id a row.
    """

    ids: Ints
    offsets: Ints | None = None

    def take(self, rows: Ints) -> Bags:
        """Returns the bags of some rows."""
        if self.offsets is None:
            return Bags(self.ids[rows], None)
        begins = self.offsets[rows]
        lengths = self.offsets[rows + 1] - begins
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return Bags(self.ids[np.repeat(begins, lengths) + within], lengths.astype(np.int32))

    def first(self) -> Ints:
        """Returns the first id of every row."""
        return self.ids if self.offsets is None else self.ids[self.offsets[:-1]]


@dataclass(frozen=True)
class Rows:
    """All rows of one split."""

    schema: FeatureSchema
    dense: npt.NDArray[np.float32]
    label: npt.NDArray[np.float32]
    columns: dict[str, Column]

    def batch(self, rows: Ints, num_global_rows: int) -> Batch:
        """Makes a batch of the given rows, one replica's share of `num_global_rows`."""
        bags = [self.columns[name].take(rows) for name in self.schema.sparse_names]
        return pad_batch(self.schema, self.dense[rows], bags, self.label[rows], len(rows), num_global_rows)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yields all rows in their order."""
        for begin in range(0, len(self.label), size):
            rows = np.arange(begin, min(begin + size, len(self.label)))
            yield self.batch(rows, len(rows))


def read_rows(dataset: Dataset) -> dict[Split, Rows]:
    """Reads all splits into memory, in the order of the files."""
    return {split: _read(dataset, split) for split in SPLITS}


def _read(dataset: Dataset, split: Split) -> Rows:
    schema = dataset.schema
    batches = list(dataset.batches(split, BatchOrder(0, 1, _READ_ROWS, shuffle=False)))
    columns = {}
    for feature in schema.sparse:
        parts = [batch.sparse[feature.name] for batch in batches]
        ids = np.concatenate([part.values().numpy() for part in parts]).astype(np.int64)
        lengths = np.concatenate([part.lengths().numpy() for part in parts]).astype(np.int64)
        columns[feature.name] = Column(ids, None if (lengths == 1).all() else np.concatenate([[0], np.cumsum(lengths)]))
    return Rows(
        schema,
        np.concatenate([batch.dense.numpy() for batch in batches]),
        np.concatenate([batch.label.numpy() for batch in batches]),
        columns,
    )


def add_cross(splits: dict[Split, Rows], name: str, parts: Sequence[str]) -> dict[Split, Rows]:
    """Adds a column whose values are the combinations of others (of bags: their first id) that the training split holds.

    `"<feature>/10"` as a part stands for ids in steps of ten: decades, where ids number years.
    """
    codes = {split: _codes(rows, parts) for split, rows in splits.items()}
    known = np.unique(codes["train"])
    feature = SparseFeature(name, NUM_RESERVED_IDS + len(known))
    crossed = {}
    for split, rows in splits.items():
        place = np.minimum(np.searchsorted(known, codes[split]), len(known) - 1)
        ids = np.where(known[place] == codes[split], place + NUM_RESERVED_IDS, UNSEEN_ID)
        schema = replace(rows.schema, sparse=(*rows.schema.sparse, feature))
        crossed[split] = replace(rows, schema=schema, columns={**rows.columns, name: Column(ids)})
    return crossed


def _codes(rows: Rows, parts: Sequence[str]) -> Ints:
    code = np.zeros(len(rows.label), dtype=np.int64)
    num_rows = {feature.name: feature.num_rows for feature in rows.schema.sparse}
    for part in parts:
        name, _, divisor = part.partition("/")
        code = code * num_rows[name] + rows.columns[name].first() // int(divisor or 1)
    return code


Step = list[Ints]
"""One step: for each replica the rows of its batch."""


def shuffled(num_rows: int, num_replicas: int, batch_size: int, seed: int, epoch: int) -> Iterator[Step]:
    """Yields a pass in random order; every replica gets `batch_size` rows of each step, of the last one its share."""
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    size = batch_size * num_replicas
    for begin in range(0, num_rows, size):
        rows = order[begin : begin + size]
        yield [rows[replica::num_replicas] for replica in range(num_replicas)]


def owners(keys: Ints, num_replicas: int) -> npt.NDArray[np.int64]:
    """Gives every key to one replica, so that all have about equally many rows. Returns the replica of every row."""
    values, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
    owner, load = np.empty(len(values), dtype=np.int64), np.zeros(num_replicas, dtype=np.int64)
    for key in np.argsort(-counts, kind="stable"):  # the largest first, each to the least busy replica
        owner[key] = load.argmin()
        load[owner[key]] += counts[key]
    return owner[places]


def shuffled_by_owner(owner: Ints, num_replicas: int, batch_size: int, seed: int, epoch: int) -> Iterator[Step]:
    """Yields a pass in which every replica sees its own rows alone; rows beyond the last whole step of all are left for another pass."""
    generator = np.random.default_rng([seed, epoch])
    orders = [generator.permutation(np.flatnonzero(owner == replica)) for replica in range(num_replicas)]
    for begin in range(0, min(map(len, orders)) - batch_size + 1, batch_size):
        yield [order[begin : begin + batch_size] for order in orders]
