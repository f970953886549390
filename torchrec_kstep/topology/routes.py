"""Where ranks sit in a topology, and which links a transfer between two of them crosses."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torchrec_kstep.errors import TopologyError
from torchrec_kstep.topology.graph import ClusterTopology, Host

_TYPICAL_TRANSFER_BYTES = 1 << 20  # routes are the fastest ones for a transfer of this size
_NEARNESS_MAY_COST = 0.05  # how much longer drives may take for ranks to keep to those beside them
NETWORK = "network"


@dataclass(frozen=True)
class RankSite:
    """Where one rank computes.

    Attributes:
        rank: global rank.
        host: index of its host.
        local_rank: on that host.
        node: name of its end of the graph: its device, or a place of its own on its NUMA node.
        numa: name of its NUMA node.
        device: name of its device, "" for ranks that compute on cores.
    """

    rank: int
    host: int
    local_rank: int
    node: str
    numa: str
    device: str


@dataclass(frozen=True)
class Edge:
    """One direction of a link.

    Attributes:
        name: `from>to`.
        bandwidth_bytes_per_s: of this direction.
        latency_us: microseconds.
        burst_bytes: that pass at once after a pause.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_us: float
    burst_bytes: float = 0.0

    @property
    def burst_s(self) -> float:
        """Seconds in which an idle edge gathers its burst."""
        return self.burst_bytes / self.bandwidth_bytes_per_s


