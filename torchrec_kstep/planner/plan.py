"""Making a plan: constraints from the configuration, TorchRec's planner on rank 0, the result on all ranks."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from torchrec_kstep.config.schema import PlannerConfig
from torchrec_kstep.cost.calibration import Calibration, calibration_file, read_calibration
from torchrec_kstep.errors import PlanError, TopologyError
from torchrec_kstep.planner.checks import check_plan, check_tables, check_tiers, leaves_empty_shards
from torchrec_kstep.planner.emit import KERNELS
from torchrec_kstep.planner.forecast import Forecast
from torchrec_kstep.planner.run_shape import RunShape
from torchrec_kstep.planner.tables import find_tables
from torchrec_kstep.planner.topology_planner import Job, TopologyShardingPlanner
from torchrec_kstep.topology import ClusterTopology, find_topology, load_topology, this_machine
from torchrec_kstep.torchrec_seam.planning import (
    FixedPercentageStorageReservation,
    NoopEmbeddingStats,
    PlannerError,
    cpu_topology,
    without_replica_warnings,
)
from torchrec_kstep.units import format_bytes
from torchrec_kstep.world import World

_MAX_KNOWN = 512  # tables times ranks, up to which TorchRec's planner takes a second or two: its plan is a start of the search
RESERVED_SHARE = 0.15  # of a rank's memory: dense parameters, activations, batches ahead


def make_plan(
    task: nn.Module,
    config: PlannerConfig,
    world: World,
    sharders: list[ModuleSharder[nn.Module]],
    batch_size: int,
    process_group: dist.ProcessGroup,
    ranks_per_host: int | None = None,
    *,
    run: RunShape | None = None,
    tell: Callable[[Forecast], object] | None = None,
) -> ShardingPlan:
    """Plans every `EmbeddingBagCollection` inside `task`. Collective: call on all ranks of `process_group`.

    Rank 0 plans; what it found, a plan or an error, is what every rank returns or raises.

    Args:
        task: the unsharded module, on `cpu` or `meta`.
        config: sharding type, kernel, and types of single tables.
        world: number of ranks and of ranks per host.
        sharders: as `sharding.build_sharders` returns them.
        batch_size: rows per rank and micro-batch, for the cost estimates of `sharding=auto`.
        process_group: all ranks.
        ranks_per_host: ranks that share a host's memory, where that is more than `world` tells: several replicas on a host.
        run: replicas, merge rounds, length and data of the run (engine=topology).
        tell: called on rank 0 with the prediction (engine=topology).

    Raises:
        PlanError: no plan satisfies the constraints or fits into memory, or TorchRec would compute wrong results under it.
    """
    outcome: list[ShardingPlan | PlanError | TopologyError | None] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            outcome[0] = plan_alone(task, config, world, sharders, batch_size, ranks_per_host=ranks_per_host, run=run, tell=tell)
        except (PlanError, TopologyError) as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(process_group, 0), group=process_group)
    found = outcome[0]
    if isinstance(found, PlanError | TopologyError):
        raise found
    assert isinstance(found, ShardingPlan)
    return found


def plan_alone(
    task: nn.Module,
    config: PlannerConfig,
    world: World,
    sharders: list[ModuleSharder[nn.Module]],
    batch_size: int,
    memory_per_rank_bytes: int | None = None,
    ranks_per_host: int | None = None,
    *,
    run: RunShape | None = None,
    tell: Callable[[Forecast], object] | None = None,
) -> ShardingPlan:
    """Plans as `make_plan` does, in this process alone. Not collective.

    Args:
        task: the unsharded module.
        config: as in `make_plan`.
        world: as in `make_plan`; it may describe machines other than this one.
        sharders: as in `make_plan`.
        batch_size: as in `make_plan`.
        memory_per_rank_bytes: what a rank can hold; by default what the sharders' SSD tiers can, or without such this
            machine's DRAM, divided by the ranks per host.
        ranks_per_host: as in `make_plan`.
        run: as in `make_plan`.
        tell: as in `make_plan`.
    """
    tables = find_tables(task)
    check_tables(tables, config)
    tier_bytes = max(getattr(sharder, "tier_bytes_per_rank", 0) for sharder in sharders)
    memory = memory_per_rank_bytes or tier_bytes or _host_memory_bytes() // (ranks_per_host or world.local_world_size)
    if config.engine == "topology":

        def known_plans() -> list[ShardingPlan]:
            """TorchRec's plan, where it takes little time and there is one."""
            num_tables = sum(map(len, tables.values()))
            if world.world_size == 1 or num_tables * world.world_size > _MAX_KNOWN:
                return []
            try:
                return [_torchrec_plan(task, tables, config, world, sharders, batch_size, memory)]
            except PlanError:
                return []  # it knows fewer memories and ways to cut a table

        planner = topology_planner(
            tables, config, world, sharders, batch_size, memory_per_rank_bytes, ranks_per_host, run, known_plans=known_plans
        )
        plan = planner.plan(task, sharders)
        if tell is not None:
            tell(planner.forecast())
        return plan
    plan = _torchrec_plan(task, tables, config, world, sharders, batch_size, memory)
    check_plan(plan, tables)
    check_tiers(plan, tables, sharders, world.world_size)
    return plan


