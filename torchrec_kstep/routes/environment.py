"""Where gloo and NCCL are told of interfaces: variables that they read when a group is made. The only place of a rank that sets any."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_kstep.routes.values import RankRoutes

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_over(interface: str) -> Iterator[None]:
    """Has process groups that are made meanwhile use an interface; "": leaves gloo as it is.

    Gloo reads the variable whenever a group is made, and keeps that group's connections on the interface it found.
    """
    before = os.environ.get(GLOO_VARIABLE)
    if interface:
        os.environ[GLOO_VARIABLE] = interface
    try:
        yield
    finally:
        if interface:
            if before is None:
                del os.environ[GLOO_VARIABLE]
            else:
                os.environ[GLOO_VARIABLE] = before


def nccl_variables(route: RankRoutes, system: Path = Path("/sys")) -> dict[str, str]:
    """Returns what NCCL is to be told: the interface to meet over, and the InfiniBand or RoCE adapter behind it, if it has one."""
    adapters = [adapter.name for adapter in sorted(system.glob(f"class/net/{route.interface}/device/infiniband/*"))]
    found = {"NCCL_SOCKET_IFNAME": f"={route.interface}"}  # "=": this name, not all that begin with it
    return found | ({"NCCL_IB_HCA": "=" + ",".join(adapters)} if adapters else {})


def point_at(mine: RankRoutes, backend: str) -> list[str]:
    """Has groups that are made from now on use the interface of a rank; returns what was set, in words."""
    variables = {GLOO_VARIABLE: mine.interface} | (nccl_variables(mine) if backend == "nccl" else {})
    said = []
    for name, value in variables.items():
        before = os.environ.get(name, "")
        os.environ[name] = value
        said.append(f"{name}={value}" + (f" (was {before})" if before not in ("", value) else ""))
    return said
