"""`TopologyShardingPlanner`: from a module and a description of machines to an ordinary `ShardingPlan` with its prediction."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_kstep._version import __version__
from torchrec_kstep.config.suggest import did_you_mean
from torchrec_kstep.cost import AccessCurve, Coefficients, Machine, StepSetup, Table
from torchrec_kstep.cost.calibration import Calibration
from torchrec_kstep.cost.price import price
from torchrec_kstep.cost.work import SLOT_OVERHEAD_BYTES
from torchrec_kstep.errors import PlanError, TopologyError
from torchrec_kstep.planner.checks import check_kernels, check_plan, check_tiers
from torchrec_kstep.planner.emit import sharding_plan
from torchrec_kstep.planner.forecast import Forecast, forecast
from torchrec_kstep.planner.known_plans import known_places, start_of, with_places
from torchrec_kstep.planner.misfit import misfit_text
from torchrec_kstep.planner.options import Wishes, classes_of
from torchrec_kstep.planner.placement import PlacedTable, Placement, PoolUse
from torchrec_kstep.planner.plan_cache import PlanCache
from torchrec_kstep.planner.search import Problem, Solution, solve
from torchrec_kstep.planner.tables import find_tables, fusion_of, wishes_of
from torchrec_kstep.planner.traces import Usage
from torchrec_kstep.topology import ClusterTopology

DEFAULT_ZIPF_EXPONENT = 1.05


@dataclass(frozen=True)
class Job:
    """What is to be run, as far as a plan depends on it.

    Attributes:
        batch_size: rows of data per rank.
        world_size: ranks that share one replica.
        local_world_size: of them, on one host.
        kernel: "dense", "fused" or "tiered".
        k: steps between merge rounds; 0 for one replica.
        num_replicas: whole copies of the model.
        merge_weight_bytes: sent per weight in a merge round.
        num_steps: of the whole run, which bound the rows that will ever be touched; 0: without end.
        threads_per_rank: cores that a rank computes with.
        dram_bytes_per_host: DRAM for rows, indexes not counted; None: what a host has, without a reserve.
        ssd_bytes_per_host: what rows on drives must fit into; None: what the drives hold; 0: no rows go there.
        prefetch: whether rows come up ahead.
        zipf_exponent: of tables without a curve of their own.
    """

    batch_size: int
    world_size: int = 1
    local_world_size: int = 1
    kernel: str = "tiered"
    k: int = 0
    num_replicas: int = 1
    merge_weight_bytes: float = 4.0
    num_steps: int = 0
    threads_per_rank: float = 1.0
    dram_bytes_per_host: int | None = None
    ssd_bytes_per_host: int | None = None
    prefetch: bool = True
    zipf_exponent: float = DEFAULT_ZIPF_EXPONENT


class TopologyShardingPlanner(ShardingPlanner):  # type: ignore[misc]  # TorchRec carries no type information
    """Places tables by what a step will take on a known machine.

    It stands where TorchRec's `EmbeddingShardingPlanner` does and honours its `ParameterConstraints`, but searches by itself: upstream
    prices each option before it has ranks, which cannot tell a slow rank from a fast one, and places tables one proposal at a time.
    The reasons are in `docs/planner.md`.

    Attributes:
        placement: of the last plan made here, with its prediction; None before, and on ranks that received their plan.
    """

    def __init__(
        self,
        topology: ClusterTopology,
        job: Job,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        usage: Usage | None = None,
        calibration: Calibration | None = None,
        cache_folder: Path | None = None,
        callbacks: Sequence[Callable[[Placement], None]] = (),
        known_plans: Sequence[ShardingPlan] | Callable[[], Sequence[ShardingPlan]] = (),
    ) -> None:
        """Keeps what plans are made from.

        Args:
            topology: the machines.
            job: ranks, replicas, batch, kernel, memory.
            constraints: by table, as TorchRec's planner takes them.
            usage: how often which rows are asked for, by table; others follow `job.zipf_exponent`.
            calibration: coefficients of the software that were fitted to runs; None: the defaults.
            cache_folder: where plans are kept; the same task on the same machines is then planned once.
            callbacks: called with each placement that was made or found.
            known_plans: of the same task on the same ranks, e.g. TorchRec's: the search starts from them too, so what it finds is not
                predicted to be slower than any of them whose rows rest in the highest tier and fit. A function is called when a plan is
                searched for and not when it is found in the cache: the same task must give the same plans.
        """
        self.topology, self.job = topology, job
        self.constraints = dict(constraints or {})
        self.placement: Placement | None = None
        self._usage = usage or Usage()
        self._priced: tuple[StepSetup, list[Table]] | None = None
        self._calibration = calibration
        self._coefficients = Coefficients() if calibration is None else calibration.coefficients
        self._cache = None if cache_folder is None else PlanCache(cache_folder)
        self._callbacks = tuple(callbacks)
        self._known_plans = known_plans if callable(known_plans) else tuple(known_plans)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plans in this process alone.

        Raises:
            PlanError: a constraint cannot be met or names no table, or the tables do not fit: which, where, by how much, and what would.
            TopologyError: the machines do not take the ranks.
        """
        tables = find_tables(module)
        placement = self.place(module, tables, sharders)
        plan = sharding_plan(placement, "cuda" if self.topology.hosts[0].devices else "cpu")
        check_plan(plan, tables)
        check_kernels(plan, sharders)
        check_tiers(plan, tables, sharders, self.job.world_size)
        self.placement = placement
        for callback in self._callbacks:
            callback(placement)
        return plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on rank 0; the plan, or the error, is what every rank of `pg` (default: all) returns or raises. Collective."""
        group = pg or dist.GroupMember.WORLD
        assert group is not None, "there is no process group"
        outcome: list[ShardingPlan | PlanError | TopologyError | None] = [None]
        if dist.get_rank(group) == 0:
            try:
                outcome[0] = self.plan(module, sharders or [])
            except (PlanError, TopologyError) as error:
                outcome[0] = error
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
        if isinstance(outcome[0], PlanError | TopologyError):
            raise outcome[0]
        return outcome[0]

    def place(
        self, module: nn.Module, tables: Mapping[str, Sequence[EmbeddingBagConfig]], sharders: Sequence[ModuleSharder[nn.Module]]
    ) -> Placement:
        """As `plan`, but returns the placement, and keeps nothing."""
        self._check_constraints(tables)
        fusion = fusion_of(sharders, self.job.kernel)
        setup = self.setup(module, fusion.copies_per_weight)
        named = [(path, config) for path, configs in tables.items() for config in configs]
        zipf = cache(lambda num_rows: AccessCurve.zipf(num_rows, self.job.zipf_exponent))  # tables of one size share their curve
        priced = [self._table(config, fusion.state_bytes(config.embedding_dim), zipf) for _, config in named]
        self._priced = (setup, priced)
        wishes = [self._wishes(path, config, tables, sharders) for path, config in named]
        known = [] if callable(self._known_plans) else [known_places(plan, named) for plan in self._known_plans]
        if known:  # equal tables with different known places stay alike: each may take the places of all
            wishes = with_places(priced, wishes, known)
        key = self._key(setup, named, priced, wishes)
        if self._cache is not None and (kept := self._cache.read(key)) is not None:
            return kept
        if callable(self._known_plans) and (known := [known_places(plan, named) for plan in self._known_plans()]):
            wishes = with_places(priced, wishes, known)
        machine = self.machine(setup)
        if _has_room_on_top(machine, priced):
            wishes = [wish if wish.cached_rows is not None else replace(wish, tiers=wish.tiers[:1]) for wish in wishes]
        problem = Problem(machine, classes_of(priced, setup, wishes, machine.on_device))
        solution = solve(problem, starts=[start_of(problem, places) for places in known])
        if solution.score.overflow > 0:
            raise PlanError(misfit_text(problem, solution, priced, self.topology, self.job.kernel))
        placement = self._placement(key, named, priced, problem, solution)
        if self._cache is not None:
            self._cache.write(placement)
        return placement

    def setup(self, module: nn.Module, copies_per_weight: int) -> StepSetup:
        """What a step of `module` is; its parameters outside of tables make up the dense part, its linear layers the activations."""
        tables = {id(parameter) for name, parameter in module.named_parameters() if "embedding_bags." in name}
        dense = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in tables)
        job = self.job
        return StepSetup(
            batch_size=job.batch_size,
            world_size=job.world_size,
            local_world_size=job.local_world_size,
            kernel=job.kernel,  # type: ignore[arg-type]  # checked where kernels are looked up
            dense_passes=2 * copies_per_weight,
            dense_copies=copies_per_weight,
            k=job.k,
            num_replicas=job.num_replicas,
            merge_weight_bytes=job.merge_weight_bytes,
            num_steps=job.num_steps,
            dense_parameters=dense,
            flops_per_sample=6.0 * dense,
            num_features=sum(config.num_features() for configs in find_tables(module).values() for config in configs),
            activations_per_sample=float(sum(layer.in_features + layer.out_features for layer in _linear_layers(module))),
            prefetch=job.prefetch,
        )

    def forecast(self) -> Forecast:
        """What the last plan made here gives each rank to do, for comparing it with what is measured.

        Raises:
            PlanError: nothing was planned here.
        """
        if self._priced is None or self.placement is None:
            raise PlanError("nothing was planned here yet, so nothing is forecast: call plan() first")
        setup, tables = self._priced
        made = forecast(self.topology, setup, self.job.threads_per_rank, tables, self.placement, self._coefficients)
        return made if self._calibration is None else replace(made, calibration=self._calibration.told)

    def machine(self, setup: StepSetup) -> Machine:
        """The machines in numbers."""
        return Machine.of(
            self.topology,
            setup,
            threads_per_rank=self.job.threads_per_rank,
            dram_bytes_per_host=self.job.dram_bytes_per_host,
            ssd_bytes_per_host=self.job.ssd_bytes_per_host,
            coefficients=self._coefficients,
        )

    def _table(self, config: EmbeddingBagConfig, state_bytes: int, zipf: Callable[[int], AccessCurve]) -> Table:
        constraint = self.constraints.get(config.name)
        curve = self._usage.curves.get(config.name)
        if curve is None:
            curve = zipf(config.num_embeddings)
        counted = self._usage.ids_per_sample.get(config.name)
        if counted is not None and (constraint is None or list(constraint.pooling_factors) == [1.0]):
            return Table(config.name, config.num_embeddings, config.embedding_dim, curve, counted, config.num_features(), state_bytes)
        factors = [1.0] * config.num_features() if constraint is None else list(constraint.pooling_factors)
        if len(factors) == 1:
            factors *= config.num_features()
        poolings = (constraint.num_poolings if constraint is not None else None) or [1.0] * len(factors)
        ids = sum(factor * pooling for factor, pooling in zip(factors, poolings, strict=True))
        return Table(config.name, config.num_embeddings, config.embedding_dim, curve, ids, config.num_features(), state_bytes)

    def _wishes(
        self,
        path: str,
        config: EmbeddingBagConfig,
        tables: Mapping[str, Sequence[EmbeddingBagConfig]],
        sharders: Sequence[ModuleSharder[nn.Module]],
    ) -> Wishes:
        has_drives = bool(self.topology.hosts[0].drives) and self.job.ssd_bytes_per_host != 0
        return wishes_of(
            config,
            self.constraints.get(config.name),
            tables[path],
            sharders,
            kernel=self.job.kernel,
            on_device=bool(self.topology.hosts[0].devices),
            has_drives=has_drives,
            world_size=self.job.world_size,
            local_world_size=self.job.local_world_size,
        )

    def _check_constraints(self, tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> None:
        names = dict.fromkeys(config.name for configs in tables.values() for config in configs)
        if not names:
            raise PlanError("the task holds no EmbeddingBagCollection: there is nothing to shard")
        unknown = [name for name in self.constraints if name not in names]
        if unknown:
            raise PlanError(f"constraints name a table {unknown[0]!r} that the task does not have; {did_you_mean(unknown[0], list(names))}")

    def _key(
        self, setup: StepSetup, named: Sequence[tuple[str, EmbeddingBagConfig]], priced: Sequence[Table], wishes: Sequence[Wishes]
    ) -> str:
        """A hash over everything that the plan depends on."""
        digest = hashlib.sha256()
        curves: dict[int, bytes] = {}
        parts: list[object] = [__version__, self.topology.fingerprint, self.job, setup, self._coefficients]
        parts.append(callable(self._known_plans))
        for (path, _), table, wish in zip(named, priced, wishes, strict=True):
            curve = curves.setdefault(
                id(table.curve), hashlib.sha256(table.curve.num_rows.tobytes() + table.curve.probability.tobytes()).digest()
            )
            parts.append((path, table, curve, wish))
        for part in parts:
            digest.update(repr(part).encode())
        return digest.hexdigest()[:32]

    def _placement(
        self,
        key: str,
        named: Sequence[tuple[str, EmbeddingBagConfig]],
        priced: Sequence[Table],
        problem: Problem,
        solution: Solution,
    ) -> Placement:
        work, memory = problem.work_of(solution.choice)
        placed = []
        for index, ((path, config), table) in enumerate(zip(named, priced, strict=True)):
            option = problem.classes[problem.class_of[index]].options[solution.choice[index]]
            rows_share = 1 / len(option.ranks) if option.sharding in ("row_wise", "table_row_wise") else 1.0
            columns_share = 1 / len(option.ranks) if option.sharding == "column_wise" else 1.0
            record = table.record_bytes * columns_share
            is_top = option.tier == ("device" if problem.machine.on_device else "dram")
            cached = table.num_rows if is_top else option.cached_rows
            placed.append(
                PlacedTable(
                    path=path,
                    name=config.name,
                    num_rows=table.num_rows,
                    dim=table.dim,
                    sharding=option.sharding,
                    ranks=option.ranks,
                    tier=option.tier,
                    cached_rows=float(cached),
                    cache_bytes=round(cached * rows_share * (record + SLOT_OVERHEAD_BYTES)),
                    hit_rate=table.curve.hit_rate(cached),
                    missed_rows=option.work.num_missed_rows,
                    bytes_per_rank=round(table.num_rows * rows_share * record),
                )
            )
        used = problem.machine.pool_use(memory)
        pools = [PoolUse(pool.name, float(use), pool.capacity_bytes) for pool, use in zip(problem.machine.pools, used, strict=True)]
        gap = solution.gap
        return Placement(
            key=key,
            topology=self.topology.name,
            world_size=self.job.world_size,
            local_world_size=self.job.local_world_size,
            kernel=self.job.kernel,
            k=self.job.k,
            num_replicas=self.job.num_replicas,
            tables=tuple(placed),
            step=price(problem.machine, work),
            pools=tuple(pools),
            method=solution.method,
            gap=gap if gap != float("inf") else -1.0,
        )


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _has_room_on_top(machine: Machine, tables: Sequence[Table]) -> bool:
    """Whether the highest tier holds all tables twice over, so that looking at lower ones would only cost time."""
    memories = ("device_bytes",) if machine.on_device else ("dram_bytes", "row_bytes")
    sizes = [table.num_rows * (table.record_bytes + SLOT_OVERHEAD_BYTES) for table in tables]
    for memory in memories:
        pools = [pool.capacity_bytes for pool in machine.pools if pool.memory == memory]
        if pools and (2 * sum(sizes) > sum(pools) or 2 * max(sizes) > min(pools)):
            return False
    return True
