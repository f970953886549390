"""A job of two ranks of which one misbehaves: `python -m tests.multiprocess.misbehaving_job WAY RANK`, under torchrun's variables."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from torchrec_kstep.config.schema import DistributedConfig
from torchrec_kstep.errors import DataError
from torchrec_kstep.runtime import Job, run
from torchrec_kstep.world import World

TIMEOUT_S = 15.0


class SignalledValueError(ValueError):
    """An error during whose report SIGTERM arrives, as from a launcher that has seen another rank die."""

    is_signalled = False

    def __str__(self) -> str:
        """The cause, after the signal."""
        if not self.is_signalled:
            self.is_signalled = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__str__()


def misbehave(way: str) -> None:
    """What the culprit does at the point that `way` names."""
    if way == "exception":
        raise ValueError("the cause of it all")
    if way == "signalled_exception":
        raise SignalledValueError("the cause of it all")
    if way == "our_error":
        raise DataError("the cause of it all: part-00001.parquet, row 7: 41 columns, expected 40; fix the file")
    if way == "exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stuck":
        time.sleep(600)


def body(job: Job, way: str, culprit: int) -> int:
    """Ten rounds of a collective; the culprit misbehaves before, between or after them."""
    is_culprit = job.world.rank == culprit
    way, _, when = way.partition("-")
    if is_culprit and when == "before":
        misbehave(way)
    job.init_process_group()
    for number in range(10):
        if is_culprit and when == "between" and number == 5:
            misbehave(way)
        if not is_culprit and when == "busy" and number == 5:
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s:
                time.sleep(0.01)
        if is_culprit and when == "busy" and number == 5:
            misbehave(way)
        dist.all_reduce(torch.ones(4))
        if way == "wait" and is_culprit:  # for a signal from outside, while the other rank waits in the next collective
            print("ready", flush=True)
            time.sleep(60)
    if is_culprit and when == "after":
        misbehave(way)
    print(f"rank {job.world.rank} is done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run(World.from_torchrun(), DistributedConfig(timeout_s=TIMEOUT_S), lambda job: body(job, sys.argv[1], int(sys.argv[2]))))
