"""Adam whose denominator stands still between merge rounds: the variant of the theory, guarded."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

FROZEN = "v_hat"


class FrozenAdam(Optimizer):
    """Adam that divides by the larger of a second moment shared by all replicas and its own.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr * (m / (1 - b1^t)) / (sqrt(max(v_hat, v / (1 - b2^t))) + eps)

    `freeze` sets v_hat at a merge round. It is kept with its bias corrected, so that later steps cannot inflate it. Without the
    guard, max(), a coordinate whose first gradients were near zero would take unbounded steps until the next round.
    State of each parameter: `step`, `exp_avg`, `exp_avg_sq`, `v_hat`; complete before the first step.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], lr: float, betas: tuple[float, float], eps: float, l2: float, is_amsgrad: bool = False
    ) -> None:
        """Takes the parameters; `is_amsgrad` never lets v_hat fall, as the theorem asks."""
        super().__init__(list(params), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": l2})
        self._is_amsgrad = is_amsgrad
        for param in params:
            moments = {name: torch.zeros(param.shape, dtype=param.dtype) for name in ("exp_avg", "exp_avg_sq", FROZEN)}
            self.state[param] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Takes one step with the gradients at hand."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] += 1
                num_steps = int(state["step"])
                grad = param.grad.add(param, alpha=group["weight_decay"]) if group["weight_decay"] else param.grad
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                own = state["exp_avg_sq"] / (1 - beta2**num_steps)
                denominator = torch.maximum(state[FROZEN], own).sqrt_().add_(group["eps"])
                param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**num_steps))
        return loss

    @torch.no_grad()
    def freeze(self) -> None:
        """Takes the second moments as they are, which a merge round has made equal on all replicas, for v_hat."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if num_steps := int(state["step"]):
                    merged = state["exp_avg_sq"] / (1 - group["betas"][1] ** num_steps)
                    state[FROZEN].copy_(torch.maximum(state[FROZEN], merged) if self._is_amsgrad else merged)
