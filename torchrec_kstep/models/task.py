"""The training task around a model: its loss, and what the metrics need."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torchrec_kstep.errors import DataError
from torchrec_kstep.types import Batch, Predictions


@torch.fx.wrap
def check_batch(batch: Batch) -> None:
    """Refuses a batch whose parts disagree about its number of rows.

    Raises:
        DataError: bags of different features cover different numbers of rows (a variable batch), or not those of the labels.
    """
    if batch.sparse.variable_stride_per_key():
        strides = dict(zip(batch.sparse.keys(), batch.sparse.stride_per_key(), strict=True))
        raise DataError(f"a variable batch is not supported: every feature must have one bag per row, got {strides}")
    rows = {
        "dense": batch.dense.shape[0],
        "bags": batch.sparse.stride(),
        "label": batch.label.shape[0],
        "weight": batch.weight.shape[0],
    }
    if len(set(rows.values())) > 1:
        raise DataError(f"the parts of a batch differ in their number of rows: {rows}")


class CTRTask(nn.Module):
    """Model plus weighted binary cross-entropy, the module that is sharded and trained.

    The loss of a rank is `sum(weight * bce) * num_ranks / num_global_rows`. TorchRec averages gradients over ranks, for
    replicated and for sharded parameters alike, so the gradient that arrives is that of the mean over the rows of the
    global batch, however they are split over ranks and micro-batches. The mean of the ranks' losses, summed over
    micro-batches, is the global mean loss.
    """

    def __init__(self, model: nn.Module, num_ranks: int) -> None:
        """Wraps `model` (`(dense, sparse) -> logit [B]`) for training on `num_ranks` ranks."""
        super().__init__()
        self.model = model
        self.num_ranks = num_ranks

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Predictions]:
        """Returns this rank's loss (scalar) and its predictions (detached, `[B]`)."""
        check_batch(batch)
        logit = self.model(batch.dense, batch.sparse)
        loss_per_row = binary_cross_entropy_with_logits(logit, batch.label, reduction="none")
        loss = (batch.weight * loss_per_row).sum() * self.num_ranks / batch.num_global_rows
        return loss, Predictions(logit=logit.detach(), label=batch.label, weight=batch.weight)
