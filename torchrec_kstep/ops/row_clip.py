"""CowClip's rule from norms and counts, for every place that has these: dense gradients, rows cut by columns, the reference."""

import math

import torch

from torchrec_kstep.optim_spec import CowClip


def cow_clip_factors(clip: CowClip, dim: int, grad_norms: torch.Tensor, weight_norms: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns by what the gradient of each row is multiplied, in (0, 1].

    Args:
        clip: the rule; `exempt` has no meaning here.
        dim: columns of a whole row, on however many ranks they are.
        grad_norms: `[rows]`, of gradients summed over the whole batch, L2 included.
        weight_norms: `[rows]`.
        counts: `[rows]`, how often a row occurs in the batch; 0, for a row that is not in it, is taken as 1.

    Returns:
        `[rows]`, of the norms' dtype.
    """
    floor = clip.ratio * math.sqrt(dim) * clip.zeta
    limits = clip.ratio * counts.clamp(min=1).to(weight_norms.dtype) * weight_norms.clamp(min=floor)
    is_over = grad_norms > limits
    return torch.where(is_over, limits / torch.where(is_over, grad_norms, 1.0), 1.0)
