"""Gradients of the lookups. The backward of a lookup also does, or prepares, the update of its rows."""

from typing import Any

import torch

from torchrec_kstep.ops._errors import kernel_errors


def register() -> None:
    """Registers the gradients of the lookups; the library must be loaded."""
    torch.library.register_autograd("kstep::pooled_lookup", _pooled_backward, setup_context=_save_pooled)
    torch.library.register_autograd("kstep::sequence_lookup", _sequence_backward, setup_context=_save_sequence)


# `ctx` is torch's own context object, which has no public type; ops take their arguments as in `kernels.pooled_lookup`.
def _save_pooled(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    group, _anchor, weights, *tensors, table_of_feature, table_dims, pooling = inputs
    ctx.save_for_backward(weights, *tensors)
    ctx.group, ctx.table_of_feature, ctx.table_dims, ctx.pooling = group, table_of_feature, table_dims, pooling


def _pooled_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weights, *tensors = ctx.saved_tensors
    needs_weight_grad = weights is not None and ctx.needs_input_grad[2]
    with kernel_errors():
        weight_grad = torch.ops.kstep.pooled_backward(
            ctx.group, grad, weights, *tensors, ctx.table_of_feature, ctx.table_dims, ctx.pooling, needs_weight_grad
        )
    return (None, None, weight_grad if needs_weight_grad else None, *[None] * 9)


def _save_sequence(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    group, _anchor, *tensors, table_of_feature, table_dims = inputs
    ctx.save_for_backward(*tensors)
    ctx.group, ctx.table_of_feature, ctx.table_dims = group, table_of_feature, table_dims


def _sequence_backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
    with kernel_errors():
        torch.ops.kstep.sequence_backward(ctx.group, grad, *ctx.saved_tensors, ctx.table_of_feature, ctx.table_dims)
    return (None,) * 10
