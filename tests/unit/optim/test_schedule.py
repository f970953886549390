"""Learning-rate schedules: pure functions of the step, applied to every group. Layer: unit, property."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.config.schema import OptimConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim import LrSchedule, lr_scale
from torchrec_kstep.optim.schedule import IS_TABLE

configs = st.builds(OptimConfig, schedule=st.sampled_from(["constant", "linear", "cosine"]), warmup_steps=st.integers(0, 50))


@given(configs, st.integers(1, 200), st.integers(0, 300))
def test_scales_stay_within_zero_and_one_and_never_stop_a_step_of_the_run(config: OptimConfig, num_total_steps: int, step: int) -> None:
    """Otherwise a step would be wasted on a rate of zero, or taken at more than the rate asked for."""
    scale = lr_scale(step, config, num_total_steps)
    assert 0.0 <= scale <= 1.0
    if step < num_total_steps:
        assert scale > 0.0


@given(configs, st.integers(1, 200))
def test_scales_rise_through_the_warm_up_and_never_after(config: OptimConfig, num_total_steps: int) -> None:
    """Otherwise a schedule would have a kink where warm-up and decay meet."""
    scales = [lr_scale(step, config, num_total_steps) for step in range(300)]
    warm_up, rest = scales[: config.warmup_steps], scales[config.warmup_steps :]
    assert warm_up == [(index + 1) / config.warmup_steps for index in range(config.warmup_steps)]
    assert rest[0] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(rest))
    if config.schedule != "constant" and num_total_steps > config.warmup_steps:
        assert scales[num_total_steps] == pytest.approx(0.0, abs=1e-12)


def test_known_values() -> None:
    """Otherwise a change of the formula would pass the properties."""
    linear, cosine = OptimConfig(schedule="linear", warmup_steps=10), OptimConfig(schedule="cosine", warmup_steps=10)
    assert [lr_scale(step, linear, 110) for step in (0, 9, 10, 35, 60, 109)] == pytest.approx([0.1, 1.0, 1.0, 0.75, 0.5, 0.01])
    assert [lr_scale(step, cosine, 110) for step in (4, 10, 35, 60, 85)] == pytest.approx([0.5, 1.0, 0.8535534, 0.5, 0.1464466])


def test_every_group_follows_and_resuming_does_not_start_again() -> None:
    """Otherwise tables would ignore the warm-up, or a second schedule would scale a scaled rate (C57)."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [params[0]], "lr": 1.0}, {"params": [params[1]], "lr": 0.1}])
    config = OptimConfig(warmup_steps=4)
    assert LrSchedule(optimizer, config, 100).apply(0) == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.25, 0.025])
    LrSchedule(optimizer, config, 100).apply(1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize(
    ("config", "step", "expected"),
    [
        (OptimConfig(schedule="step"), 0, "expected one of constant, linear, cosine"),
        (OptimConfig(), -1, "at least 0, got -1 and 0"),
        (OptimConfig(warmup_steps=-3), 0, "at least 0, got 0 and -3"),
    ],
)
def test_impossible_schedules_are_refused(config: OptimConfig, step: int, expected: str) -> None:
    """Otherwise a typing error would train at a constant rate."""
    with pytest.raises(ConfigError, match=expected):
        lr_scale(step, config, 10)


def test_tables_can_be_left_out_of_the_warm_up_but_not_of_the_decay() -> None:
    """CowClip warms the dense parameters up alone; otherwise tables would crawl through their first epoch."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [params[0]], "lr": 1.0}, {"params": [params[1]], "lr": 0.1, IS_TABLE: True}])
    schedule = LrSchedule(optimizer, OptimConfig(schedule="linear", warmup_steps=4, warmup_covers="dense"), 104)
    rates = []
    for step in (0, 3, 54):
        schedule.apply(step)
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
    assert rates == [pytest.approx((0.25, 0.1)), pytest.approx((1.0, 0.1)), pytest.approx((0.5, 0.05))]
