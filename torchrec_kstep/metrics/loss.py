"""The training loss as it is reported: mean over the rows of all ranks."""

import torch
import torch.distributed as dist
from torch import nn

from torchrec_kstep.errors import DivergenceError
from torchrec_kstep.sharding.tiered import tables_not_finite
from torchrec_kstep.types import Predictions


class MeanLoss:
    """Sums the loss of this rank's rows and reports the mean over all ranks, the same for every number of ranks."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Starts at zero rows; `device` is where collectives want their tensors."""
        self._device = device or torch.device("cpu")
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # [loss, rows]

    def update(self, predictions: Predictions) -> torch.Tensor:
        """Adds a batch and returns its summed loss on this rank (scalar, float64). Not collective."""
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            predictions.logit.double(), predictions.label.double(), weight=predictions.weight.double(), reduction="sum"
        )
        self._sums += torch.stack((loss, predictions.weight.double().sum()))
        return loss

    def compute(self) -> tuple[float, int]:
        """Returns (mean loss, number of rows) over all ranks since the last call, and starts anew. Collective."""
        sums = self._sums
        self._sums = torch.zeros_like(sums)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        loss, num_rows = sums.tolist()
        return (loss / num_rows if num_rows else 0.0), int(num_rows)


def divergence(step: int, model: nn.Module) -> DivergenceError:
    """Says that the loss of `step` is no number, and which parameters of `model` on this rank are none either.

    Of tiered tables, which may be larger than memory, the rows of the batch looked up last are checked.
    """
    bad = [name for name, values in model.named_parameters() if not bool(values.detach().isfinite().all())]
    bad = [f"rows of tiered table {table!r}" for table in tables_not_finite(model)] + bad
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    where = f"not finite after it: {', '.join(bad[:3])}{more}" if bad else "all parameters of this rank are finite after it"
    return DivergenceError(
        f"the loss of step {step} is NaN or infinite ({where}): lower optim.lr and optim.embedding_lr, add optim.warmup_steps, "
        "set optim.clip_norm, or look for extreme values in the dense columns"
    )
