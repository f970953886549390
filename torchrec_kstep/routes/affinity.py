"""Binding this process to cores and its memory to a NUMA node, as far as the operating system lets it."""

import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.routes.values import RankRoutes
from torchrec_kstep.topology.local import cores_of, numbers_in

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # number of the system call
_MPOL_PREFERRED = 1  # linux/mempolicy.h: elsewhere only where that node is full
_MASK_BITS = 64


def cores_for(route: RankRoutes, allowed: Iterable[int], system: Path = Path("/sys")) -> tuple[tuple[int, ...], str]:
    """Returns the cores that a rank is to keep to, and why it is left as it is where there are none.

    Args:
        route: of this rank.
        allowed: cores that this process may use, as the scheduler or a container set them.
        system: where sysfs is mounted.

    Raises:
        ConfigError: cores were asked for by number that this process may not use.
    """
    allowed = sorted(allowed)
    if route.cpus:
        if missing := sorted(set(route.cpus) - set(allowed)):
            raise ConfigError(
                f"routes.cpus gives local rank {route.local_rank} core {missing[0]}, which this process may not use: it has "
                f"{ranges(allowed)} (a container or scheduler may allow fewer cores than the machine has)"
            )
        return route.cpus, ""
    if route.cores == "any":
        return (), ""
    there = cores_of(route.numa, system)
    found = [core for core in there if core in set(allowed)]
    if not found:
        known = f"none of its cores {ranges(there)} is among {ranges(allowed)}" if there else "this machine has no NUMA node of that name"
        return (), f"not bound to {route.numa}: {known}"
    if route.cores == "own":
        part, num_parts = route.core_part
        if len(found) < num_parts:
            return tuple(found), f"all ranks of {route.numa} share {len(found)} cores: too few for {num_parts} parts"
        found = sorted(found, key=lambda core: (min(_siblings(core, system)), core))  # a core's threads stay together
        found = found[len(found) * part // num_parts : len(found) * (part + 1) // num_parts]
    return tuple(sorted(found)), ""


def bind_cores(cores: Iterable[int]) -> str:
    """Binds every thread of this process, and those to come; returns why not, in words, or "".

    Threads of libraries that were started at import are bound too, which the call for the process alone would miss.
    """
    cores = set(cores)
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # a thread that has just ended
        except OSError as error:
            return f"not bound to cores {ranges(cores)}: {error.strerror}"
    return ""


def prefer_memory_of(numa: str, system: Path = Path("/sys")) -> tuple[bool, str]:
    """Has memory of this thread, and of those that it starts, come from a NUMA node while that has some.

    Returns:
        Whether it does, and why not in words; nothing is said where there is one node only.
    """
    nodes = list(system.glob("devices/system/node/node[0-9]*"))
    number = numa.removeprefix("numa")
    if len(nodes) < 2:
        return False, ""
    if not number.isdigit() or not (system / f"devices/system/node/node{number}").exists():
        return False, f"memory is not bound: this machine has no NUMA node {numa}"
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None or int(number) >= _MASK_BITS:
        return False, f"memory is not bound: no memory policies known for node {number} of a {platform.machine()}"
    mask = ctypes.c_ulong(1 << int(number))
    if ctypes.CDLL(None, use_errno=True).syscall(call, _MPOL_PREFERRED, ctypes.byref(mask), _MASK_BITS + 1):
        return False, f"memory is not bound to {numa}: set_mempolicy: {os.strerror(ctypes.get_errno())} (containers often forbid it)"
    return True, ""


def ranges(numbers: Iterable[int]) -> str:
    """Writes numbers as `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in parts)


def _siblings(core: int, system: Path) -> list[int]:
    return numbers_in(system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list") or [core]
