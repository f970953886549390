"""CowClip for dense gradients: the rule of the fused kernels as a plain function, for tables that `torch.optim` steps."""

import torch

from torchrec_kstep.errors import DataError
from torchrec_kstep.ops.row_clip import cow_clip_factors
from torchrec_kstep.optim_spec import CowClip


def cow_clip(weight: torch.Tensor, grad: torch.Tensor, counts: torch.Tensor, clip: CowClip | None = None) -> torch.Tensor:
    """Returns a table's gradient with every row clipped (Zheng et al., arXiv 2204.06240, Algorithm 1). Not collective.

        limit = r * count * max(||w||, r * sqrt(dim) * zeta);   g *= min(1, limit / ||g||)

    As in the authors' code the gradient includes the L2 term, a row that is not in the batch counts once, and the lower
    bound carries r. The loss must be a mean over the rows of the batch: under a sum the same limit clips nearly everything.

    Args:
        weight: `[rows, dim]`, the table.
        grad: `[rows, dim]`, its gradient summed over the whole batch (over all ranks and micro-batches).
        counts: `[rows]`, how often each row occurs in that batch; 0 is taken as 1.
        clip: constants; `exempt` has no meaning here.

    Returns:
        `[rows, dim]`, a new tensor.

    Raises:
        DataError: the shapes do not fit each other.
    """
    clip = clip or CowClip()
    if weight.ndim != 2 or weight.shape != grad.shape or counts.shape != weight.shape[:1]:
        raise DataError(
            f"cow_clip: expected weight and grad [rows, dim] and counts [rows], got {list(weight.shape)}, {list(grad.shape)} and "
            f"{list(counts.shape)}"
        )
    return grad * cow_clip_factors(clip, weight.shape[1], grad.norm(dim=1), weight.norm(dim=1), counts)[:, None]
