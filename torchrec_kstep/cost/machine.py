"""A topology in numbers: seconds that one unit of each quantity on each rank keeps each resource busy, phase by phase.

A step is a chain of phases that end together on all ranks, because each exchange waits for the slowest: the loop itself, ids, lookup,
outputs, dense layers, gradients, update, all-reduce, dense optimizer, merge round. A phase takes as long as its busiest resource: a
rank, a memory, one direction of a link. Drives and the way between DRAM and devices work beside the chain where rows come up ahead.
A shaped card passes bursts at the speed of the wire, so that it slows an exchange by what exceeds its burst; beside the chain stands
what it keeps up, because bursts gather no faster.

Replicas carry one plan, so quantities are those of the ranks of one replica, and resources those of all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_kstep.cost.coefficients import Coefficients
from torchrec_kstep.cost.work import EXCHANGES, MEMORIES, QUANTITIES, VALUE_BYTES, StepSetup, Vector
from torchrec_kstep.errors import TopologyError
from torchrec_kstep.topology import ClusterTopology, Routes
from torchrec_kstep.topology.routes import Edge, RankSite, latency_us

Matrix = npt.NDArray[np.float64]
RESERVED_SHARE = 0.15  # of DRAM and device memory: dense parameters, activations, batches ahead
# Part of a phase of which the system leaves ranks on the core where it put them, though another core has run out of work. Measured: uneven
# work of four ranks on two cores takes 3 to 14 % longer than the same work spread evenly, in phases of 7 and 20 ms.
STUCK_SHARE = 0.4
TIERS, LINKS = "tiers", "links"
BESIDE = (TIERS, LINKS)  # phases that run beside the chain of the others
EXCHANGE_COLUMNS = [QUANTITIES.index(name) for name in EXCHANGES]
GLOO_REDUCE_SCATTER_SENDS = 2.0  # counted at the interface: gloo sums whole tensors on every rank, NCCL sends each part once


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Attributes:
        name: of the phase.
        resources: names of what may be busy, `[E]`.
        used: indexes of the quantities that count in this phase.
        weights: seconds per unit, `[ranks, used, E]`.
        base_s: seconds that the dense part of the model keeps each resource busy, `[E]`.
        fixed_s: seconds that the phase takes at least: latencies, dense layers.
        again_s: seconds that each way to cut tables beyond the first adds, as it has an exchange of its own.
    """

    name: str
    resources: tuple[str, ...]
    used: tuple[int, ...]
    weights: Matrix
    base_s: Vector
    fixed_s: float
    again_s: float = 0.0

    def loads_s(self, work: Matrix) -> Vector:
        """Seconds that each resource is busy, `[E]`, under the quantities of all ranks, `[ranks, QUANTITIES]`."""
        flat = self.weights.reshape(self.weights.shape[0] * len(self.used), len(self.resources))
        loads: Vector = self.base_s + work[:, list(self.used)].reshape(-1) @ flat
        return loads

    def loads_by_rank_s(self, vector: Vector) -> Matrix:
        """Seconds that one shard with these quantities adds to each resource, by the rank that holds it: `[ranks, E]`."""
        loads: Matrix = np.einsum("q,rqe->re", vector[list(self.used)], self.weights)
        return loads


