"""torch.optim behind TorchRec's KeyedOptimizer: same steps, complete state, accumulation. Layer: unit."""

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer

from torchrec_kstep.errors import CheckpointError, ConfigError
from torchrec_kstep.optim.accumulate import AccumulatingOptimizer
from torchrec_kstep.optim.keyed import TorchOptimizer, torch_optimizer

REFERENCES: dict[str, Callable[[list[torch.Tensor]], Optimizer]] = {
    "adam": lambda params: Adam(params, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01),
    "adagrad": lambda params: Adagrad(params, lr=0.1, eps=1e-6, weight_decay=0.01),
    "sgd": lambda params: SGD(params, lr=0.1, weight_decay=0.01),
}


def make_params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(3, 4, generator=generator)) for name in ("a", "b")}


def make_optimizer(name: str) -> tuple[dict[str, torch.Tensor], TorchOptimizer]:
    params = make_params()
    return params, TorchOptimizer(params, torch_optimizer(name, list(params.values()), 0.1, (0.8, 0.95), 1e-6, 0.01))


def set_gradients(params: dict[str, torch.Tensor], step: int) -> None:
    for index, param in enumerate(params.values()):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + index))


@pytest.mark.parametrize("name", REFERENCES)
def test_steps_equal_those_of_torch(name: str) -> None:
    """Otherwise making the state ahead of time would change the first steps."""
    params, optimizer = make_optimizer(name)
    expected = make_params()
    reference = REFERENCES[name](list(expected.values()))
    for step in range(5):
        for group, stepper in ((params, optimizer), (expected, reference)):
            set_gradients(group, step)
            stepper.step()
    for key, value in expected.items():
        torch.testing.assert_close(params[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", REFERENCES)
def test_state_is_complete_before_the_first_step_and_loads_in_place(name: str) -> None:
    """Otherwise a checkpoint could not be loaded before training, or training would go on with another state than was loaded."""
    params, optimizer = make_optimizer(name)
    _, fresh = make_optimizer(name)
    keys = {key: set(state) for key, state in fresh.state_dict()["state"].items()}
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    state = optimizer.state_dict()
    assert {key: set(of_key) for key, of_key in state["state"].items()} == keys, "states must not appear later"
    other, resumed = make_optimizer(name)
    with torch.no_grad():
        for key, param in other.items():
            param.copy_(params[key])
    resumed.load_state_dict(state)
    for group, stepper in ((params, optimizer), (other, resumed)):
        set_gradients(group, 9)
        stepper.step()
    assert all(torch.equal(params[key], other[key]) for key in params)


def test_init_state_takes_no_step() -> None:
    """Otherwise TorchRec's way to make states would count one step more and let weight decay into the moments."""
    params, optimizer = make_optimizer("adam")
    before = {key: param.detach().clone() for key, param in params.items()}
    optimizer.init_state()
    assert all(torch.equal(params[key], before[key]) for key in params)
    assert all(not state["exp_avg"].any() and not state["step"].any() for state in optimizer.state_dict()["state"].values())


def test_an_unknown_optimizer_is_refused() -> None:
    """Otherwise it would fall through to another one."""
    with pytest.raises(ConfigError, match="optimizer 'lion': expected one of adam, sgd, adagrad"):
        torch_optimizer("lion", [], 0.1, (0.9, 0.999), 1e-8, 0.0)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_accumulation_steps_once_per_global_batch_with_the_sum_of_gradients(num_micro_batches: int) -> None:
    """Otherwise a pipeline, which clears and steps for each micro-batch, would forget or double gradients."""
    params = {"a": torch.nn.Parameter(torch.zeros(1))}
    optimizer = AccumulatingOptimizer(TorchOptimizer(params, SGD(list(params.values()), lr=1.0)), num_micro_batches)
    for batch in range(3):
        for micro in range(num_micro_batches):
            assert optimizer.is_between_batches == (micro == 0)
            assert params["a"].item() == -batch
            optimizer.zero_grad()
            (params["a"] / num_micro_batches).sum().backward()
            optimizer.step()
    assert params["a"].item() == pytest.approx(-3.0)


def test_state_in_the_middle_of_a_global_batch_is_refused() -> None:
    """Otherwise a resumed run would lose the gradients so far without a word."""
    _, inner = make_optimizer("adam")
    optimizer = AccumulatingOptimizer(inner, 3)
    state = optimizer.state_dict()
    optimizer.step()
    with pytest.raises(CheckpointError, match="cannot be saved after micro-batch 1 of 3: finish the global batch first"):
        optimizer.state_dict()
    with pytest.raises(CheckpointError, match="cannot be loaded after micro-batch 1 of 3"):
        optimizer.load_state_dict(state)
