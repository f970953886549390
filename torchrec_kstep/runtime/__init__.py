"""The job around the training: ranks, their common store and process group, deadlines, failures, the run directory."""

from torchrec_kstep.runtime.clean_up import cleaned_up
from torchrec_kstep.runtime.deadlines import bound_waits
from torchrec_kstep.runtime.device import choose_device
from torchrec_kstep.runtime.job import Job, run
from torchrec_kstep.runtime.run_dir import open_run_dir

__all__ = ["Job", "bound_waits", "choose_device", "cleaned_up", "open_run_dir", "run"]
