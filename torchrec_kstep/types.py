"""Value types that cross the borders between stages. No behaviour lives here beyond moving a batch to a device."""

from dataclasses import dataclass
from typing import Literal

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class SparseFeature:
    """One id column and the table it reads.

    Attributes:
        name: feature name, a key of the `KeyedJaggedTensor`.
        num_rows: rows of its table; every id is in `[0, num_rows)`, reserved ids included.
        max_ids_per_bag: 1 for a single-valued column, 0 where bags have no bound.
    """

    name: str
    num_rows: int
    max_ids_per_bag: int = 1


@dataclass(frozen=True)
class FeatureSchema:
    """What a data set offers to a model, in column order."""

    dense_names: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]

    @property
    def num_dense(self) -> int:
        """Number of dense columns."""
        return len(self.dense_names)

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """Names of the sparse features in `KeyedJaggedTensor` key order."""
        return tuple(feature.name for feature in self.sparse)


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec carries no type information
    """One rank's share of a global batch (or of one micro-batch of it).

    All ranks hold the same number of rows B, because row-wise sharded tables need it: a share that came out shorter is
    filled with padding rows, whose bags are empty, whose dense values and labels are 0, and whose weight is 0.

    Attributes:
        dense: `[B, num_dense]` float32.
        sparse: bags of row ids, `KeyedJaggedTensor` with stride B.
        label: `[B]` float32, 0 or 1.
        weight: `[B]` float32, 1 for a row and 0 for a padding row.
        num_global_rows: rows, padding not counted, of the whole global batch over all ranks and micro-batches; the loss
            divides by it, so that gradients are those of the mean over the global batch.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor
    weight: torch.Tensor
    num_global_rows: int

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Returns a copy on `device`."""
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            label=self.label.to(device, non_blocking=non_blocking),
            weight=self.weight.to(device, non_blocking=non_blocking),
            num_global_rows=self.num_global_rows,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the caching allocator that `stream` uses these tensors."""
        for tensor in (self.dense, self.label, self.weight):
            tensor.record_stream(stream)
        self.sparse.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Returns a copy in pinned host memory."""
        return Batch(
            dense=self.dense.pin_memory(),
            sparse=self.sparse.pin_memory(),
            label=self.label.pin_memory(),
            weight=self.weight.pin_memory(),
            num_global_rows=self.num_global_rows,
        )


@dataclass
class Predictions:
    """What one forward pass leaves for the metrics; all `[B]` float32, detached from the graph.

    Attributes:
        logit: model output before the sigmoid.
        label: 0 or 1.
        weight: 0 for padding rows, which no metric counts.
    """

    logit: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor
