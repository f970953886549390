"""The parts of a cluster and the rules that a description of one must keep."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from json import dumps

from torchrec_kstep.errors import TopologyError
from torchrec_kstep.topology.drive import Drive


@dataclass(frozen=True)
class NumaNode:
    """Cores with the memory beside them.

    Attributes:
        name: unique on its host.
        memory_bytes: DRAM.
        bandwidth_bytes_per_s: of that DRAM, shared by everything that uses it.
        gather_bytes_per_s: random rows that one core brings up.
        num_cores: cores, shared evenly by the ranks that sit here.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    gather_bytes_per_s: float
    num_cores: int


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: unique on its host.
        memory_bytes: of the device.
        bandwidth_bytes_per_s: of its memory.
        gather_bytes_per_s: random rows that the whole device brings up.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    gather_bytes_per_s: float


@dataclass(frozen=True)
class Nic:
    """A network card.

    Attributes:
        name: unique on its host.
        bandwidth_bytes_per_s: each way.
        interface: name of the network interface, "" where that is not known.
        burst_bytes: that pass at once after a pause, where the bandwidth is that of a shaper (token bucket) and not of the wire.
    """

    name: str
    bandwidth_bytes_per_s: float
    interface: str = ""
    burst_bytes: float = 0.0


@dataclass(frozen=True)
class Link:
    """An edge between two parts of a host; both directions work at once.

    Attributes:
        ends: names of the two parts.
        bandwidth_bytes_per_s: each way.
        latency_us: microseconds.
    """

    ends: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_us: float


@dataclass(frozen=True)
class Exchange:
    """How ranks that compute on cores hand data to others: the library and the copies in memory that it needs.

    Attributes:
        bandwidth_bytes_per_s: of one rank, each way.
        latency_us: microseconds that one collective takes without data.
    """

    bandwidth_bytes_per_s: float
    latency_us: float


@dataclass(frozen=True)
class Network:
    """What joins the hosts.

    Attributes:
        latency_us: microseconds from card to card.
        oversubscription: bandwidth of a host's cards over its share of the core; 1 where the core never slows a host.
    """

    latency_us: float = 0.0
    oversubscription: float = 1.0


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: unique in the cluster.
        numa_nodes: at least one.
        exchange: how its ranks hand data on.
        switches: names of PCIe and other switches.
        devices: accelerators; with any, ranks sit on them, else on the NUMA nodes.
        nics: network cards.
        drives: SSDs.
        links: between all of these.
    """

    name: str
    numa_nodes: tuple[NumaNode, ...]
    exchange: Exchange
    switches: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    nics: tuple[Nic, ...] = ()
    drives: tuple[Drive, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def parts(self) -> dict[str, str]:
        """Kind of each part by name."""
        return dict(self._named())

    def _named(self) -> list[tuple[str, str]]:
        named = [(node.name, "NUMA node") for node in self.numa_nodes] + [(name, "switch") for name in self.switches]
        named += [(device.name, "device") for device in self.devices] + [(nic.name, "network card") for nic in self.nics]
        return named + [(drive.name, "drive") for drive in self.drives]

    @property
    def memory_bytes(self) -> int:
        """DRAM of all NUMA nodes."""
        return sum(node.memory_bytes for node in self.numa_nodes)

    def faults(self) -> Iterator[str]:
        """Says what is wrong with this description of a host."""
        names = [name for name, _ in self._named()]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield f"host {self.name!r}: the name {name!r} is given {names.count(name)} times; names must differ"
        if not self.numa_nodes:
            yield f"host {self.name!r} has no NUMA node: give at least one, with its memory and bandwidth"
            return
        for link in self.links:
            if link.ends[0] == link.ends[1]:
                yield f"host {self.name!r}: a link joins {link.ends[0]!r} with itself"
        reached = self._reached_from(self.numa_nodes[0].name)
        for name, kind in self.parts.items():
            if name not in reached:
                yield (
                    f"host {self.name!r}: no links lead from {self.numa_nodes[0].name!r} to {kind} {name!r}: add a link, with bandwidth "
                    "and latency, to the switch or NUMA node it hangs on"
                )

    def _reached_from(self, start: str) -> set[str]:
        reached, ahead = {start}, [start]
        while ahead:
            here = ahead.pop()
            for link in self.links:
                if here in link.ends:
                    other = link.ends[1] if link.ends[0] == here else link.ends[0]
                    if other not in reached:
                        reached.add(other)
                        ahead.append(other)
        return reached


@dataclass(frozen=True)
class ClusterTopology:
    """Hosts and what joins them.

    Attributes:
        name: for people.
        hosts: at least one.
        network: between the hosts.
        source: where the numbers come from: a data sheet, or a probe with its date.
        is_measured: whether they were measured on the machine itself; decides how far predictions are trusted.
        assumed: what the source could not measure and took from a table, one text each.
    """

    name: str
    hosts: tuple[Host, ...]
    network: Network = field(default_factory=Network)
    source: str = ""
    is_measured: bool = False
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses graphs in which something cannot be reached."""
        faults = [fault for host in self.hosts for fault in host.faults()]
        names = [host.name for host in self.hosts]
        if not names:
            faults.append("there is no host")
        faults += [f"host {name!r} is given {names.count(name)} times" for name in dict.fromkeys(names) if names.count(name) > 1]
        if len(names) > 1:
            faults += [
                f"host {host.name!r} has no network card, so nothing leads to the {len(names) - 1} other hosts: add one and a link to it"
                for host in self.hosts
                if not host.nics
            ]
        if faults:
            raise TopologyError(f"topology {self.name!r}:\n  " + "\n  ".join(faults))

    def with_hosts(self, num_hosts: int) -> "ClusterTopology":
        """Returns the same cluster with another number of hosts: the first ones, or copies of the last one behind them.

        Raises:
            TopologyError: there would be no host, or several that no network joins.
        """
        if num_hosts < 1:
            raise TopologyError(f"a cluster has at least one host, got {num_hosts}")
        last = self.hosts[-1]
        stem = last.name.rstrip("0123456789") or "host"
        taken = {host.name for host in self.hosts}
        fresh = (name for name in (f"{stem}{index}" for index in range(10 * num_hosts + len(taken) + 10)) if name not in taken)
        copies = tuple(replace(last, name=next(fresh)) for _ in range(num_hosts - len(self.hosts)))
        return replace(self, hosts=(self.hosts + copies)[:num_hosts])

    @property
    def cores_fingerprint(self) -> str:
        """A hash over what is said of the first host's cores, memories, devices and exchange."""
        host = self.hosts[0]
        parts: list[NumaNode | Device | Exchange] = [*host.numa_nodes, *host.devices, host.exchange]
        values = [asdict(part) for part in parts]
        return hashlib.sha256(dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """A hash over everything that a plan depends on."""
        values = {key: value for key, value in asdict(self).items() if key not in ("source", "assumed", "name")}
        return hashlib.sha256(dumps(values, sort_keys=True).encode()).hexdigest()[:16]