@dataclass(frozen=True)
class Pool:
    """Memory that some ranks share.

    Attributes:
        name: for people.
        memory: which of `MEMORIES`.
        capacity_bytes: what tables may take.
        ranks: of one replica, that use it; a rank is named once for each of its replicas on this pool.
    """

    name: str
    memory: str
    capacity_bytes: float
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """What is needed to price a placement.

    Attributes:
        name: of the topology.
        num_ranks: of one replica.
        local_world_size: ranks of one replica on one host.
        on_device: whether ranks compute on devices.
        is_measured: whether the topology was measured.
        phases: in the order of a step; those of `BESIDE` work beside the others, `TIERS` where `prefetch` only.
        pools: memory.
        prefetch: as in `StepSetup`.
        coefficients: of the software.
    """

    name: str
    num_ranks: int
    local_world_size: int
    on_device: bool
    is_measured: bool
    phases: tuple[Phase, ...]
    pools: tuple[Pool, ...]
    prefetch: bool
    coefficients: Coefficients

    @classmethod
    def of(
        cls,
        topology: ClusterTopology,
        setup: StepSetup,
        *,
        threads_per_rank: float = 1.0,
        queue_depth: int = 128,
        dram_bytes_per_host: int | None = None,
        ssd_bytes_per_host: int | None = None,
        coefficients: Coefficients | None = None,
        keeps_all: bool = False,
    ) -> "Machine":
        """Puts `setup.num_replicas` replicas of `setup.world_size` ranks each on the hosts of a topology, one after the other.

        Args:
            topology: the machines.
            setup: ranks, replicas, k and the dense part of the model.
            threads_per_rank: cores that a rank computes with, at most; ranks never get more cores than there are.
            queue_depth: reads in flight on each drive.
            dram_bytes_per_host: DRAM for rows, indexes not counted; None: what a host has, without a reserve.
            ssd_bytes_per_host: what rows on drives must fit into, also where drives hold less: rows that never occur take no
                space; None: what the drives hold.
            coefficients: of the software.
            keeps_all: also resources that can never be the busiest, so that machines of different coefficients have the same ones.

        Raises:
            TopologyError: the hosts do not take these ranks.
        """
        num_ranks = setup.world_size * setup.num_replicas
        if num_ranks % len(topology.hosts):
            raise TopologyError(
                f"topology {topology.name!r} has {len(topology.hosts)} hosts, over which {num_ranks} ranks cannot be spread evenly: "
                "choose a multiple, or another number of hosts"
            )
        routes = Routes(topology, num_ranks // len(topology.hosts))
        builder = _Builder(routes, setup, coefficients or Coefficients(), threads_per_rank, queue_depth, keeps_all)
        return cls(
            name=topology.name,
            num_ranks=setup.world_size,
            local_world_size=setup.local_world_size,
            on_device=bool(topology.hosts[0].devices),
            is_measured=topology.is_measured,
            phases=tuple(builder.phases()),
            pools=tuple(builder.pools(dram_bytes_per_host, ssd_bytes_per_host)),
            prefetch=setup.prefetch,
            coefficients=builder.coefficients,
        )

    def num_further_exchanges(self, work: Matrix) -> int:
        """Ways to cut tables beyond the first that occur in the quantities of all ranks, `[ranks, QUANTITIES]`."""
        return max(int(work[:, EXCHANGE_COLUMNS].any(axis=0).sum()) - 1, 0)

    def pool_use(self, memory: Matrix) -> Vector:
        """Bytes taken of each pool, `[pools]`, under the memory of all ranks, `[ranks, MEMORIES]`."""
        return np.array([memory[list(pool.ranks), MEMORIES.index(pool.memory)].sum() for pool in self.pools])

    def pool_use_by_rank(self, vector: Vector) -> Matrix:
        """Bytes that one shard takes of each pool by the rank that holds it: `[ranks, pools]`."""
        use = np.zeros((self.num_ranks, len(self.pools)))
        for index, pool in enumerate(self.pools):
            np.add.at(use[:, index], list(pool.ranks), vector[MEMORIES.index(pool.memory)])
        return use

    @property
    def capacities_bytes(self) -> Vector:
        """`[pools]`."""
        return np.array([pool.capacity_bytes for pool in self.pools])


class _Load:
    """Seconds per unit on named resources, for one phase; resources appear as they are first used."""

    def __init__(self, num_ranks: int, keeps_all: bool) -> None:
        self._num_ranks, self._keeps_all = num_ranks, keeps_all
        self._columns: dict[str, Matrix] = {}
        self._base: dict[str, float] = {}
        self._bursts: dict[str, float] = {}

    def add(self, resource: str, rank: int, quantity: str, seconds: float) -> None:
        """One unit of `quantity` on `rank` of any replica keeps `resource` busy for so long."""
        column = self._columns.setdefault(resource, np.zeros((self._num_ranks, len(QUANTITIES))))
        column[rank % self._num_ranks, QUANTITIES.index(quantity)] += seconds

    def add_path(self, path: Sequence[Edge], rank: int, quantity: str, units: float = 1.0) -> None:
        for edge in path:
            self.add(edge.name, rank, quantity, units / edge.bandwidth_bytes_per_s)
            self._bursts[edge.name] = edge.burst_s

    def add_base(self, path: Sequence[Edge], num_bytes: float) -> None:
        for edge in path:
            self._columns.setdefault(edge.name, np.zeros((self._num_ranks, len(QUANTITIES))))
            self._base[edge.name] = self._base.get(edge.name, 0.0) + num_bytes / edge.bandwidth_bytes_per_s
            self._bursts[edge.name] = edge.burst_s

    def shaped(self, other: "_Load") -> None:
        """Adds what another load asks of cards with bursts."""
        for name, burst_s in other._bursts.items():
            if burst_s:
                self._columns[name] = self._columns.get(name, 0.0) + other._columns[name]
                self._base[name] = self._base.get(name, 0.0) + other._base.get(name, 0.0)

    def phase(self, name: str, fixed_s: float = 0.0, bursts: float = 1.0) -> Phase:
        """`bursts`: that each shaped card has gathered for this phase."""
        names = list(self._columns)
        if not names:
            return Phase(name, (), (), np.zeros((self._num_ranks, 0, 0)), np.zeros(0), fixed_s)
        columns = np.stack([self._columns[resource] for resource in names], axis=-1)
        base = np.array([self._base.get(resource, 0.0) - bursts * self._bursts.get(resource, 0.0) for resource in names])
        if self._keeps_all:
            return Phase(name, tuple(names), tuple(range(len(QUANTITIES))), columns, base, fixed_s)
        used = tuple(np.flatnonzero(columns.any(axis=(0, 2))).tolist())
        weights = columns[:, list(used)]
        kept = _undominated(np.concatenate([weights.reshape(-1, len(names)), base[None]]))
        return Phase(name, tuple(names[index] for index in kept), used, weights[:, :, kept], base[kept], fixed_s)


def _undominated(columns: Matrix) -> list[int]:
    """Returns the columns that can be the largest: those that no other one exceeds or equals in every entry.

    Most links never count, because one in series with them is slower.
    """
    order = np.argsort(-columns.sum(axis=0), kind="stable")
    kept: list[int] = []
    tall = np.empty((columns.shape[1], columns.shape[0]))
    for index in order:
        column = columns[:, index]
        if column.any() and not (tall[: len(kept)] >= column * (1 - 1e-9)).all(axis=1).any():
            tall[len(kept)] = column
            kept.append(int(index))
    return sorted(kept)


class _Builder:
    """Walks over ranks and routes once and fills the phases."""

    def __init__(
        self, routes: Routes, setup: StepSetup, coefficients: Coefficients, threads: float, queue_depth: int, keeps_all: bool
    ) -> None:
        self.routes, self.setup, self.coefficients = routes, setup, coefficients
        self._threads, self._queue_depth, self._keeps_all = threads, queue_depth, keeps_all
        self._hosts = routes.topology.hosts
        self._on_device = bool(self._hosts[0].devices)
        self._numa = {f"{host.name}/{node.name}": node for host in self._hosts for node in host.numa_nodes}
        self._devices = {f"{host.name}/{device.name}": device for host in self._hosts for device in host.devices}
        self._sustained, self._has_bursts = self._load(), any(nic.burst_bytes for host in self._hosts for nic in host.nics)
        self._rank_nodes = {site.node for site in routes.sites}
        self._ranks_on_numa: dict[str, int] = {}
        for site in routes.sites:
            self._ranks_on_numa[site.numa] = self._ranks_on_numa.get(site.numa, 0) + 1

    def phases(self) -> list[Phase]:
        """All phases, in the order of a step."""
        outputs = {
            "output_bytes": self._group,
            "summed_output_bytes": self._group,
            "host_output_bytes": self._host_group,
            "lane_output_bytes": self._lane,
        }
        summed = {} if self._on_device else dict.fromkeys(("summed_output_bytes", "host_output_bytes"), GLOO_REDUCE_SCATTER_SENDS)
        own = self.coefficients
        loop_s = own.step_s + own.feature_s * self.setup.num_features + own.sample_s * self.setup.batch_size
        phases = [
            self._load().phase("loop", self._on_cores_s(loop_s)),
            self._exchange("ids", {"id_bytes": self._group}, towards_owner=True),
            self._compute(
                "lookup",
                {"lookup_ids": own.lookup_id_s, "pooled_bytes": own.pooled_byte_s, "cache_rows": own.cache_row_s},
                "distinct_bytes",
                ("lookup_bytes",),
            ),
            self._exchange("outputs", outputs, towards_owner=False, sends=summed),
            self._load().phase("dense", self._dense_s()),
            self._exchange("gradients", outputs, towards_owner=True),
            self._compute(
                "update",
                {"update_rows": own.update_row_s, "pooled_bytes": own.pooled_byte_s, "tier_rows": own.admit_row_s},
                "update_bytes",
                ("update_bytes", "lookup_bytes"),
            ),
            self._all_reduce(),
            self._load().phase("optimizer", self._on_cores_s(own.optimizer_s + own.parameter_s * self.setup.dense_parameters)),
            self._merge(),
            self._tiers(),
        ]
        return [*phases, self._sustained.phase(LINKS)] if self._has_bursts else phases

    def _load(self) -> _Load:
        return _Load(self.setup.world_size, self._keeps_all)

    def pools(self, dram_bytes_per_host: int | None, ssd_bytes_per_host: int | None) -> list[Pool]:
        """Memory of devices, and DRAM and drives of hosts."""
        pools = []
        for site in self.routes.sites:
            if site.device:
                capacity = self._devices[site.node].memory_bytes * (1 - RESERVED_SHARE)
                pools.append(Pool(f"memory of {site.node}", "device_bytes", capacity, (site.rank % self.setup.world_size,)))
        for index, host in enumerate(self._hosts):
            ranks = tuple(site.rank % self.setup.world_size for site in self.routes.sites if site.host == index)
            disk = sum(drive.capacity_bytes for drive in host.drives) if ssd_bytes_per_host is None else ssd_bytes_per_host
            pools.append(Pool(f"DRAM of {host.name}", "dram_bytes", host.memory_bytes * (1 - RESERVED_SHARE), ranks))
            if dram_bytes_per_host is not None:
                pools.append(Pool(f"DRAM for rows of {host.name}", "row_bytes", dram_bytes_per_host, ranks))
            pools.append(Pool(f"drives of {host.name}", "ssd_bytes", disk, ranks))
        return pools

    # --- who talks to whom, by global rank ---

    def _group(self, rank: int) -> list[int]:
        first = rank - rank % self.setup.world_size
        return [other for other in range(first, first + self.setup.world_size) if other != rank]

    def _host_group(self, rank: int) -> list[int]:
        return [other for other in self._group(rank) if self.routes.sites[other].host == self.routes.sites[rank].host]

    def _lane(self, rank: int) -> list[int]:
        sites = self.routes.sites
        here = sites[rank]
        return [other for other in self._group(rank) if sites[other].host != here.host and sites[other].local_rank == here.local_rank]

    def _peers(self, rank: int) -> list[int]:
        """The ranks that hold the same shard in other replicas."""
        return [other for other in range(rank % self.setup.world_size, len(self.routes.sites), self.setup.world_size) if other != rank]

    def _path(self, source: int, target: int) -> list[Edge]:
        return self.routes.between(self.routes.sites[source].node, self.routes.sites[target].node)

    # --- phases ---

    def _exchange(
        self,
        name: str,
        partners: Mapping[str, Callable[[int], list[int]]],
        towards_owner: bool,
        sends: Mapping[str, float] | None = None,
    ) -> Phase:
        """Each quantity travels between its partners once, or as often as `sends` says; each further way to cut tables once more."""
        load = self._load()
        latency = 0.0
        for site in self.routes.sites:
            for quantity, others in partners.items():
                # Many transfers share edges: counted first, so that each edge is written once per rank.
                crossed: dict[str, tuple[Edge, int]] = {}
                for other in others(site.rank):
                    path = self._path(other, site.rank) if towards_owner else self._path(site.rank, other)
                    latency = max(latency, latency_us(path))
                    for edge in path:
                        crossed[edge.name] = (edge, crossed.get(edge.name, (edge, 0))[1] + 1)
                for edge, times in crossed.values():
                    units = times * (sends or {}).get(quantity, 1.0) * self._exchange_factor(edge)
                    load.add_path([edge], site.rank, quantity, units)
        self._sustained.shaped(load)
        collective_s = self._collective_s(latency)
        return replace(load.phase(name, collective_s), again_s=collective_s)

    def _exchange_factor(self, edge: Edge) -> float:
        """How much longer bytes take; edges by which ranks on cores hang on their NUMA node are the library's, not the machine's."""
        is_own = not self._on_device and not self._rank_nodes.isdisjoint(edge.name.split(">"))
        return self.coefficients.exchange_factor if is_own else 1.0

    def _slowdown(self, site: RankSite) -> float:
        """How much longer a rank's own work takes because ranks share cores."""
        return max(1.0, self._ranks_on_numa[site.numa] / self._numa[site.numa].num_cores)

    def _on_cores_s(self, seconds: float) -> float:
        return 0.0 if self._on_device else seconds * max(map(self._slowdown, self.routes.sites))

    def _collective_s(self, latency_us: float, num_ranks: int | None = None) -> float:
        if (num_ranks or self.setup.world_size) == 1:
            return 0.0
        ranks_per_core = max(map(self._slowdown, self.routes.sites))
        own = self._on_cores_s(self.coefficients.collective_s) + self.coefficients.turn_s * (ranks_per_core - 1)
        if self._on_device:
            own = self.coefficients.device_collective_s
        exchange_us = 0.0 if self._on_device else max(host.exchange.latency_us for host in self._hosts)
        return own + (latency_us + exchange_us) * 1e-6

    def _threads_of(self, numa: str) -> float:
        return min(self._threads, self._numa[numa].num_cores / self._ranks_on_numa[numa])

    def _add_cores(self, load: _Load, site: RankSite, quantity: str, seconds: float, threads: float) -> None:
        """`seconds` of one core per unit: a rank alone spreads them over its threads; ranks that want more cores than there are share them.

        A rank with little to do leaves most of its share of the cores to the others: then the sum counts and not the largest part alone.
        But for `STUCK_SHARE` of a phase a rank shares a core with those whom it met there, by chance any of the others.
        """
        num_cores, num_ranks = self._numa[site.numa].num_cores, self._ranks_on_numa[site.numa]
        threads = min(threads, num_cores)
        load.add(f"cores of {site.node}", site.rank, quantity, seconds / threads)
        if num_ranks * threads > num_cores:
            even = (1 - STUCK_SHARE) / num_cores
            met_share = (num_ranks * threads / num_cores - 1) / (num_ranks - 1)
            for other in self.routes.sites:
                if other.numa == site.numa:
                    stuck = STUCK_SHARE / threads * (1.0 if other.rank == site.rank else met_share)
                    load.add(f"shared cores of {other.node}", site.rank, quantity, seconds * (even + stuck))

    def _compute(self, name: str, per_unit_s: Mapping[str, float], memory_quantity: str, device_quantities: Sequence[str]) -> Phase:
        """Work of ranks: on cores some time per unit, and memory; on devices the bytes of some quantities."""
        load = self._load()
        own = self.coefficients
        for site in self.routes.sites:
            if site.device:
                device = self._devices[site.node]
                rate = device.gather_bytes_per_s if memory_quantity == "distinct_bytes" else device.bandwidth_bytes_per_s
                for quantity in device_quantities:
                    load.add(f"compute of {site.node}", site.rank, quantity, 1 / rate)
                load.add(f"compute of {site.node}", site.rank, "shards", own.device_shard_s)
                continue
            node = self._numa[site.numa]
            for quantity, seconds in per_unit_s.items():
                self._add_cores(load, site, quantity, seconds, self._threads)
            self._add_cores(load, site, "lookup_bytes", own.cached_byte_s, self._threads)
            self._add_cores(load, site, memory_quantity, own.memory_factor / node.gather_bytes_per_s, self._threads)
            self._add_cores(load, site, "shards", own.core_shard_s, 1.0)
            load.add(f"memory of {site.numa}", site.rank, memory_quantity, 1 / node.bandwidth_bytes_per_s)
        return load.phase(name)

    def _dense_s(self) -> float:
        flops = self.setup.flops_per_sample * self.setup.batch_size
        if self._on_device:
            return flops / self.coefficients.device_flops_per_s
        threads = min(self._threads_of(site.numa) for site in self.routes.sites)
        activations = self.setup.activations_per_sample * self.setup.batch_size
        return (flops * self.coefficients.flop_s + activations * self.coefficients.activation_s) / threads

    def _all_reduce(self) -> Phase:
        """A ring over the ranks of a replica: each byte leaves every rank 2 (W - 1) / W times."""
        load = self._load()
        size = self.setup.world_size
        latency = 0.0
        if size > 1:
            times = 2 * (size - 1) / size
            for site in self.routes.sites:
                neighbour = site.rank - site.rank % size + (site.rank + 1) % size
                path = self._path(site.rank, neighbour)
                latency = max(latency, latency_us(path))
                load.add_path(path, site.rank, "all_reduce_bytes", times)
                load.add_base(path, times * self.setup.dense_parameters * VALUE_BYTES)
        self._sustained.shaped(load)
        return load.phase("all_reduce", self._collective_s(latency) if size > 1 and self.setup.dense_parameters else 0.0)

    def _merge(self) -> Phase:
        """A merge round, its time spread over the k steps between two."""
        load = self._load()
        k, replicas = self.setup.k, self.setup.num_replicas
        if not k or replicas < 2:
            return load.phase("merge")
        dense = self.setup.dense_parameters * VALUE_BYTES * 3 / self.setup.world_size  # weights and both moments
        latency = 0.0
        for site in self.routes.sites:
            for peer in self._peers(site.rank):
                path = self._path(site.rank, peer)
                latency = max(latency, latency_us(path))
                load.add_path(path, site.rank, "merge_bytes")
                load.add_base(path, 2 * dense / replicas / k)
            cores = f"cores of {site.node}"
            if site.rank < self.setup.world_size:  # each replica has cores of its own
                load.add(cores, site.rank, "merge_rows", self.coefficients.merge_row_s / self._threads_of(site.numa))
                load.add(cores, site.rank, "merge_tier_rows", self.coefficients.admit_row_s / self._threads_of(site.numa))
            self._add_drives(load, site, "merge_tier_rows", "merge_reads", "merge_read_bytes", "merge_write_bytes")
        self._sustained.shaped(load)
        rounds_s = self._on_cores_s(self.coefficients.merge_round_s) + 2 * self._collective_s(latency, replicas)
        return load.phase("merge", rounds_s / k, bursts=1 / k)

    def _tiers(self) -> Phase:
        load = self._load()
        for site in self.routes.sites:
            if site.device:
                load.add_path(self.routes.between(site.numa, site.node), site.rank, "fetch_bytes")
                load.add_path(self.routes.between(site.node, site.numa), site.rank, "fetch_bytes")
            self._add_drives(load, site, "tier_rows", "drive_reads", "drive_read_bytes", "drive_write_bytes")
        return load.phase(TIERS)

    def _add_drives(self, load: _Load, site: RankSite, rows: str, reads: str, read_bytes: str, write_bytes: str) -> None:
        """Reads and writes on the drives of a rank, and the thread of its row store; the arguments name quantities."""
        host = self._hosts[site.host]
        shares = self.routes.drive_shares(site.rank)
        for drive in host.drives:
            share = shares[drive.name] * self.coefficients.drive_factor
            per_read_s, per_byte_s = drive.read_seconds(self._queue_depth)
            resource, node = f"drive {host.name}/{drive.name}", f"{host.name}/{drive.name}"
            load.add(resource, site.rank, reads, share * per_read_s)
            load.add(resource, site.rank, read_bytes, share * per_byte_s)
            load.add(resource, site.rank, write_bytes, share / drive.write_bytes_per_s)
            load.add_path(self.routes.between(node, site.numa), site.rank, read_bytes, share)
            load.add_path(self.routes.between(site.numa, node), site.rank, write_bytes, share)
        load.add(f"row store of {site.node}", site.rank, rows, self.coefficients.tier_row_s * self._slowdown(site))
