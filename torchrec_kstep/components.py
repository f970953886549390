"""TorchX components: `torchx run -s SCHEDULER kstep.train -j 2x1 -- optim.lr=1e-3`.

Registered as entry points in setup.cfg, beside TorchX's own, which any registered component would hide otherwise. Nothing
heavy is imported here: `torchx` reads this module for every command. TorchX takes every function of the module for a
component, wants each parameter annotated with a plain type and described under `Args:`, so the work is done in `submission`.
"""

# ruff: noqa: UP006, UP035, UP045 - TorchX reads annotations from the source, and knows these forms only
from typing import Dict, List, Optional

import torchx
from torchx import specs

from torchrec_kstep import submission


def train(
    *overrides: str,
    j: str = "1x1",
    image: str = torchx.IMAGE,
    name: str = "train",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803 - TorchX's own spelling, which users of other components type
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    rdzv_port: int = 0,
    join_timeout_s: int = 300,
) -> specs.AppDef:
    """Trains a CTR model: `python -m torchrec_kstep.train` on every rank of one or more hosts.

    A faulty configuration is refused here, before anything is submitted. A rank that dies is restarted with all others up
    to `max_retries` times and training continues from the newest checkpoint, which needs a `run_dir` that all hosts share;
    by default that is `runs/<id of the job>`. Write `--` before the overrides.

    Args:
        overrides: configuration, as `python -m torchrec_kstep.train` takes it, e.g. optim.lr=1e-3
        j: hosts x ranks per host, e.g. 2x4; MIN:MAXx4 for an elastic number of hosts
        image: image (container schedulers only)
        name: name of the job
        h: named resource of TorchX; replaces cpu, gpu and memMB
        cpu: cores per host; 0 = two per rank
        gpu: GPUs per host
        memMB: memory per host in MB; 0 = estimated from the configuration
        env: environment variables of the ranks, e.g. A=1,B=2
        mounts: mounts of container schedulers, e.g. type=bind,src=/data,dst=/data,readonly
        max_retries: restarts after a failure, by torchrun for a rank and by the scheduler for a host
        rdzv_port: port of the first host where hosts meet; 0 = 29500, or the next one that is free here
        join_timeout_s: seconds that hosts wait for one another
    """
    role = submission.training_role(
        overrides, j, image, cpu=cpu, gpu=gpu, memory_mb=memMB, h=h, max_retries=max_retries, port=rdzv_port, join_timeout_s=join_timeout_s
    )
    return specs.AppDef(name=name, roles=[submission.in_surroundings(role, env, mounts)])


def prepare(
    *overrides: str,
    image: str = torchx.IMAGE,
    name: str = "prepare",
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 4096,  # noqa: N803
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Turns raw logs into training files: `python -m torchrec_kstep.prepare` on one host. Write `--` before the overrides.

    Args:
        overrides: configuration, as `python -m torchrec_kstep.prepare` takes it, e.g. data=criteo data.source=day_0.tsv
        image: image (container schedulers only)
        name: name of the job
        h: named resource of TorchX; replaces cpu and memMB
        cpu: cores
        memMB: memory in MB
        env: environment variables, e.g. A=1,B=2
        mounts: mounts of container schedulers, e.g. type=bind,src=/data,dst=/data,readonly
        max_retries: restarts by the scheduler after a failure
    """
    role = submission.preparation_role(overrides, image, cpu=cpu, memory_mb=memMB, h=h, max_retries=max_retries)
    return specs.AppDef(name=name, roles=[submission.in_surroundings(role, env, mounts)])
