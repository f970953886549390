"""TorchRec's own compute kernels as a merge of replicas sees them: whose tables they are, their ids, weights and gradients.

Upstream exports neither the kernels nor the lookups that hold them; `DenseKernelTables` reads the one flat parameter in which
FBGEMM keeps all tables of a dense kernel, `FusedKernelTables` its views of the tables of a fused one.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.torchrec_seam.kernel import BaseEmbedding, GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec_kstep.torchrec_seam.sharding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

__all__ = ["DenseKernelTables", "FusedKernelTables", "dense_kernels", "fused_kernels", "on_backward", "unpooled_dense_tables"]


class DenseKernelTables:
    """The tables of one dense kernel."""

    def __init__(self, kernel: BaseEmbedding) -> None:
        """Takes a kernel of `dense_kernels`."""
        self._kernel = kernel
        self._parameter: nn.Parameter = kernel.emb_module.weights

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """TorchRec's description of the tables."""
        return self._kernel.config

    @property
    def tables(self) -> list[ShardedEmbeddingTable]:
        """The shards of tables, in the order of everything here."""
        return list(self._kernel.config.embedding_tables)

    def weights(self) -> list[torch.Tensor]:
        """Returns `[num_rows, dim]` per table, views."""
        return self._split(self._parameter.detach())

    def gradients(self) -> list[torch.Tensor] | None:
        """Returns views of the gradients, or None if there are none."""
        return None if self._parameter.grad is None else self._split(self._parameter.grad)

    def clear_gradients(self) -> None:
        """Forgets the gradients."""
        self._parameter.grad = None

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [(table.local_rows, table.local_cols) for table in self.tables]
        parts = torch.split(flat, [rows * columns for rows, columns in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


class FusedKernelTables:
    """The tables of one fused kernel, which updates them inside backward."""

    def __init__(self, kernel: BaseEmbedding) -> None:
        """Takes a kernel of `fused_kernels`."""
        self._kernel = kernel

    @property
    def tables(self) -> list[ShardedEmbeddingTable]:
        """The shards of tables, in the order of everything here."""
        return list(self._kernel.config.embedding_tables)

    @property
    def optimizer(self) -> str:
        """FBGEMM's name of the update."""
        name: str = self._kernel.emb_module.optimizer.name
        return name

    def weights(self) -> list[torch.Tensor]:
        """Returns `[num_rows, dim]` per table, views."""
        return [weight.detach() for weight in self._kernel.emb_module.split_embedding_weights()]

    def gradients(self) -> list[torch.Tensor] | None:
        """There are none: they are used up inside backward."""
        return None

    def clear_gradients(self) -> None:
        """There are none."""


def dense_kernels(model: nn.Module) -> Iterator[tuple[str, BaseEmbedding]]:
    """Yields the dense kernels of pooled tables on this rank, each with the path of the tables' names, in the order of the plan.

    Kernels of replicated tables are not among them: DDP averages their gradients.
    """
    return ((path, kernel) for path, kernel in _kernels(model) if isinstance(kernel, BatchedDenseEmbeddingBag))


def unpooled_dense_tables(model: nn.Module) -> list[str]:
    """Names the tables on this rank that a dense kernel reads without pooling.

    On the CPU FBGEMM's dense kernel knows no such reading: it pools all the same, so that upstream's lookup fails.
    """
    kernels = (kernel for _, kernel in _kernels(model) if isinstance(kernel, BatchedDenseEmbedding))
    return [table.name for kernel in kernels for table in kernel.config.embedding_tables]


def fused_kernels(model: nn.Module) -> Iterator[tuple[str, BaseEmbedding]]:
    """Yields the fused kernels on this rank, as `dense_kernels` does."""
    return ((path, kernel) for path, kernel in _kernels(model) if isinstance(kernel, BatchedFusedEmbeddingBag | BatchedFusedEmbedding))


def on_backward(kernel: BaseEmbedding, call: Callable[[KeyedJaggedTensor], None]) -> None:
    """Has `call` called with the features of each lookup right before its backward reaches the tables."""

    def watch(_kernel: nn.Module, inputs: tuple[KeyedJaggedTensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            features = inputs[0]
            output.register_hook(lambda _gradient: call(features))  # type: ignore[no-untyped-call]

    kernel.register_forward_hook(watch)


def _kernels(model: nn.Module) -> Iterator[tuple[str, BaseEmbedding]]:
    for path, module in model.named_modules():
        if not isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            continue
        names = "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
        for lookup in module._lookups:
            if not isinstance(lookup, DistributedDataParallel):
                yield from ((f"{path}.{names}", kernel) for kernel in lookup._emb_modules)
