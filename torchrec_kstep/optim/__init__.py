"""Optimizers of dense parameters and tables, their accumulation over micro-batches, and learning-rate schedules."""

from torchrec_kstep.optim.build import build_optimizer
from torchrec_kstep.optim.schedule import LrSchedule, lr_scale

__all__ = ["LrSchedule", "build_optimizer", "lr_scale"]
