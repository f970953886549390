"""TorchRec's train pipelines and the plain loop behind one interface, so that the training loop need not know which it is."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.types import NoWait

from torchrec_kstep.types import Batch, Predictions

__all__ = ["Pipeline", "PlainPipeline", "PrefetchingPipeline", "StepsOptimizer", "make_pipeline"]


class StepsOptimizer(Protocol):
    """What a pipeline asks of an optimizer."""

    def zero_grad(self) -> None:
        """Clears gradients."""

    def step(self) -> None:
        """Takes one step."""


class Pipeline(Protocol):
    """Takes one micro-batch through the model per call: forward, and in training mode backward and optimizer as well."""

    def progress(self, batches: Iterator[Batch]) -> Predictions:
        """Returns the predictions of the next batch; batches after it may be taken from the iterator in advance.

        Raises:
            StopIteration: every batch of the iterator has been through.
        """

    def reset(self) -> None:
        """Forgets the iterator and batches taken in advance; call it before a new pass over data."""


class PlainPipeline:
    """No look-ahead: each batch is moved, computed and stepped before the next one is touched."""

    def __init__(self, model: nn.Module, optimizer: StepsOptimizer, device: torch.device) -> None:
        """Keeps what `progress` needs; `model` maps a batch to (loss, predictions)."""
        self._model = model
        self._optimizer = optimizer
        self._device = device

    def progress(self, batches: Iterator[Batch]) -> Predictions:
        """Takes the next batch through the model."""
        batch = next(batches).to(self._device)
        if self._model.training:
            self._optimizer.zero_grad()
        loss, predictions = self._model(batch)
        if self._model.training:
            loss.backward()
            self._optimizer.step()
        assert isinstance(predictions, Predictions)
        return predictions

    def reset(self) -> None:
        """Nothing is kept between calls."""


class PrefetchingPipeline(TrainPipelineSparseDist):  # type: ignore[misc]  # torchrec has no type information
    """TorchRec's pipeline, which also tells tiered tables of the next batch while the present one is computed.

    As soon as the ids of the next batch are on the ranks of their rows, which is between forward and backward of the present
    one, its rows are asked for: reading them overlaps with backward and the optimizer. Upstream's prefetching pipeline does
    this on devices only, and for its own kernels.
    """

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        """Receives the ids of a batch and asks for their rows."""
        super().wait_sparse_data_dist(context)
        for module in self._pipelined_modules:
            if not hasattr(module, "prefetch_rows"):
                continue
            requests, name = context.input_dist_tensors_requests, module.forward.name
            features = requests[name].wait()
            requests[name] = NoWait(features)
            module.prefetch_rows(features)

    def reset(self) -> None:
        """Forgets the iterator and batches taken in advance."""
        super().reset()
        for module in self._model.modules():
            if hasattr(module, "cancel_prefetch"):
                module.cancel_prefetch()


def make_pipeline(name: str, model: nn.Module, optimizer: StepsOptimizer, device: torch.device) -> Pipeline:
    """Makes the pipeline that `train.pipeline` names: `sparse_dist`, `base` or `plain`. Results do not depend on it."""
    kinds = {"sparse_dist": PrefetchingPipeline, "base": TrainPipelineBase, "plain": PlainPipeline}
    pipeline: Pipeline = kinds[name](model, optimizer, device)
    return pipeline
