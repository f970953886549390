"""Saving a run and continuing it: atomic, checked, without pickle on disk."""

from torchrec_kstep.checkpoint.manager import CheckpointManager
from torchrec_kstep.checkpoint.state import TrainState

__all__ = ["CheckpointManager", "TrainState"]