class Routes:
    """The directed graph of a cluster whose hosts run `ranks_per_host` ranks each.

    Names of parts are `host/part`. Ranks sit on devices, or spread evenly over the NUMA nodes; those on cores hang on their NUMA
    node by a link of their own, whose bandwidth is what the host's exchange allows one rank.

    Raises:
        TopologyError: a host has devices, but fewer than ranks.
    """

    def __init__(self, topology: ClusterTopology, ranks_per_host: int) -> None:
        """Builds the graph; routes are found when they are first asked for."""
        if ranks_per_host < 1:
            raise TopologyError(f"expected at least one rank per host, got {ranks_per_host}")
        self.topology = topology
        self.ranks_per_host = ranks_per_host
        self._neighbours: dict[str, list[tuple[str, Edge]]] = {}
        self._trees: dict[str, dict[str, tuple[str, Edge]]] = {}
        self._leaves = {
            f"{host.name}/{name}"
            for host in topology.hosts
            for name, kind in host.parts.items()
            if kind in ("device", "drive", "network card")
        }
        for host in topology.hosts:
            self._add_host(host)
        self.sites = [
            self._site(index, host, local_rank) for index, host in enumerate(topology.hosts) for local_rank in range(ranks_per_host)
        ]
        self.nic_of: dict[str, str] = {}  # card of each rank, by name of its end of the graph
        if len(topology.hosts) > 1:
            for index, host in enumerate(topology.hosts):
                self._give_nics(host, [site.node for site in self.sites if site.host == index])

    @cached_property
    def edges(self) -> dict[str, Edge]:
        """Every direction of every link by name, in a fixed order."""
        return {edge.name: edge for node in self._neighbours for _, edge in self._neighbours[node]}

    def between(self, source: str, target: str) -> list[Edge]:
        """Returns the edges from one part to another, the fastest way for a megabyte; empty for a part and itself.

        Between hosts it leads over the card of each rank.

        Raises:
            TopologyError: nothing leads there.
        """
        from_host, to_host = source.partition("/")[0], target.partition("/")[0]
        if from_host == to_host:
            return self._within_host(source, target)
        out_nic, in_nic = self.nic_of[source], self.nic_of[target]
        over = [self.edges[name] for name in (f"{out_nic}>{from_host}/uplink", f"{from_host}/uplink>{NETWORK}")]
        under = [self.edges[name] for name in (f"{NETWORK}>{to_host}/uplink", f"{to_host}/uplink>{in_nic}")]
        return [*self._within_host(source, out_nic), *over, *under, *self._within_host(in_nic, target)]

    def _within_host(self, source: str, target: str) -> list[Edge]:
        found = self._came_from(source)
        if target not in found and target != source:
            raise TopologyError(f"topology {self.topology.name!r}: nothing leads from {source} to {target}")
        path = []
        while target != source:
            target, edge = found[target]
            path.append(edge)
        return path[::-1]

    def drive_shares(self, rank: int) -> dict[str, float]:
        """Returns the part of a rank's rows that each drive of its host should hold; their sum is 1, or there is no drive.

        Shares follow the drives' speed for a row that is read and written once, so that all of them are done together. Where the
        ranks of every NUMA node keep to the drives beside it at nearly no loss, they do.
        """
        site = self.sites[rank]
        host = self.topology.hosts[site.host]
        speeds = {drive.name: drive.rows_per_s for drive in host.drives}
        near = self._near_drives(host, site.host)
        chosen = near[site.numa] if near else speeds
        total = sum(speeds[name] for name in chosen)
        return {name: speeds[name] / total if name in chosen else 0.0 for name in speeds}

    def _near_drives(self, host: Host, index: int) -> dict[str, list[str]]:
        """The drives beside each NUMA node with ranks; empty where keeping to them would take longer than using all alike."""
        nodes = [site.numa for site in self.sites if site.host == index]
        near, busy_s = {}, dict.fromkeys((drive.name for drive in host.drives), 0.0)
        for node in dict.fromkeys(nodes):
            distances = {drive.name: sum(map(_typical_s, self._within_host(node, f"{host.name}/{drive.name}"))) for drive in host.drives}
            least = min(distances.values(), default=0.0) * (1 + 1e-6)
            near[node] = [name for name, distance in distances.items() if distance <= least]
            speed = sum(drive.rows_per_s for drive in host.drives if drive.name in near[node])
            for name in near[node]:
                busy_s[name] += nodes.count(node) / len(nodes) / speed
        all_alike_s = 1 / sum(drive.rows_per_s for drive in host.drives) if host.drives else 0.0
        return near if max(busy_s.values(), default=0.0) <= all_alike_s * (1 + _NEARNESS_MAY_COST) else {}

    def _give_nics(self, host: Host, nodes: list[str]) -> None:
        """Gives each rank of a host the card over which it is done first, with all ranks before it; of equal ones the nearest."""
        num_ranks = {f"{host.name}/{nic.name}": 0 for nic in host.nics}
        bandwidths = {f"{host.name}/{nic.name}": nic.bandwidth_bytes_per_s for nic in host.nics}
        for node in nodes:

            def cost(nic: str, node: str = node) -> tuple[float, float, int]:
                way = self._within_host(node, nic)
                slowest_link = max((1 / edge.bandwidth_bytes_per_s for edge in way), default=0.0)
                seconds = max((num_ranks[nic] + 1) / bandwidths[nic], slowest_link)
                return float(f"{seconds:.9g}"), float(f"{sum(map(_typical_s, way)):.9g}"), num_ranks[nic]

            chosen = min(num_ranks, key=cost)
            num_ranks[chosen] += 1
            self.nic_of[node] = chosen

    def _add_host(self, host: Host) -> None:
        for link in host.links:
            self._add(f"{host.name}/{link.ends[0]}", f"{host.name}/{link.ends[1]}", link.bandwidth_bytes_per_s, link.latency_us)
        network = self.topology.network
        if len(self.topology.hosts) > 1:
            uplink = f"{host.name}/uplink"
            for nic in host.nics:
                self._add(f"{host.name}/{nic.name}", uplink, nic.bandwidth_bytes_per_s, 0.0, nic.burst_bytes)
            core = sum(nic.bandwidth_bytes_per_s for nic in host.nics) / network.oversubscription
            bursts = sum(nic.burst_bytes for nic in host.nics) if network.oversubscription == 1 else 0.0  # no slower than the cards
            self._add(uplink, NETWORK, core, network.latency_us / 2, bursts)
        if not host.devices:
            for local_rank in range(self.ranks_per_host):
                self._add(f"{host.name}/rank{local_rank}", self._numa_of(host, local_rank), host.exchange.bandwidth_bytes_per_s, 0.0)

    def _numa_of(self, host: Host, local_rank: int) -> str:
        return f"{host.name}/{host.numa_nodes[local_rank * len(host.numa_nodes) // self.ranks_per_host].name}"

    def _site(self, host_index: int, host: Host, local_rank: int) -> RankSite:
        rank = host_index * self.ranks_per_host + local_rank
        if not host.devices:
            return RankSite(rank, host_index, local_rank, f"{host.name}/rank{local_rank}", self._numa_of(host, local_rank), "")
        if self.ranks_per_host > len(host.devices):
            raise TopologyError(
                f"host {host.name!r} has {len(host.devices)} devices for {self.ranks_per_host} ranks: run at most one rank per device"
            )
        device = host.devices[local_rank].name
        node = f"{host.name}/{device}"
        distances = {
            name: sum(map(_typical_s, self.between(node, name))) for name in (f"{host.name}/{part.name}" for part in host.numa_nodes)
        }
        return RankSite(rank, host_index, local_rank, node, min(distances, key=lambda name: distances[name]), device)

    def _add(self, a: str, b: str, bandwidth_bytes_per_s: float, latency_us: float, burst_bytes: float = 0.0) -> None:
        for source, target in ((a, b), (b, a)):
            edge = Edge(f"{source}>{target}", bandwidth_bytes_per_s, latency_us, burst_bytes)
            self._neighbours.setdefault(source, []).append((target, edge))

    def _came_from(self, source: str) -> dict[str, tuple[str, Edge]]:
        """Dijkstra's algorithm: for each part the one before it on the way from `source`."""
        known = self._trees.get(source)
        if known is not None:
            return known
        came_from: dict[str, tuple[str, Edge]] = {}
        distance = {source: 0.0}
        ahead = [(0.0, source)]
        while ahead:
            so_far, here = heapq.heappop(ahead)
            if so_far > distance[here]:
                continue
            if here in self._leaves and here != source:
                continue  # devices, drives and cards pass nothing on within their host
            for there, edge in self._neighbours.get(here, ()):
                length = so_far + _typical_s(edge)
                if length < distance.get(there, float("inf")):
                    distance[there] = length
                    came_from[there] = (here, edge)
                    heapq.heappush(ahead, (length, there))
        self._trees[source] = came_from
        return came_from


def latency_us(path: Iterable[Edge]) -> float:
    """Microseconds that a route takes without data."""
    return sum(edge.latency_us for edge in path)


def _typical_s(edge: Edge) -> float:
    return edge.latency_us * 1e-6 + _TYPICAL_TRANSFER_BYTES / edge.bandwidth_bytes_per_s
