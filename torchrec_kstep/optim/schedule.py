"""Learning-rate schedules as pure functions of the step, applied to every parameter group."""

import math

from torch.optim import Optimizer

from torchrec_kstep.config.schema import OptimConfig
from torchrec_kstep.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")
IS_TABLE = "is_table"  # key of a parameter group whose parameters are tables


def lr_scale(step: int, config: OptimConfig, num_total_steps: int, is_table: bool = False) -> float:
    """Returns the factor on every learning rate at a step.

    During the warm-up the i-th of n steps takes i/n. From then on `constant` stays at 1, `linear` and `cosine` fall from
    1 to 0, where 0 is reached when the last step is done, so that no step is wasted on it. Tables are not warmed up under
    `warmup_covers=dense`; their decay begins at the same step.

    Args:
        step: optimizer steps done before this one, from 0.
        config: `schedule` and `warmup_steps`.
        num_total_steps: optimizer steps of the whole run.
        is_table: whether the rate is one of tables.

    Raises:
        ConfigError: the schedule is unknown, or a count is negative.
    """
    if config.schedule not in SCHEDULES:
        raise ConfigError(f"optim.schedule={config.schedule!r}: expected one of {', '.join(SCHEDULES)}")
    if step < 0 or config.warmup_steps < 0:
        raise ConfigError(f"expected a step and optim.warmup_steps of at least 0, got {step} and {config.warmup_steps}")
    if step < config.warmup_steps:
        return 1.0 if is_table and config.warmup_covers == "dense" else (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    num_decay_steps = max(1, num_total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / num_decay_steps)
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class LrSchedule:
    """Sets the learning rate of every group of an optimizer, tables and fused kernels included. Keeps no state of its own.

    A group's rate at scale 1 is its `initial_lr`, which is noted in the group on first sight, as torch's schedulers do.
    """

    def __init__(self, optimizer: Optimizer, config: OptimConfig, num_total_steps: int) -> None:
        """Notes the rates at scale 1; make one per optimizer, before the first `apply`."""
        self.optimizer = optimizer
        self.config = config
        self.num_total_steps = num_total_steps
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def apply(self, step: int) -> float:
        """Sets the rates for `step` (counted from 0) and returns the scale of the dense parameters.

        Call it before `optimizer.zero_grad()` of that step: this is where fused kernels take over the rate that their
        backward will use.
        """
        scale = lr_scale(step, self.config, self.num_total_steps)
        table_scale = lr_scale(step, self.config, self.num_total_steps, is_table=True)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (table_scale if group.get(IS_TABLE) else scale)
        return scale