def _torchrec_plan(
    task: nn.Module,
    tables: dict[str, list[EmbeddingBagConfig]],
    config: PlannerConfig,
    world: World,
    sharders: list[ModuleSharder[nn.Module]],
    batch_size: int,
    memory: int,
) -> ShardingPlan:
    """Plans with TorchRec's planner for ranks of `memory` bytes each.

    Raises:
        PlanError: it finds no plan.
    """
    copies = max(getattr(sharder, "copies_per_weight", 1) for sharder in sharders)
    planner = EmbeddingShardingPlanner(
        topology=cpu_topology(world.world_size, world.local_world_size, memory // copies),
        batch_size=batch_size,
        constraints=_constraints(tables, config, world),
        storage_reservation=FixedPercentageStorageReservation(RESERVED_SHARE),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    try:
        with without_replica_warnings():
            plan = planner.plan(task, sharders)
    except (PlannerError, RuntimeError, ValueError) as error:
        raise PlanError(_explain(error, tables, world, memory, copies)) from error
    _set_kernel(plan, KERNELS[config.kernel])
    return plan


def topology_planner(
    tables: Mapping[str, Sequence[EmbeddingBagConfig]],
    config: PlannerConfig,
    world: World,
    sharders: Sequence[ModuleSharder[nn.Module]],
    batch_size: int,
    memory_per_rank_bytes: int | None = None,
    ranks_per_host: int | None = None,
    run: RunShape | None = None,
    *,
    known_plans: Callable[[], Sequence[ShardingPlan]] = list,
) -> TopologyShardingPlanner:
    """Returns the planner that knows the machines, set up as `plan_alone` uses it.

    Raises:
        TopologyError: the topology of the configuration has too few hosts, or devices, on which nothing is trained yet.
    """
    run = run or RunShape()
    per_host = ranks_per_host or world.local_world_size
    has_ssd = any(getattr(sharder, "tier_bytes_per_rank", 0) for sharder in sharders)
    paths = next((sharder.ssd_paths for sharder in sharders if has_ssd and hasattr(sharder, "ssd_paths")), ())
    topology = _topology(config.topology, run.num_hosts or world.num_hosts, paths)
    row_bytes = next((sharder.cache_bytes_per_host for sharder in sharders if has_ssd and hasattr(sharder, "cache_bytes_per_host")), None)
    ssd_bytes = max(getattr(sharder, "tier_bytes_per_rank", 0) for sharder in sharders) * per_host
    job = Job(
        batch_size=batch_size,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        kernel=config.kernel,
        k=run.k,
        num_replicas=run.num_replicas or max(1, per_host // world.local_world_size),
        merge_weight_bytes=run.merge_weight_bytes,
        num_steps=run.num_steps,
        threads_per_rank=torch.get_num_threads(),
        dram_bytes_per_host=row_bytes if memory_per_rank_bytes is None else int(memory_per_rank_bytes * per_host * (1 - RESERVED_SHARE)),
        ssd_bytes_per_host=ssd_bytes,
        prefetch=run.prefetch,
    )
    folder = Path(config.plan_cache) if config.plan_cache else None
    calibration = calibration_of(config, topology)
    return TopologyShardingPlanner(
        topology,
        job,
        topology_constraints(tables, config),
        run.usage(),
        calibration=calibration,
        cache_folder=folder,
        known_plans=known_plans,
    )


def calibration_of(config: PlannerConfig, topology: ClusterTopology) -> Calibration | None:
    """Reads the calibration that the configuration names, or else the one beside its topology file, if there is one.

    Raises:
        TopologyError: it is damaged, or belongs to other machines.
    """
    if config.calibration:
        return read_calibration(Path(config.calibration).expanduser(), topology)
    if not config.topology:
        return None
    file = calibration_file(find_topology(config.topology))
    return read_calibration(file, topology) if file.is_file() else None


def _topology(name_or_file: str, num_hosts: int, ssd_paths: Sequence[str]) -> ClusterTopology:
    """The machines of a run: described in a file, or this one, as many times as there are hosts."""
    if not name_or_file:
        return this_machine(ssd_paths, num_hosts)
    topology = load_topology(find_topology(name_or_file))
    if any(host.devices for host in topology.hosts):
        raise TopologyError(
            f"planner.topology={name_or_file} describes ranks on devices, and runs compute on CPUs so far: choose another topology; "
            "`python -m torchrec_kstep.plan --topology` plans for such machines"
        )
    return topology.with_hosts(num_hosts)


def topology_constraints(tables: Mapping[str, Sequence[EmbeddingBagConfig]], config: PlannerConfig) -> dict[str, ParameterConstraints]:
    """What the configuration allows each table; a table that may be sharded as the planner likes has no entry."""
    constraints = {}
    for table in (table for configs in tables.values() for table in configs):
        wanted = config.tables.get(table.name, config.sharding)
        if wanted != "auto":
            constraints[table.name] = ParameterConstraints(sharding_types=[wanted])
    return constraints


def _constraints(tables: dict[str, list[EmbeddingBagConfig]], config: PlannerConfig, world: World) -> dict[str, ParameterConstraints]:
    """Allows each table its types; the planner chooses among them.

    The planner takes the dense kernel for replicated tables only and knows no cost of a kernel that is not its own, so
    sharded tables are planned as fused and get their kernel afterwards.
    """
    constraints = {}
    for configs in tables.values():
        has_mean = any(table.pooling == PoolingType.MEAN for table in configs)
        for table in configs:
            wanted = config.tables.get(table.name, config.sharding)
            constraints[table.name] = ParameterConstraints(
                sharding_types=_automatic_types(table.num_embeddings, config.kernel, has_mean, world) if wanted == "auto" else [wanted],
                compute_kernels=["fused", "dense"] if config.kernel == "dense" else ["fused"],
                min_partition=_column_shard_dim(table.embedding_dim, world.world_size)
                if wanted == ShardingType.COLUMN_WISE.value
                else None,
                feature_names=list(table.feature_names),
            )
    return constraints


def _set_kernel(plan: ShardingPlan, kernel: str) -> None:
    """Writes the kernel into every table of `plan`."""
    for module_plan in plan.plan.values():
        if isinstance(module_plan, EmbeddingModuleShardingPlan):
            for sharding in module_plan.values():
                sharding.compute_kernel = kernel


def _automatic_types(num_rows: int, kernel: str, has_mean: bool, world: World) -> list[str]:
    """Returns the types that `auto` may give a table: all but those that `checks.check_plan` would refuse."""
    if kernel == "tiered":  # column shards would look up and store every row once per shard
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value] + [ShardingType.TABLE_ROW_WISE.value] * (world.num_hosts > 1)
    types = [ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value]
    if kernel == "dense":
        types.append(ShardingType.DATA_PARALLEL.value)
    is_fused = kernel == "fused"
    if not has_mean and not (is_fused and leaves_empty_shards(num_rows, world.world_size)):
        types.append(ShardingType.ROW_WISE.value)
    if not has_mean and world.num_hosts > 1 and not (is_fused and leaves_empty_shards(num_rows, world.local_world_size)):
        types.append(ShardingType.TABLE_ROW_WISE.value)
    return types


def _column_shard_dim(dim: int, world_size: int) -> int:
    """Returns the narrowest shard that is a multiple of 4 columns, divides `dim`, and gives each rank at most one."""
    widths = [width for width in range(4, dim + 1, 4) if dim % width == 0 and dim // width <= world_size]
    return widths[0] if widths else dim


def _host_memory_bytes() -> int:
    """Returns the DRAM of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _explain(error: Exception, tables: dict[str, list[EmbeddingBagConfig]], world: World, memory_per_rank_bytes: int, copies: int) -> str:
    """Says what was asked of the planner, and the largest table, in front of the planner's own words."""
    sizes = {table.name: 4 * table.num_embeddings * table.embedding_dim for configs in tables.values() for table in configs}
    largest = max(sizes, key=lambda name: sizes[name])
    total = sum(sizes.values())
    usable = int(memory_per_rank_bytes * (1 - RESERVED_SHARE))
    return (
        f"no plan for {len(sizes)} tables with weights of {format_bytes(total)} ({format_bytes(copies * total)} with gradients and "
        f"optimizer states) on {world.world_size} ranks of {format_bytes(memory_per_rank_bytes)} "
        f"({format_bytes(usable)} of it for tables); the largest table is {largest!r} with weights of {format_bytes(sizes[largest])}. "
        "More ranks, fewer rows or columns, a smaller train.batch_size, another optimizer, or planner.sharding=row_wise may help. "
        f"The planner says: {' '.join(str(error).split())}"
    )
