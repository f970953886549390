"""What the TorchX components submit: a role whose one line of shell starts this host's ranks. No tensor library."""

import shlex
import socket
from collections.abc import Mapping, Sequence

from torchx import specs
from torchx.components.dist import parse_nnodes
from torchx.specs import macros

from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.footprint import host_memory_bytes

DEFAULT_RENDEZVOUS_PORT = 29500
NUM_PORTS_TRIED = 100
CPUS_PER_RANK = 2


def training_role(
    overrides: Sequence[str],
    j: str,
    image: str,
    *,
    cpu: int,
    gpu: int,
    memory_mb: int,
    h: str | None,
    max_retries: int,
    port: int,
    join_timeout_s: int,
) -> specs.Role:
    """Returns the role of a training job; the parameters are those of `components.train`.

    Raises:
        ConfigError: the configuration is faulty.
        ValueError: `j` is malformed, or options of the component stand among the overrides.
    """
    min_hosts, max_hosts, ranks_per_host, hosts = parse_nnodes(j)
    _check_overrides(overrides)
    config = load(RunConfig, "train", overrides)
    port = port or _free_port()
    line = _quoted(["python", "-m", "torchrec_kstep.launch", "--nnodes", hosts, "--nproc-per-node", str(ranks_per_host)])
    line += " " + _quoted(["--max-restarts", str(max_retries), "--tee", "3", "--role", "", "--rdzv-conf", f"join_timeout={join_timeout_s}"])
    line += f" --rdzv-id {macros.app_id}"
    if max_hosts > 1:  # the variable's name depends on the scheduler; some leave it empty on the first host itself
        line += f' --rdzv-endpoint "$${{{macros.rank0_env}:=localhost}}:{port}"'
    line += " " + _quoted(["-m", "torchrec_kstep.train", *overrides])
    if not any(override.startswith("run_dir=") for override in overrides):
        line += f" run_dir=runs/{macros.app_id}"  # the same in every attempt, so that a restart finds its checkpoints
    memory_mb = memory_mb or -(-host_memory_bytes(config, max_hosts, ranks_per_host) // 10**6)
    return specs.Role(
        name="train",
        image=image,
        entrypoint="bash",
        args=["-c", line],
        resource=specs.resource(cpu=cpu or CPUS_PER_RANK * ranks_per_host, gpu=gpu, memMB=memory_mb, h=h),
        num_replicas=max_hosts,
        min_replicas=min_hosts,
        max_retries=max_retries,
        port_map={"c10d": port},
    )


def preparation_role(overrides: Sequence[str], image: str, *, cpu: int, memory_mb: int, h: str | None, max_retries: int) -> specs.Role:
    """Returns the role of a preparation job; the parameters are those of `components.prepare`."""
    _check_overrides(overrides)
    return specs.Role(
        name="prepare",
        image=image,
        entrypoint="bash",
        args=["-c", _quoted(["python", "-m", "torchrec_kstep.prepare", *overrides])],
        resource=specs.resource(cpu=cpu, memMB=memory_mb, h=h),
        max_retries=max_retries,
    )


def in_surroundings(role: specs.Role, env: Mapping[str, str] | None, mounts: list[str] | None) -> specs.Role:
    """Gives a role its environment variables and mounts."""
    role.env = {"LOGLEVEL": "WARNING", **(env or {})}
    role.mounts = specs.parse_mounts(mounts) if mounts else []
    return role


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuses options of the component that stand behind overrides, where TorchX hands them to the program instead."""
    for override in overrides:
        if override.startswith("-"):
            raise ValueError(
                f"{override!r} stands among the overrides, which are of the form key=value: options of the component come before "
                "them, e.g. torchx run -s local_cwd kstep.train -j 2x1 -- optim.lr=1e-3"
            )


def _quoted(arguments: Sequence[str]) -> str:
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
