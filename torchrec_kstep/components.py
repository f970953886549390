"""TorchX components: `torchx run -s SCHEDULER kstep.train -j 2x1 -- optim.lr=1e-3`.

Registered as entry points in setup.cfg, beside TorchX's own, which any registered component would hide otherwise. Nothing
heavy is imported here: `torchx` reads this module for every command. TorchX wants each parameter annotated with a plain type
and described under `Args:`, and a component per verb.
"""

import shlex
import socket
from typing import Dict, List, Optional  # noqa: UP035 - TorchX reads these annotations from the source and knows no others

import torchx
from torchx import specs
from torchx.components.dist import parse_nnodes
from torchx.specs import macros

DEFAULT_RENDEZVOUS_PORT = 29500
NUM_PORTS_TRIED = 100
CPUS_PER_RANK = 2
PREPARE_MEMORY_MB = 4096  # preparation streams; its memory does not grow with the data


def train(
    *overrides: str,
    j: str = "1x1",
    image: str = torchx.IMAGE,
    name: str = "train",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803 - TorchX's own spelling, which users of other components type
    env: Optional[Dict[str, str]] = None,  # noqa: UP006
    mounts: Optional[List[str]] = None,  # noqa: UP006
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
    min_hosts, max_hosts, ranks_per_host, hosts = parse_nnodes(j)
    _check_overrides(overrides)
    command = ["python", "-m", "torchrec_kstep.launch", "--nnodes", hosts, "--nproc-per-node", str(ranks_per_host)]
    command += ["--max-restarts", str(max_retries), "--tee", "3", "--role", ""]
    port = rdzv_port or _free_port()
    line = _quoted([*command, "--rdzv-conf", f"join_timeout={join_timeout_s}"]) + f" --rdzv-id {macros.app_id}"
    if max_hosts > 1:  # the variable's name depends on the scheduler; some leave it empty on the first host itself
        line += f' --rdzv-endpoint "$${{{macros.rank0_env}:=localhost}}:{port}"'
    line += " " + _quoted(["-m", "torchrec_kstep.train", *overrides])
    if not any(override.startswith("run_dir=") for override in overrides):
        line += f" run_dir=runs/{macros.app_id}"  # the same in every attempt, so that a restart finds its checkpoints
    resource = specs.resource(
        cpu=cpu or CPUS_PER_RANK * ranks_per_host,
        gpu=gpu,
        memMB=memMB or (0 if h else _memory_mb(overrides, max_hosts, ranks_per_host)),
        h=h,
    )
    role = _role("train", line, image, resource, env, mounts, max_retries)
    role.num_replicas, role.min_replicas = max_hosts, min_hosts
    role.port_map = {"c10d": port}
    return specs.AppDef(name=name, roles=[role])


def prepare(
    *overrides: str,
    image: str = torchx.IMAGE,
    name: str = "prepare",
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = PREPARE_MEMORY_MB,  # noqa: N803
    env: Optional[Dict[str, str]] = None,  # noqa: UP006
    mounts: Optional[List[str]] = None,  # noqa: UP006
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
    _check_overrides(overrides)
    line = _quoted(["python", "-m", "torchrec_kstep.prepare", *overrides])
    return specs.AppDef(name=name, roles=[_role("prepare", line, image, specs.resource(cpu=cpu, memMB=memMB, h=h), env, mounts, max_retries)])


def _role(
    name: str,
    line: str,
    image: str,
    resource: specs.Resource,
    env: dict[str, str] | None,
    mounts: list[str] | None,
    max_retries: int,
) -> specs.Role:
    """A role that runs one line of shell."""
    return specs.Role(
        name=name,
        image=image,
        entrypoint="bash",
        args=["-c", line],
        env={"LOGLEVEL": "WARNING", **(env or {})},
        resource=resource,
        max_retries=max_retries,
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )


def _check_overrides(overrides: tuple[str, ...]) -> None:
    """Refuses options of the component that stand behind overrides, where TorchX hands them to the program instead."""
    for override in overrides:
        if override.startswith("-"):
            raise ValueError(
                f"{override!r} stands among the overrides, which are of the form key=value: options of the component come before "
                "them, e.g. torchx run -s local_cwd kstep.train -j 2x1 -- optim.lr=1e-3"
            )


def _quoted(arguments: list[str]) -> str:
    """Quotes arguments for the shell, and `$` for TorchX, which fills templates of its own in before the shell runs."""
    return " ".join(shlex.quote(argument) for argument in arguments).replace("$", "$$")


def _free_port() -> int:
    """Returns the first free port from 29500 on: on one machine hosts of two jobs must not meet each other's.

    Other schedulers run the job on other machines, where one port of this range is as good as another.
    """
    for port in range(DEFAULT_RENDEZVOUS_PORT, DEFAULT_RENDEZVOUS_PORT + NUM_PORTS_TRIED):
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return DEFAULT_RENDEZVOUS_PORT


def _memory_mb(overrides: tuple[str, ...], num_hosts: int, ranks_per_host: int) -> int:
    """Estimates the memory of one host from the configuration, which is checked on the way."""
    from torchrec_kstep.config.load import load  # these import Hydra, which listing components does not need
    from torchrec_kstep.config.schema import RunConfig
    from torchrec_kstep.footprint import host_memory_bytes

    return -(-host_memory_bytes(load(RunConfig, "train", overrides), num_hosts, ranks_per_host) // 10**6)
