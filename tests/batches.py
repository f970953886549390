"""Seeded random batches for tests, and their shares per rank and micro-batch under the rules of `types.Batch`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.types import Batch, FeatureSchema, SparseFeature


def make_schema(num_rows_per_table: Sequence[int], num_dense: int = 0) -> FeatureSchema:
    """Returns features `f0, f1, ...` over tables of the given rows, and dense columns `d0, d1, ...`."""
    return FeatureSchema(
        dense_names=tuple(f"d{index}" for index in range(num_dense)),
        sparse=tuple(SparseFeature(f"f{index}", num_rows, max_ids_per_bag=0) for index, num_rows in enumerate(num_rows_per_table)),
    )


@dataclass(frozen=True)
class Rows:
    """Rows of a global batch, not yet split: `bags[feature][row]` is a list of ids."""

    names: tuple[str, ...]
    bags: list[list[list[int]]]
    dense: torch.Tensor
    label: torch.Tensor

    @classmethod
    def random(cls, schema: FeatureSchema, num_rows: int, seed: int, max_ids_per_bag: int = 4) -> "Rows":
        """Draws rows; a bag has 0 to `max_ids_per_bag` ids, repeats included."""
        generator = torch.Generator().manual_seed(seed)

        def ids(feature: SparseFeature) -> list[int]:
            count = int(torch.randint(0, max_ids_per_bag + 1, (), generator=generator))
            return [int(row_id) for row_id in torch.randint(0, feature.num_rows, (count,), generator=generator)]

        bags = [[ids(feature) for _ in range(num_rows)] for feature in schema.sparse]
        dense = torch.randn(num_rows, schema.num_dense, generator=generator)
        label = torch.randint(0, 2, (num_rows,), generator=generator).float()
        return cls(schema.sparse_names, bags, dense, label)

    def batch(self) -> Batch:
        """Returns all rows as one batch."""
        return self.share(0, 1)

    def share(self, index: int, count: int) -> Batch:
        """Returns share `index` of `count` equally long ones: contiguous rows, padded at the end.

        For ranks with micro-batches use `index = rank * micro_batches + micro_batch`.
        """
        num_rows = len(self.label)
        size = -(-num_rows // count)
        rows = range(min(index * size, num_rows), min((index + 1) * size, num_rows))
        bags = [[of_feature[row] for row in rows] + [[]] * (size - len(rows)) for of_feature in self.bags]
        padding = (0, size - len(rows))
        return Batch(
            dense=torch.nn.functional.pad(self.dense[rows.start : rows.stop], (0, 0, *padding)),
            sparse=make_kjt(self.names, bags),
            label=torch.nn.functional.pad(self.label[rows.start : rows.stop], padding),
            weight=torch.nn.functional.pad(torch.ones(len(rows)), padding),
            num_global_rows=num_rows,
        )


def make_kjt(names: Sequence[str], bags: Sequence[Sequence[Sequence[int]]]) -> KeyedJaggedTensor:
    """Packs `bags[feature][row]` into a `KeyedJaggedTensor`."""
    flat = [bag for of_feature in bags for bag in of_feature]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(names),
        values=torch.tensor([row_id for bag in flat for row_id in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in flat], dtype=torch.int64),
    )
