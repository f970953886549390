"""A bound on the norm of the whole gradient: dense parameters and tables of all ranks together."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

ClipCovers = Literal["dense", "all"]

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@runtime_checkable
class KeepsRowGradients(Protocol):
    """An optimizer of tables whose gradients are no `grad` of a parameter: summed by row, they wait in it for its `step`."""

    def squared_gradient_norm(self) -> torch.Tensor:
        """Returns the sum of the squares of this rank's waiting gradients: scalar float64 on the CPU. Not collective."""

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the waiting gradients."""


class GlobalNormClipping(OptimizerWrapper):  # type: ignore[misc]  # torchrec has no type information
    """Scales all gradients down before a step so that their norm is at most a bound: `clip_grad_norm_` of an unsharded model.

    The norm is taken over replicated parameters, over the parts of sharded tables on all ranks of the model, and over the row
    gradients that tiered tables keep in deferred mode. One scalar is summed over these ranks for it, in each step.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        replicated: Sequence[torch.Tensor],
        sharded: Sequence[torch.Tensor],
        max_norm: float,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Wraps `optimizer`.

        Args:
            optimizer: steps with the scaled gradients; optimizers in it that keep row gradients are found by themselves.
            replicated: parameters whose gradients are the same on all ranks.
            sharded: this rank's parts of parameters that are divided over the ranks.
            max_norm: the bound, above 0.
            process_group: the ranks that share the model; None for all ranks of the job.
        """
        super().__init__(optimizer)
        self._replicated = list(replicated)
        self._sharded = list(sharded)
        self._keepers = [part for part in _leaves(optimizer) if isinstance(part, KeepsRowGradients)]
        self._max_norm = max_norm
        self._process_group = process_group

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Scales the gradients and steps. Collective."""
        # As torch does, also by 1: a factor that is no number then spoils the step visibly.
        factor = (self._max_norm / (self.gradient_norm() + _EPS)).clamp(max=1.0)
        for param in (*self._replicated, *self._sharded):
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.dtype))
        for keeper in self._keepers:
            keeper.scale_gradients(float(factor))
        self._optimizer.step(closure)

    def gradient_norm(self) -> torch.Tensor:
        """Returns the norm of the gradients at hand: scalar float64, the same on all ranks. Collective."""
        own = _squared_norm(self._sharded)
        for keeper in self._keepers:
            own += keeper.squared_gradient_norm().to(own.device)
        if dist.is_initialized() and dist.get_world_size(self._process_group) > 1:
            dist.all_reduce(own, group=self._process_group)
        return (own + _squared_norm(self._replicated)).sqrt()


def _squared_norm(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums the squares of the gradients of `params`, where they have any."""
    total = torch.zeros((), dtype=torch.float64, device=params[0].device if params else "cpu")
    for param in params:
        if param.grad is not None:
            total += torch.linalg.vector_norm(param.grad, dtype=torch.float64).square()
    return total


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizers that combined ones consist of."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _leaves(part)
    else:
        yield optimizer
