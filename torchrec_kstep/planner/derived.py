"""TorchRec's own `Topology`, derived from a description of machines: what its few fields can say of them."""

from torchrec.distributed.planner import Topology

from torchrec_kstep.topology import ClusterTopology, Routes
from torchrec_kstep.topology.routes import Edge
from torchrec_kstep.torchrec_seam.planning import quiet_topology

_MS_PER_S = 1000.0  # TorchRec counts bandwidths in bytes per millisecond


def torchrec_topology(topology: ClusterTopology, ranks_per_host: int) -> Topology:
    """Derives what TorchRec's planner, its stats and its plan loaders want.

    It has one number each for links within and between hosts, so the slowest way between two ranks stands for all; DRAM and drives
    are divided evenly over the ranks of a host.

    Raises:
        TopologyError: a host has fewer devices than ranks.
    """
    routes = Routes(topology, ranks_per_host)
    host = topology.hosts[0]
    num_ranks = len(routes.sites)
    has_devices = bool(host.devices)
    memory = min(other.memory_bytes for other in topology.hosts) // ranks_per_host
    disk = min(sum(drive.capacity_bytes for drive in other.drives) for other in topology.hosts) // ranks_per_host
    within = [routes.between(a.node, b.node) for a in routes.sites for b in routes.sites if a.host == b.host and a != b]
    between = [routes.between(routes.sites[0].node, site.node) for site in routes.sites if site.host != 0]
    cards = min(sum(nic.bandwidth_bytes_per_s for nic in other.nics) for other in topology.hosts) / ranks_per_host
    values: dict[str, float | str] = {
        "world_size": num_ranks,
        "local_world_size": ranks_per_host,
        "compute_device": "cuda" if has_devices else "cpu",
        "ddr_cap": memory,
        "ssd_cap": disk,
        "ddr_mem_bw": min(node.gather_bytes_per_s for other in topology.hosts for node in other.numa_nodes) / _MS_PER_S,
    }
    if has_devices:
        values["hbm_cap"] = min(device.memory_bytes for other in topology.hosts for device in other.devices)
        values["hbm_mem_bw"] = min(device.gather_bytes_per_s for other in topology.hosts for device in other.devices) / _MS_PER_S
        down = [routes.between(site.numa, site.node) for site in routes.sites]
        values["hbm_to_ddr_mem_bw"] = min(map(_bandwidth, down)) / _MS_PER_S
    if within:
        values["intra_host_bw"] = min(map(_bandwidth, within)) / _MS_PER_S
    if between:
        oversubscribed = cards / topology.network.oversubscription
        values["inter_host_bw"] = min(oversubscribed, *map(_bandwidth, between)) / _MS_PER_S
    return quiet_topology(values)


def _bandwidth(path: list[Edge]) -> float:
    return min(edge.bandwidth_bytes_per_s for edge in path)
