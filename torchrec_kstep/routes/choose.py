"""From a description of machines to routes. Pure: asks nothing of the operating system."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torchrec_kstep.routes.values import JobRoutes, RankRoutes, RouteWishes
from torchrec_kstep.topology import ClusterTopology, Drive, Host, Nic, Routes
from torchrec_kstep.topology.routes import RankSite
from torchrec_kstep.units import format_bandwidth

LOOPBACK = "lo"


def choose_routes(
    topology: ClusterTopology,
    ranks_per_host: int,
    *,
    ranks_per_replica: int = 0,
    ssd_paths: Sequence[str] = (),
    wishes: RouteWishes | None = None,
    drive_of: Callable[[str, Sequence[Drive]], Drive | None] | None = None,
) -> JobRoutes:
    """Chooses cores, drives and interfaces of every rank.

    Cards go to ranks so that the last of a host is done first with its part of the traffic, the nearer of equal ones
    (`Routes.nic_of`); rows go to drives by their speed (`Routes.drive_shares`). A rank's merge lane and, where its replica
    spans hosts, its replica's exchanges go over its card; a replica within a host stays off the cards.

    Args:
        topology: the machines, with the names of interfaces and the folders of drives where these are known.
        ranks_per_host: ranks on each host.
        ranks_per_replica: ranks of a replica; 0: all ranks share one.
        ssd_paths: folders of the row stores, the same on all hosts.
        wishes: what overrules the choice.
        drive_of: finds the drive that a path lies on; by default the one whose folder the path is in.

    Raises:
        TopologyError: the hosts do not take these ranks.
    """
    routes = Routes(topology, ranks_per_host)
    wishes = wishes or RouteWishes()
    num_ranks = len(routes.sites)
    chosen = [_rank_routes(routes, site, wishes) for site in routes.sites]
    if ssd_paths:
        chosen = [_with_drives(route, routes, ssd_paths, wishes, drive_of or drive_by_folder) for route in chosen]
    if len(topology.hosts) > 1:
        has_lanes = 0 < ranks_per_replica < num_ranks
        is_within_host = 0 < ranks_per_replica <= ranks_per_host and ranks_per_host % ranks_per_replica == 0
        chosen = [_with_interfaces(route, routes, wishes, has_lanes, is_within_host) for route in chosen]
    return JobRoutes(topology.name, tuple(ssd_paths), tuple(chosen))


def drive_by_folder(path: str, drives: Sequence[Drive]) -> Drive | None:
    """Returns the drive whose folder holds `path`, the deepest of several; None without one."""
    holding = [drive for drive in drives if drive.path and Path(path).absolute().is_relative_to(Path(drive.path).absolute())]
    return max(holding, key=lambda drive: len(Path(drive.path).absolute().parts), default=None)


def _rank_routes(routes: Routes, site: RankSite, wishes: RouteWishes) -> RankRoutes:
    """The cores of a rank."""
    host = routes.topology.hosts[site.host]
    beside = [other.local_rank for other in routes.sites if other.numa == site.numa]
    numa, cpus = site.numa.partition("/")[2], wishes.cpus_of(site.local_rank)
    cores = wishes.cores
    node = next(node for node in host.numa_nodes if node.name == numa)
    if cpus:
        why = f"rank {site.rank} keeps to the cores that routes.cpus gives local rank {site.local_rank}"
    elif cores == "node" and len(host.numa_nodes) == 1:
        cores, why = "any", f"{host.name} has one NUMA node, so ranks gain nothing from being bound to it"
    elif cores == "own" and node.num_cores < len(beside):
        cores, why = "node", f"{numa} has {node.num_cores} cores for {len(beside)} ranks, too few for parts of their own"
    elif cores == "any":
        why = "ranks are bound to no cores: routes.cores=any, or devices that the topology does not describe"
    else:
        beside_what = f" beside {site.device}" if site.device else ""
        why = f"rank {site.rank} computes on {numa}{beside_what}, so that is where its cores and its memory are"
    return RankRoutes(
        rank=site.rank,
        host=site.host,
        local_rank=site.local_rank,
        numa=numa,
        cores=cores,
        core_part=(beside.index(site.local_rank), len(beside)),
        cpus=cpus,
        is_ordered=bool(wishes.interface_of(site.local_rank)),
        reasons=(why,),
    )


# --- drives ---


def _with_drives(
    route: RankRoutes,
    routes: Routes,
    ssd_paths: Sequence[str],
    wishes: RouteWishes,
    drive_of: Callable[[str, Sequence[Drive]], Drive | None],
) -> RankRoutes:
    if wishes.drive_shares:
        return _because(replace(route, drive_shares=wishes.drive_shares), "rows are spread over drives as routes.drive_shares says")
    if len(ssd_paths) == 1:
        return _because(route, f"there is one drive to use: {ssd_paths[0]}")
    host = routes.topology.hosts[route.host]
    found = {path: drive_of(path, host.drives) for path in ssd_paths}
    unknown = [path for path, drive in found.items() if drive is None]
    if unknown:
        return _because(route, f"{unknown[0]} lies on no drive of topology {routes.topology.name!r}, so rows are spread evenly over paths")
    drives = [drive for drive in found.values() if drive is not None]
    by_drive = routes.drive_shares(route.rank)
    on_path = [by_drive[drive.name] / drives.count(drive) for drive in drives]
    if not sum(on_path):  # the rank's own drives have no path in this run
        on_path = [drive.rows_per_s / drives.count(drive) for drive in drives]
    shares = tuple(float(f"{share / sum(on_path):.4f}") for share in on_path)
    return _because(replace(route, drive_shares=shares), _drives_reason(route, host, drives, shares))


def _drives_reason(route: RankRoutes, host: Host, drives: Sequence[Drive], shares: Sequence[float]) -> str:
    unused = sorted({drive.name for drive, share in zip(drives, shares, strict=True) if not share})
    if unused:
        used = sorted({drive.name for drive, share in zip(drives, shares, strict=True) if share})
        return f"rank {route.rank} of {host.name} keeps to {', '.join(used)} beside {route.numa}: drives elsewhere would be no faster"
    speeds = {drive.name: drive.rows_per_s for drive in drives}
    if max(speeds.values()) < 1.01 * min(speeds.values()):
        return f"drives of {host.name} are equally fast, so rows are spread evenly"
    said = ", ".join(f"{name} {rate:,.0f} rows/s" for name, rate in speeds.items())
    return f"rows go to the drives of {host.name} by their speed, so that all are done together: {said}"


# --- network ---


def _with_interfaces(route: RankRoutes, routes: Routes, wishes: RouteWishes, has_lanes: bool, is_within_host: bool) -> RankRoutes:
    host = routes.topology.hosts[route.host]
    nic = next(nic for nic in host.nics if f"{host.name}/{nic.name}" == routes.nic_of[routes.sites[route.rank].node])
    ordered = wishes.interface_of(route.local_rank)
    interface = ordered or nic.interface
    if not interface:
        return _because(
            replace(route, card=nic.name),
            f"the topology names no interface of {nic.name} of {host.name}, so gloo keeps the one over which the hosts met",
        )
    route = replace(
        route,
        card="" if ordered else nic.name,
        interface=interface,
        merge_interface=interface if has_lanes else "",
        replica_interface=(LOOPBACK if is_within_host else interface) if has_lanes else "",
    )
    if ordered:
        return _because(route, f"local rank {route.local_rank} uses {ordered}, as routes.interfaces says")
    return _because(route, _card_reason(route, routes, host, nic))


def _card_reason(route: RankRoutes, routes: Routes, host: Host, nic: Nic) -> str:
    used = [routes.nic_of[site.node].partition("/")[2] for site in routes.sites if site.host == route.host]
    sharing = used.count(nic.name)
    each = format_bandwidth(nic.bandwidth_bytes_per_s / sharing)
    rate = f"{nic.interface} ({nic.name}, {format_bandwidth(nic.bandwidth_bytes_per_s)})"
    idle = [other for other in host.nics if other.name not in used]
    if idle:
        best = max(idle, key=lambda other: other.bandwidth_bytes_per_s)
        over = f"{best.interface or best.name} with {format_bandwidth(best.bandwidth_bytes_per_s)}"
        return f"{rate} carries {sharing} of {len(used)} ranks of {host.name}, {each} each: more than {over} would give one alone"
    if len(host.nics) == 1:
        return f"{rate} is the only card of {host.name}"
    return f"{rate} carries {sharing} of {len(used)} ranks of {host.name}, {each} each: cards share them by bandwidth"


def _because(route: RankRoutes, reason: str) -> RankRoutes:
    return replace(route, reasons=(*route.reasons, reason))
