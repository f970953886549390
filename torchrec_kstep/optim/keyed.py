"""torch.optim optimizers behind TorchRec's `KeyedOptimizer`, with complete state from the start and sharded states."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.torchrec_seam.optim import ShardedTensor, sharded_like

OPTIMIZERS = ("adam", "sgd", "adagrad")


def torch_optimizer(name: str, params: list[torch.Tensor], lr: float, betas: tuple[float, float], eps: float, l2: float) -> Optimizer:
    """Makes a `torch.optim` optimizer whose state exists before its first step.

    torch makes Adam's moments lazily; a state that appears later can neither be saved at step 0 nor loaded in place.
    On CPU they run as torch's single-pass kernels (its `fused=True`, nothing to do with fused tables): a dense step touches
    every row of every table, and one pass in place of a dozen takes about a seventh of the time.

    Args:
        name: `adam`, `sgd` or `adagrad`.
        params: what it steps.
        lr: learning rate.
        betas: decay of Adam's moments.
        eps: added to the root of Adam and Adagrad.
        l2: coefficient of L2, added to the gradient.

    Raises:
        ConfigError: the name is unknown.
    """
    is_on_cpu = all(param.device.type == "cpu" for param in params)
    if name == "sgd":
        return SGD(params, lr=lr, weight_decay=l2, fused=is_on_cpu)
    if name == "adagrad":
        return Adagrad(params, lr=lr, eps=eps, weight_decay=l2, fused=is_on_cpu)
    if name != "adam":
        raise ConfigError(f"optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}")
    adam = Adam(params, lr=lr, betas=betas, eps=eps, weight_decay=l2, fused=is_on_cpu)
    for param in params:
        adam.state[param] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": _zeros_like(param),
            "exp_avg_sq": _zeros_like(param),
        }
    return adam


def _zeros_like(param: torch.Tensor) -> torch.Tensor:
    """Returns plain contiguous zeros: `zeros_like` would copy the parameter's subclass too."""
    return torch.zeros(param.shape, dtype=param.dtype, device=param.device)


class TorchOptimizer(KeyedOptimizer):  # type: ignore[misc]  # torchrec has no type information
    """A `torch.optim` optimizer that shows its state by parameter name, in the shards of the parameter.

    The state of a sharded table appears as a sharded tensor, a view of what the inner optimizer steps, so that a
    checkpoint knows which rows and columns each rank holds. Without that, shards of different ranks would look like copies
    of one tensor, and all but one would be lost.
    """

    def __init__(
        self, params: Mapping[str, torch.Tensor], optimizer: Optimizer, sharded: Mapping[str, ShardedTensor] | None = None
    ) -> None:
        """Wraps `optimizer`.

        Args:
            params: what it steps, by name.
            optimizer: an optimizer over exactly these, with complete state.
            sharded: the sharded tensors whose local shards are views of the parameter of the same name.
        """
        self._optimizer = optimizer
        layout = sharded or {}
        state = {
            param: {
                key: sharded_like(layout[name], param, value) if name in layout and value.shape == param.shape else value
                for key, value in optimizer.state[param].items()
            }
            for name, param in params.items()
            if optimizer.state[param]
        }
        super().__init__(params, state, optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Takes one step with the gradients at hand."""
        return self._optimizer.step(closure)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Does nothing: the state is complete from the start, where upstream takes a step with zero gradients to make it."""
        del sparse_grad_parameter_names
