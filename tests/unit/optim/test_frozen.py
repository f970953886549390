"""The dense part of the frozen variant: Adam until the first round, guarded and shared after it."""

import torch
from torch.optim import Adam

from torchrec_kstep.optim.frozen import FrozenAdam


def run(optimizer: torch.optim.Optimizer, param: torch.Tensor, steps: range) -> None:
    for step in steps:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


def test_it_is_adam_before_the_first_round() -> None:
    ours, theirs = (torch.full((5, 3), 0.5, requires_grad=True) for _ in range(2))
    run(FrozenAdam([ours], 0.01, (0.9, 0.999), 1e-8, 0.1), ours, range(10))
    run(Adam([theirs], 0.01, (0.9, 0.999), 1e-8, weight_decay=0.1), theirs, range(10))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_shared_moment_is_kept_with_its_bias_corrected_and_divides_only_where_it_is_larger() -> None:
    param = torch.zeros(2, requires_grad=True)
    optimizer = FrozenAdam([param], 0.1, (0.0, 0.5), 1e-8, 0.0)
    param.grad = torch.tensor([2.0, 1e-6])
    optimizer.step()
    optimizer.freeze()
    state = optimizer.state[param]
    torch.testing.assert_close(state["v_hat"], torch.tensor([4.0, 1e-12]))
    before = param.detach().clone()
    param.grad = torch.tensor([0.2, 3.0])  # the first falls, the second rises: unguarded it would be divided by 1e-6
    optimizer.step()
    own = (0.25 * torch.tensor([4.0, 1e-12]) + 0.5 * torch.tensor([0.04, 9.0])) / 0.75
    torch.testing.assert_close(param.detach() - before, -0.1 * param.grad / torch.maximum(state["v_hat"], own).sqrt())
    assert abs(float((param.detach() - before)[1])) < 0.2


def test_amsgrad_never_lets_it_fall() -> None:
    for is_amsgrad in (False, True):
        param = torch.zeros(1, requires_grad=True)
        optimizer = FrozenAdam([param], 0.1, (0.0, 0.5), 1e-8, 0.0, is_amsgrad)
        found = []
        for gradient in (2.0, 0.1, 0.1, 0.1):
            param.grad = torch.tensor([gradient])
            optimizer.step()
            optimizer.freeze()
            found.append(float(optimizer.state[param]["v_hat"]))
        assert (found[-1] == found[0]) is is_amsgrad
