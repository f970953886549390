"""The routes of a run: its configuration and its machines to routes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchrec_kstep.config.core_list import parse_cores
from torchrec_kstep.config.schema import RoutesConfig, RunConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.routes.choose import choose_routes, drive_by_folder
from torchrec_kstep.routes.values import JobRoutes, RouteWishes
from torchrec_kstep.topology import ClusterTopology, Drive, machines
from torchrec_kstep.world import World


def routes_of_run(config: RunConfig, world: World) -> JobRoutes:
    """Chooses the routes of all ranks of a run, as rank 0 does for all of them.

    Without a topology file this machine is taken for all hosts: cores and NUMA nodes by sysfs, drives as equally fast, and the
    interfaces as gloo was told, since the one over which the hosts met is known to work. Ranks on devices that the topology does
    not describe are bound to no cores but those asked for by number.

    Raises:
        ConfigError: a list by local rank has neither one entry nor one for each.
        TopologyError: the topology is faulty, or does not take these ranks.
    """
    has_ssd = config.planner.kernel == "tiered" and config.tiers.name == "dram_ssd"
    ssd_paths = tuple(config.tiers.ssd_paths) if has_ssd else ()
    topology = machines(config.planner.topology, world.num_hosts, ssd_paths)
    if not config.planner.topology:
        topology = _without_interfaces(topology)
    wishes = route_wishes(config.routes, world.local_world_size)
    if config.train.device == "cuda" and not any(host.devices for host in topology.hosts):
        wishes = replace(wishes, cores="any")  # nobody said on which NUMA node a rank's device hangs
    ranks_per_replica = (config.kstep.ranks_per_replica or world.local_world_size) if config.kstep.k else 0
    return choose_routes(
        topology,
        world.local_world_size,
        ranks_per_replica=ranks_per_replica,
        ssd_paths=ssd_paths,
        wishes=wishes,
        drive_of=drive_here,
    )


def route_wishes(config: RoutesConfig, ranks_per_host: int) -> RouteWishes:
    """Reads what the configuration asks for.

    Raises:
        ConfigError: a list by local rank has neither one entry nor one for each.
    """
    for name, values in (("cpus", config.cpus), ("interfaces", config.interfaces)):
        if len(values) not in (0, 1, ranks_per_host):
            raise ConfigError(
                f"routes.{name} has {len(values)} entries for {ranks_per_host} ranks per host: give one for each local rank, or one for all"
            )
    return RouteWishes(
        cores=config.cores,  # type: ignore[arg-type]  # one of the choices
        cpus=tuple(parse_cores(text) for text in config.cpus),
        interfaces=tuple(name.strip() for name in config.interfaces),
        drive_shares=tuple(config.drive_shares),
    )


def drive_here(path: str, drives: Sequence[Drive]) -> Drive | None:
    """Finds the drive of a folder: by the folders that the topology names, else by the file system that both lie on."""
    if found := drive_by_folder(path, drives):
        return found
    same = [drive for drive in drives if drive.path and _file_system_of(drive.path) == _file_system_of(path)]
    return same[0] if len(same) == 1 else None


def _file_system_of(path: str) -> int:
    """Number of the file system that a folder lies on, or would lie on once it is made."""
    here = Path(path).absolute()
    return next(folder for folder in (here, *here.parents) if folder.is_dir()).stat().st_dev


def _without_interfaces(topology: ClusterTopology) -> ClusterTopology:
    hosts = tuple(replace(host, nics=tuple(replace(nic, interface="") for nic in host.nics)) for host in topology.hosts)
    return replace(topology, hosts=hosts)
