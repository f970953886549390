"""Tables, what may be done with each, and the price of doing it to all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_kstep.cost import MEMORIES, QUANTITIES, Machine, ShardWork
from torchrec_kstep.cost.machine import BESIDE, EXCHANGE_COLUMNS, LINKS, TIERS, Matrix
from torchrec_kstep.cost.work import Sharding, Tier, Vector

_CACHED_BYTES = 600 << 20  # loads of options kept for reuse
_TIE_SHARE = 1e-4  # weight of the mean load beside the longest: of two placements as fast, the one with less work


@dataclass(frozen=True)
class Option:
    """One way to place a table.

    Attributes:
        sharding: how it is cut.
        ranks: of the shards, in order; a rank of one replica.
        tier: where rows rest.
        cached_rows: of the whole table, in the tier above.
        work: of each shard.
    """

    sharding: Sharding
    ranks: tuple[int, ...]
    tier: Tier
    cached_rows: float
    work: ShardWork = field(repr=False, compare=False)


@dataclass(frozen=True)
class TableClass:
    """Tables that are alike in all that counts, and their options.

    Attributes:
        tables: their indexes.
        options: at least one.
    """

    tables: tuple[int, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Score:
    """A price; smaller is better, overflow first.

    Attributes:
        overflow: bytes that do not fit, each pool's over its capacity, added up.
        step_s: predicted seconds of a step.
        tie_s: breaks ties: a small part of the mean load.
    """

    overflow: float
    step_s: float
    tie_s: float

    @property
    def key(self) -> tuple[float, float]:
        """Orders scores."""
        return (round(self.overflow, 12), self.step_s + self.tie_s)


class Problem:
    """Prices assignments: for each table the index of one option of its class.

    Args:
        machine: where tables are placed.
        classes: every table belongs to one.
    """

    def __init__(self, machine: Machine, classes: Sequence[TableClass]) -> None:
        """Lays out the resources of all phases in one row, and behind them how many tables there are of each way to cut them."""
        self.machine = machine
        self.classes = tuple(classes)
        self.num_tables = sum(len(group.tables) for group in classes)
        self.class_of = np.zeros(self.num_tables, dtype=np.int64)
        for index, group in enumerate(classes):
            self.class_of[list(group.tables)] = index
        self._phases = [phase for phase in machine.phases if phase.resources]
        self._starts = np.cumsum([0] + [len(phase.resources) for phase in self._phases])[:-1]
        self._is_tiers = np.array([phase.name == TIERS for phase in self._phases], dtype=bool)
        self._is_links = np.array([phase.name == LINKS for phase in self._phases], dtype=bool)
        self._is_chain = np.array([phase.name not in BESIDE for phase in self._phases], dtype=bool)
        self._fixed = np.array([phase.fixed_s for phase in self._phases])
        self.fixed_s = sum(phase.fixed_s for phase in machine.phases if not phase.resources)
        self.again_s = sum(phase.again_s for phase in machine.phases)
        bases = [phase.base_s for phase in self._phases]
        self._num_resources = sum(base.size for base in bases)
        self.base_loads: Vector = np.concatenate([*bases, np.zeros(len(EXCHANGE_COLUMNS))])
        self._has_bursts = bool((self.base_loads < 0).any())  # which a phase that needs less than them gets no time back for
        self._mean = np.where(np.arange(self.base_loads.size) < self._num_resources, 1 / max(self._num_resources, 1), 0.0)
        self.capacities = np.maximum(machine.capacities_bytes, 1.0)
        self._cache: dict[int, tuple[Matrix, Matrix]] = {}
        self._cached_bytes = 0

    def tables_of(self, index: int) -> tuple[Matrix, Matrix]:
        """Returns the loads, `[options, resources + EXCHANGES]` in seconds and tables, and the pool use, `[options, pools]` in bytes."""
        known = self._cache.get(index)
        if known is not None:
            return known
        options = self.classes[index].options
        loads = np.zeros((len(options), self.base_loads.size))
        use = np.zeros((len(options), self.capacities.size))
        by_work: dict[int, list[int]] = {}
        for position, option in enumerate(options):
            by_work.setdefault(id(option.work), []).append(position)
        for positions in by_work.values():
            work = options[positions[0]].work
            parts = [phase.loads_by_rank_s(work.vector) for phase in self._phases]
            of_rank = np.concatenate(parts, axis=1) if parts else np.zeros((self.machine.num_ranks, 0))
            use_of_rank = self.machine.pool_use_by_rank(work.memory_vector)
            for position in positions:
                ranks = list(options[position].ranks)
                loads[position, : self._num_resources] = of_rank[ranks].sum(axis=0)
                loads[position, self._num_resources :] = work.vector[EXCHANGE_COLUMNS] > 0
                use[position] = use_of_rank[ranks].sum(axis=0)
        if self._cached_bytes + loads.nbytes <= _CACHED_BYTES:
            self._cache[index] = (loads, use)
            self._cached_bytes += loads.nbytes
        return loads, use

    def totals(self, choice: npt.NDArray[np.int64]) -> tuple[Vector, Vector]:
        """Adds up the loads and the pool use of an assignment."""
        loads, use = self.base_loads.copy(), np.zeros(self.capacities.size)
        for index, group in enumerate(self.classes):
            own_loads, own_use = self.tables_of(index)
            counts = np.bincount(choice[list(group.tables)], minlength=len(group.options))
            loads += counts @ own_loads
            use += counts @ own_use
        return loads, use

    def score(self, choice: npt.NDArray[np.int64]) -> Score:
        """Prices an assignment."""
        loads, use = self.totals(choice)
        step_s, tie_s = self.step_seconds(loads[None])
        return Score(float(self.overflow(use[None])[0]), float(step_s[0]), float(tie_s[0]))

    def step_seconds(self, loads: Matrix, doublings: int = 0) -> tuple[Vector, Vector]:
        """Seconds of a step and the tie breaker for each row of `[n, resources + EXCHANGES]`.

        Args:
            loads: seconds that each resource is busy, and tables of each way to cut them.
            doublings: 0 for the busiest resource of each phase; n for the norm of order 2^n over them, which also counts the others:
                a search that looks at the busiest alone cannot tell a first step towards balance from no step at all.
        """
        if not self._phases:
            return np.full(loads.shape[0], self.fixed_s), np.zeros(loads.shape[0])
        if self._has_bursts:
            loads = np.maximum(loads, 0.0)
        if doublings:
            powers = loads[:, : self._num_resources] * 1e3  # milliseconds, so that high powers stay within range
            for _ in range(doublings):
                np.multiply(powers, powers, out=powers)  # in place: fresh memory for large matrices costs more than the products
            phases = np.add.reduceat(powers, self._starts, axis=1) ** (0.5**doublings) * 1e-3 + self._fixed
        else:
            phases = np.maximum.reduceat(loads[:, : self._num_resources], self._starts, axis=1) + self._fixed
        chain = phases[:, self._is_chain].sum(axis=1) + self.fixed_s
        if self.again_s and not doublings:  # else no table would be the first to be cut in another way, though many together gain by it
            num_ways = (loads[:, self._num_resources :] > 0.5).sum(axis=1)
            chain += self.again_s * np.maximum(num_ways - 1, 0)
        tiers = phases[:, self._is_tiers].sum(axis=1)
        step = np.maximum(chain, tiers) if self.machine.prefetch else chain + tiers
        if self._has_bursts:
            step = np.maximum(step, phases[:, self._is_links].sum(axis=1))
        # Where drives wait on the chain or the chain on drives, the one that is hidden still breaks ties.
        tie = _TIE_SHARE * (loads @ self._mean + np.minimum(chain, tiers))
        return step, tie

    def resource_weights(self, loads: Vector, order: float, tier_share: float | None) -> tuple[Vector, float]:
        """Weights that add up to 1 within each phase, in proportion to a power of the loads, and the fixed seconds that go with them.

        Args:
            loads: how busy each resource is.
            order: of the power.
            tier_share: how much the tiers count beside the chain of the other phases, which then counts for the rest; None: both in full.
        """
        weights = np.zeros_like(loads)
        fixed_s = (1.0 if tier_share is None else 1 - tier_share) * self.fixed_s
        ends = [*self._starts[1:], self._num_resources]
        for start, end, is_tiers, is_links, phase_s in zip(self._starts, ends, self._is_tiers, self._is_links, self._fixed, strict=True):
            if is_links:
                continue  # the chain and the tiers are bound enough
            share = 1.0 if tier_share is None else tier_share if is_tiers else 1 - tier_share
            busy = np.maximum(loads[start:end], 0.0)
            part = (busy / max(float(busy.max()), 1e-300)) ** order
            weights[start:end] = share * part / part.sum() if part.sum() > 0 else share / (end - start)
            fixed_s += share * float(phase_s)
        return weights, fixed_s

    def overflow(self, use: Matrix) -> Vector:
        """Bytes above capacity over capacity, added up over pools, for each row of `[n, pools]`."""
        above: Vector = np.maximum(use / self.capacities - 1.0, 0.0).sum(axis=1)
        return above

    def work_of(self, choice: npt.NDArray[np.int64]) -> tuple[Matrix, Matrix]:
        """Quantities and memory of all ranks, `[ranks, QUANTITIES]` and `[ranks, MEMORIES]`."""
        work = np.zeros((self.machine.num_ranks, len(QUANTITIES)))
        memory = np.zeros((self.machine.num_ranks, len(MEMORIES)))
        for table, position in enumerate(choice):
            option = self.classes[self.class_of[table]].options[position]
            for rank in option.ranks:
                work[rank] += option.work.vector
                memory[rank] += option.work.memory_vector
        return work, memory
