"""Carrying routes out in this rank, and what came of it. Before process groups and threads are made."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torchrec_kstep.doctor import DIAL_TIMEOUT_S, Store, gather
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.launch import network
from torchrec_kstep.routes.affinity import bind_cores, cores_for, prefer_memory_of, ranges
from torchrec_kstep.routes.choose import LOOPBACK
from torchrec_kstep.routes.environment import point_at
from torchrec_kstep.routes.values import JobRoutes, RankRoutes
from torchrec_kstep.world import World


@dataclass(frozen=True)
class CarriedOut:
    """What became of routes.

    Attributes:
        rank: the routes of this rank, as they hold.
        routes: those of all ranks, as they hold.
        done: one line per rank: what was set.
        warnings: what could not be done, on all ranks; equal ones once.
    """

    rank: RankRoutes
    routes: JobRoutes
    done: tuple[str, ...]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people: the routes with their reasons, what was set, what could not be."""
        return [*self.routes.lines(), "set:", *(f"  {line}" for line in self.done), *(f"warning: {text}" for text in self.warnings)]


def carry_out(store: Store, world: World, routes: JobRoutes, deadline_s: float, backend: str = "gloo") -> CarriedOut:
    """Binds this process, and points gloo (and NCCL) at the interface of its rank. Must be called on all ranks, once a job.

    Interfaces are used by all ranks or by none: each looks whether it has its own, and dials those of the same local rank on the
    other hosts. Where that fails, what gloo was told before stays, with a warning; if interfaces were asked for by name it is an error.

    Args:
        store: the job's store.
        world: this rank.
        routes: of all ranks, the same everywhere.
        deadline_s: seconds to wait for the others, for each question.
        backend: of the process groups; with "nccl" its variables are set too.

    Raises:
        ConfigError: cores or interfaces that were asked for by name are not there, or lead nowhere.
        LaunchError: a rank did not come.
    """
    mine = routes.ranks[world.rank]
    done, warnings = _bind(mine)
    fault = _interface_fault(store, world, routes, deadline_s)
    if fault:
        if any(rank.is_ordered and rank.interface for rank in routes.ranks):
            raise ConfigError(f"routes.interfaces: {fault}; name interfaces that lead to the other hosts, or leave it empty")
        warnings.append(f"interfaces stay as they were: {fault}")
        routes = replace(routes, ranks=tuple(_without_interfaces(rank) for rank in routes.ranks))
        mine = routes.ranks[world.rank]
    if mine.interface:
        done += point_at(mine, backend)
    told = gather(store, world, "routes carried out", {"done": done, "warnings": warnings}, deadline_s)
    lines = tuple(f"rank {rank}: {', '.join(one['done']) or 'nothing'}" for rank, one in enumerate(told))
    return CarriedOut(mine, routes, lines, tuple(dict.fromkeys(text for one in told for text in one["warnings"])))


def _bind(mine: RankRoutes) -> tuple[list[str], list[str]]:
    """Binds cores and memory; returns what was done and what could not be."""
    done, warnings = [], []
    where = f"host {socket.gethostname()}: rank {mine.rank} "
    cores, why_not = cores_for(mine, os.sched_getaffinity(0))
    warnings += [where + why_not] if why_not else []
    if cores:
        refused = bind_cores(cores)
        warnings += [where + refused] if refused else []
        done += [] if refused else [f"cores {ranges(cores)}"]
    if cores and not mine.cpus:
        is_bound, why_not = prefer_memory_of(mine.numa)
        warnings += [where + why_not] if why_not else []
        done += [f"memory of {mine.numa} preferred"] if is_bound else []
    return done, warnings


def _interface_fault(store: Store, world: World, routes: JobRoutes, deadline_s: float) -> str:
    """Says what is wrong with the interfaces of any rank; "" where all are there and lead to their peers. The same on all ranks."""
    if not any(rank.interface for rank in routes.ranks):
        return ""
    mine = routes.ranks[world.rank]
    with ExitStack() as open_doors:
        fault, doors = _open_doors(mine, open_doors)
        told = gather(store, world, "interfaces", {"fault": fault, "doors": doors}, deadline_s)
        faults = [one["fault"] for one in told if one["fault"]]
        if not faults:
            unreached = [] if mine.interface == "" else _dial_peers(world, mine, [one["doors"] for one in told])
            answers = gather(store, world, "interfaces reach", unreached, deadline_s + DIAL_TIMEOUT_S * world.num_hosts)
            faults = [text for answer in answers for text in answer]
    return faults[0] if faults else ""


def _open_doors(mine: RankRoutes, stack: ExitStack) -> tuple[str, dict[str, tuple[str, int]]]:
    """Listens on each interface of a rank; returns why one cannot be used, and where to dial, by interface."""
    own = network.addresses()
    doors = {}
    for interface in mine.interfaces:
        if interface not in own:
            having = ", ".join(f"{name} ({address})" for name, address in own.items())
            return f"host {socket.gethostname()} has no interface {interface!r} with an IPv4 address; it has {having}", {}
        listener = stack.enter_context(socket.create_server((own[interface], 0)))
        doors[interface] = (own[interface], int(listener.getsockname()[1]))
    return "", doors


def _dial_peers(world: World, mine: RankRoutes, doors: Sequence[Mapping[str, Sequence[object]]]) -> list[str]:
    """Dials the ranks of the same local rank on the other hosts, each at all of its interfaces but the loopback."""
    failures = []
    here = f"rank {mine.rank} on host {socket.gethostname()}"
    for rank in range(mine.local_rank, world.world_size, world.local_world_size):
        for interface, (address, port) in doors[rank].items():
            if rank == mine.rank or interface == LOOPBACK:
                continue
            if why := network.dial(str(address), int(str(port)), DIAL_TIMEOUT_S):
                failures.append(f"{here} cannot reach rank {rank} at {address} on {interface}: {why}")
    return failures


def _without_interfaces(rank: RankRoutes) -> RankRoutes:
    return replace(rank, interface="", merge_interface="", replica_interface="", card="")
