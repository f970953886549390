"""Plans of `TopologyShardingPlanner` against pricing everything, against proven bounds, and against TorchRec's own planner.

Distances are predicted steps under this package's cost model, and for plans beside TorchRec's also under TorchRec's; nothing is trained
here. Times that no plan changes (the loop itself, the dense optimizer) are left out, so that distances are those of what a plan decides.
"""

import argparse
import multiprocessing
import queue
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks._harness import Harness, Spread
from torchrec_kstep.config.schema import OptimConfig, PlannerConfig
from torchrec_kstep.cost import QUANTITIES, AccessCurve, Coefficients, Machine, StepSetup, Table, Tier, shard_work
from torchrec_kstep.cost.calibration import Calibration
from torchrec_kstep.cost.price import price
from torchrec_kstep.planner.derived import torchrec_topology
from torchrec_kstep.planner.options import Wishes, classes_of
from torchrec_kstep.planner.search import Problem, solve
from torchrec_kstep.planner.search.exhaustive import exhaustive, num_assignments
from torchrec_kstep.planner.tables import find_tables
from torchrec_kstep.planner.topology_planner import Job, TopologyShardingPlanner
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.topology import (
    ClusterTopology,
    Device,
    Drive,
    DrivePoint,
    Exchange,
    Host,
    Link,
    Nic,
    NumaNode,
    find_topology,
    load_topology,
)
from torchrec_kstep.torchrec_seam.planning import EmbeddingEnumerator, FixedPercentageStorageReservation, without_replica_warnings
from torchrec_kstep.units import GIB

SEED = 20261201
CASES = ("bad_plans", "gaps", "torchrec", "speed")
# Software without what no plan changes.
DECIDED = Coefficients().having({"step_s": 0.0, "feature_s": 0.0, "sample_s": 0.0, "optimizer_s": 0.0, "parameter_s": 0.0})
STOCK_LIMIT_S = 300.0  # that TorchRec's planner is waited for
NUM_ALONE = 40  # models that are also planned without TorchRec's plan as a start
CALIBRATION = Calibration(DECIDED, 0.0, 0, "", "", {})


def main(argv: list[str] | None = None) -> int:
    """Runs the comparisons that `--case` names, or all."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--case", action="append", choices=CASES)
    chosen, rest = own.parse_known_args(argv)
    cases = chosen.case or CASES
    run = Harness.from_command_line("planner", f"{__doc__} --case: {', '.join(CASES)}.", rest)
    if "bad_plans" in cases:
        bad_plans(run)
    if "gaps" in cases:
        small_instances(run, 10 if run.quick else 120)
        bounded_instances(run, 2 if run.quick else 24)
    if "torchrec" in cases:
        against_torchrec(run, 5 if run.quick else 210)
    if "speed" in cases:
        speed(run)
    return run.finish()


# --- plans that TorchRec's planner gets evidently wrong ---


def bad_plans(run: Harness) -> None:
    """A rank behind an eighth of a link; a table with locality and one without; a cache that must pay for itself."""
    for name, problem, stock in (slow_link(), locality(), cache_that_pays()):
        found, best = solve(problem, max_exhaustive=0).score.step_s, problem.score(exhaustive(problem)).step_s
        stock_s = problem.score(np.array([stock(table, problem) for table in range(problem.num_tables)])).step_s
        case = {"op": "bad_plan", "case": name, "assignments": num_assignments(problem)}
        run.record(case, "step", "ms", 1e3 * found, "exhaustive", 1e3 * best)
        run.record(case, "step", "ms", 1e3 * found, "torchrec_placement", 1e3 * stock_s)


Stock = Callable[[int, Problem], int]


def slow_link() -> tuple[str, Problem, Stock]:
    """Eight tables of 40M x 128 cached on four devices, one of which has an eighth of the link to DRAM."""
    devices = tuple(Device(f"gpu{index}", 40 * GIB, 1.5e12, 9e11) for index in range(4))
    links = tuple(Link(("numa0", device.name), 2e9 if device.name == "gpu3" else 1.6e10, 1.0) for device in devices)
    host = Host("host", (NumaNode("numa0", 900 * GIB, 2e11, 2e10, 64),), Exchange(1e10, 20.0), ("nvswitch",), devices, (), (), links)
    host = replace(host, links=(*links, *(Link(("nvswitch", device.name), 3e11, 0.5) for device in devices)))
    setup = StepSetup(4096, world_size=4, local_world_size=4, kernel="fused")
    machine = Machine.of(ClusterTopology("slow link", (host,)), setup, coefficients=DECIDED)
    tables = [Table(f"t{index}", 40_000_000, 128, AccessCurve.zipf(40_000_000, 0.8), 10.0, 1, 4) for index in range(8)]
    wishes = [Wishes(("table_wise",), ("dram",), cached_rows=8e6)] * len(tables)
    return "slow_host_link", Problem(machine, classes_of(tables, setup, wishes, on_device=True)), lambda table, _: table % 4


def locality() -> tuple[str, Problem, Stock]:
    """Tables A (two Zipf ids) and B (one uniform id); DRAM holds one of them, and a hundredth of the other."""
    setup = StepSetup(16_384, kernel="tiered")
    table_bytes = 2_000_000 * 128 * 4
    machine = Machine.of(_drive_host(8), setup, dram_bytes_per_host=round(1.2 * table_bytes), threads_per_rank=4, coefficients=DECIDED)
    tables = [
        Table("a", 2_000_000, 128, AccessCurve.zipf(2_000_000, 1.3), 2.0),
        Table("b", 2_000_000, 128, AccessCurve.zipf(2_000_000, 0.0), 1.0),
    ]
    wishes = [Wishes(("table_wise",), ("dram", "ssd"), cached_rows=20_000)] * 2
    problem = Problem(machine, classes_of(tables, setup, wishes, on_device=False))

    def stock(table: int, problem: Problem) -> int:
        wanted = "dram" if table == 0 else "ssd"
        return next(index for index, option in enumerate(problem.classes[problem.class_of[table]].options) if option.tier == wanted)

    return "ssd_by_locality", problem, stock


def cache_that_pays() -> tuple[str, Problem, Stock]:
    """A table of 400M x 128 on SSD, cut by rows, with DRAM to spare for its cache."""
    setup = StepSetup(4096, world_size=2, local_world_size=2, kernel="tiered")
    machine = Machine.of(_drive_host(64), setup, coefficients=DECIDED)
    tables = [Table("t", 400_000_000, 128, AccessCurve.zipf(400_000_000, 1.05), 4.0)]
    wishes = [Wishes(("table_wise", "row_wise"), ("ssd",))]

    def stock(table: int, problem: Problem) -> int:
        options = problem.classes[problem.class_of[table]].options
        return next(index for index, option in enumerate(options) if option.sharding == "row_wise" and option.cached_rows == 0)

    return "ssd_cache_size", Problem(machine, classes_of(tables, setup, wishes, on_device=False)), stock


def _drive_host(memory_gib: int, operations_per_s: float = 1.4e5) -> ClusterTopology:
    drive = Drive("ssd0", 10**13, (DrivePoint(4096, 128, operations_per_s), DrivePoint(1 << 20, 128, 2e3)), 2e9)
    node = NumaNode("numa0", memory_gib * GIB, 4e10, 6e9, 8)
    links = (Link(("numa0", "ssd0"), 8e9, 1.0), Link(("numa0", "nic0"), 8e9, 1.0))
    return ClusterTopology(
        "host with a drive", (Host("host", (node,), Exchange(2e9, 80.0), (), (), (Nic("nic0", 1.25e9),), (drive,), links),)
    )


# --- random instances ---


def random_problem(rng: np.random.Generator, num_tables: int, num_ranks: int, max_options: int) -> Problem:
    """Tables of random shapes on one host, whose DRAM holds some of them."""
    topology = _drive_host(1, float(10 ** rng.uniform(4.3, 6)))
    host = topology.hosts[0]
    node = replace(host.numa_nodes[0], memory_bytes=int(rng.uniform(0.1, 2.5) * GIB), gather_bytes_per_s=float(rng.uniform(1e9, 9e9)))
    exchange = Exchange(float(10 ** rng.uniform(8, 10)), 50.0)
    topology = replace(topology, hosts=(replace(host, numa_nodes=(node,), exchange=exchange),))
    setup = StepSetup(int(rng.choice([256, 2048, 8192])), num_ranks, num_ranks, prefetch=bool(rng.integers(4)))
    tables, wishes = [], []
    for index in range(num_tables):
        num_rows = int(10 ** rng.uniform(2.5, 6.7))
        curve = AccessCurve.zipf(num_rows, float(rng.choice([0.0, 0.8, 1.05, 1.4])))
        tables.append(Table(f"t{index}", num_rows, int(rng.choice([16, 32, 64, 128])), curve, float(rng.choice([1, 2, 10])), 1, 64))
        wishes.append(Wishes(("table_wise", "row_wise"), ("dram", "ssd"), cached_rows=round(float(rng.uniform(0, 0.4)) * num_rows)))
    classes = classes_of(tables, setup, wishes, on_device=False)
    assert max(len(group.options) for group in classes) <= max_options
    return Problem(Machine.of(topology, setup, coefficients=DECIDED), classes)


def small_instances(run: Harness, count: int) -> None:
    """At most 5 tables, 3 ranks and 8 options each, against pricing every assignment."""
    rng = np.random.default_rng(SEED)
    gaps: list[float] = []
    while len(gaps) < count:
        problem = random_problem(rng, int(rng.integers(1, 6)), int(rng.integers(1, 4)), 8)
        best = problem.score(exhaustive(problem))
        if best.overflow > 0:
            continue  # nothing fits: there is no plan to compare
        gaps.append(100 * (solve(problem, max_exhaustive=0).score.step_s / best.step_s - 1))
    _record_gaps(run, {"op": "small_instances", "num": count, "max_tables": 5, "max_ranks": 3}, gaps, "exhaustive")


def bounded_instances(run: Harness, count: int) -> None:
    """8 tables on 4 ranks against the bound of the mixed-integer program."""
    rng = np.random.default_rng(SEED + 1)
    gaps: list[float] = []
    while len(gaps) < count:
        solution = solve(random_problem(rng, 8, 4, 10))
        if solution.score.overflow == 0:
            gaps.append(100 * solution.gap)
    _record_gaps(run, {"op": "bounded_instances", "num": count, "tables": 8, "ranks": 4}, gaps, "milp_bound")


def _record_gaps(run: Harness, case: dict[str, object], gaps: list[float], peer: str) -> None:
    run.record({**case, "peer": peer}, "gap_median", "%", Spread.of(gaps))
    run.record({**case, "peer": peer}, "gap_max", "%", max(gaps))


# --- TorchRec's planner ---


def stock_plan(topology: ClusterTopology, module: nn.Module, job: Job, constraints: dict[str, ParameterConstraints]) -> ShardingPlan:
    """What TorchRec plans when it is told all that its own topology has fields for."""
    planner = EmbeddingShardingPlanner(
        topology=torchrec_topology(topology, job.local_world_size),
        batch_size=job.batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.15),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    with without_replica_warnings():
        return planner.plan(module, build_sharders(PlannerConfig(kernel="fused"), OptimConfig(embedding="rowwise_adagrad")))


def priced_plan(plan: ShardingPlan, machine: Machine, setup: StepSetup, tables: dict[str, Table]) -> float:
    """Seconds of a step under this package's cost model."""
    work = np.zeros((machine.num_ranks, len(QUANTITIES)))
    tier: Tier = "device" if machine.on_device else "dram"
    for module_plan in plan.plan.values():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan)
        for name, sharding in module_plan.items():
            ranks = sharding.ranks or []
            shard = shard_work(tables[name], setup, sharding.sharding_type, len(ranks), tier, 0.0, machine.on_device)
            for rank in ranks:
                work[rank] += shard.vector
    return price(machine, work).seconds


def random_model(rng: np.random.Generator, num_tables: int) -> tuple[nn.Module, dict[str, ParameterConstraints]]:
    """Tables as recommendation models have them: many small, few large, some multi-hot."""
    configs, constraints = [], {}
    for index in range(num_tables):
        name = f"t{index}"
        configs.append(
            EmbeddingBagConfig(name=name, feature_names=[f"f{index}"], num_embeddings=int(10 ** rng.uniform(3, 6.8)), embedding_dim=64)
        )
        types = ["table_wise", "row_wise", "column_wise", "table_row_wise"]
        constraints[name] = ParameterConstraints(
            sharding_types=types, compute_kernels=["fused"], pooling_factors=[float(rng.choice([1, 1, 3, 20]))], min_partition=32
        )
    return nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta"))), constraints


class TorchRecCost:
    """What TorchRec's own estimator says of a plan: the longest sum of its shards' times over ranks, as its planner rates plans."""

    def __init__(
        self, topology: ClusterTopology, job: Job, module: nn.Module, constraints: dict[str, ParameterConstraints], sharders: list[Any]
    ) -> None:
        """Enumerates the options of all tables once."""
        derived = torchrec_topology(topology, job.local_world_size)
        options = EmbeddingEnumerator(derived, job.batch_size, constraints).enumerate(module, sharders)
        self._num_ranks = derived.world_size
        self._shards = {(option.name, option.sharding_type, len(option.shards)): option.shards for option in options}

    def seconds(self, plan: ShardingPlan) -> float | None:
        """Returns the rating; None where TorchRec has no option with so many shards."""
        by_rank = np.zeros(self._num_ranks)
        for module_plan in plan.plan.values():
            assert isinstance(module_plan, EmbeddingModuleShardingPlan)
            for name, sharding in module_plan.items():
                ranks = sharding.ranks or []
                shards = self._shards.get((name, sharding.sharding_type, len(ranks)))
                if shards is None:
                    return None
                for rank, shard in zip(ranks, shards, strict=True):
                    by_rank[rank] += shard.perf.total / 1e3
        return float(by_rank.max())


def against_torchrec(run: Harness, count: int) -> None:
    """Random models on random machines: both plans under our cost and under TorchRec's, rows in the fastest memory.

    TorchRec's plan is one of the starts of our search. The first models are also planned without it.
    """
    rng = np.random.default_rng(SEED + 2)
    ratios, alone, under_theirs = [], [], []
    shapes = [("dgx_h100", 1, 8), ("dgx_h100", 2, 8), ("a10_pcie_8", 1, 8), ("two_socket_cpu", 4, 2), ("two_socket_cpu", 1, 4)]
    for index in range(count):
        name, num_hosts, per_host = shapes[index % len(shapes)]
        topology = load_topology(find_topology(name)).with_hosts(num_hosts)
        job = Job(int(rng.choice([1024, 4096])), num_hosts * per_host, per_host, "fused")
        module, constraints = random_model(rng, int(rng.integers(6, 30)))
        if num_hosts == 1:
            for constraint in constraints.values():
                constraint.sharding_types = ["table_wise", "row_wise", "column_wise"]
        sharders = build_sharders(PlannerConfig(kernel="fused"), OptimConfig(embedding="rowwise_adagrad"))
        stock = stock_plan(topology, module, job, constraints)
        planner = TopologyShardingPlanner(topology, job, constraints, calibration=CALIBRATION, known_plans=[stock])
        plan = planner.plan(module, sharders)
        assert planner.placement is not None
        setup = planner.setup(module, 1)
        (configs,) = find_tables(module).values()
        tables = {
            config.name: Table(
                config.name,
                config.num_embeddings,
                config.embedding_dim,
                AccessCurve.zipf(config.num_embeddings, job.zipf_exponent),
                constraints[config.name].pooling_factors[0],
            )
            for config in configs
        }
        theirs = priced_plan(stock, planner.machine(setup), setup, tables)
        ratios.append(theirs / planner.placement.step.seconds)
        rating = TorchRecCost(topology, job, module, constraints, sharders)
        if (rated := rating.seconds(plan)) is not None and (rated_stock := rating.seconds(stock)) is not None:
            under_theirs.append(rated_stock / rated)
        if index < NUM_ALONE:
            unaided = TopologyShardingPlanner(topology, job, constraints, calibration=CALIBRATION)
            unaided.plan(module, sharders)
            assert unaided.placement is not None
            alone.append(theirs / unaided.placement.step.seconds)
    sizes = {"tables": "6..29", "ranks": "4..16", "peer": "torchrec_planner"}
    for cost, found in (("ours", ratios), ("ours_without_their_start", alone), ("torchrec", under_theirs)):
        case = {"op": "against_torchrec", "cost": cost, "num": len(found), **sizes}
        run.record(case, "their_step_over_ours", "x", Spread.of(found))
        run.record(case, "their_step_over_ours_min", "x", min(found))
        run.record(case, "their_step_over_ours_max", "x", max(found))
        run.record(case, "num_ours_slower", "1", float(sum(ratio < 1 - 1e-9 for ratio in found)))


# --- speed ---


def many_tables(num_tables: int, shapes: int) -> tuple[nn.Module, dict[str, ParameterConstraints]]:
    """Tables of so many shapes, table-wise or row-wise."""
    rng = np.random.default_rng(SEED + 3)
    sizes = [int(10 ** rng.uniform(3, 6.5)) for _ in range(shapes)]
    configs = [
        EmbeddingBagConfig(name=f"t{index}", feature_names=[f"f{index}"], num_embeddings=sizes[index % shapes], embedding_dim=64)
        for index in range(num_tables)
    ]
    constraints = {
        config.name: ParameterConstraints(sharding_types=["table_wise", "row_wise"], compute_kernels=["fused"]) for config in configs
    }
    return nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta"))), constraints


def _stock_seconds(num_tables: int, shapes: int, num_hosts: int, results: "multiprocessing.Queue[float]") -> None:
    module, constraints = many_tables(num_tables, shapes)
    topology = load_topology(find_topology("dgx_h100")).with_hosts(num_hosts)
    begin = time.perf_counter()
    stock_plan(topology, module, Job(4096, 8 * num_hosts, 8, "fused"), constraints)
    results.put(time.perf_counter() - begin)


def stock_seconds(num_tables: int, shapes: int, num_hosts: int) -> float | None:
    """Seconds of TorchRec's planner, in a process of its own; None where it takes longer than `STOCK_LIMIT_S`."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[float] = context.Queue()
    process = context.Process(target=_stock_seconds, args=(num_tables, shapes, num_hosts, results), daemon=True)
    process.start()
    try:
        return results.get(timeout=STOCK_LIMIT_S)
    except queue.Empty:
        return None
    finally:
        process.kill()
        process.join()


def speed(run: Harness) -> None:
    """1,000 tables of 200 shapes: our planner, the same again from its plan cache, memory, and TorchRec's planner beside it."""
    num_tables, shapes = (60, 20) if run.quick else (1000, 200)
    module, constraints = many_tables(num_tables, shapes)
    sharders = build_sharders(PlannerConfig(kernel="fused"), OptimConfig(embedding="rowwise_adagrad"))
    for num_hosts in (2,) if run.quick else (2, 16):
        topology = load_topology(find_topology("dgx_h100")).with_hosts(num_hosts)
        job = Job(4096, 8 * num_hosts, 8, "fused")
        case = {"op": "plan_time", "tables": num_tables, "shapes": shapes, "devices": 8 * num_hosts}
        with tempfile.TemporaryDirectory() as folder:
            planner = TopologyShardingPlanner(topology, job, constraints, cache_folder=Path(folder))
            begin = time.perf_counter()
            planner.plan(module, sharders)
            ours = time.perf_counter() - begin
            placement = planner.placement
            assert placement is not None
            begin = time.perf_counter()
            planner.place(module, find_tables(module), sharders)
            found_again = time.perf_counter() - begin
            begin = time.perf_counter()
            planner.plan(module, sharders)
            emitted_again = time.perf_counter() - begin
        theirs = stock_seconds(num_tables, shapes, num_hosts)
        peer = "torchrec_planner" if theirs is not None else f"torchrec_planner_not_done_after_{STOCK_LIMIT_S:.0f}_s"
        run.record(case, "time", "s", ours, peer, theirs)
        run.record(case, "gap_bound", "%", 100 * placement.gap)
        run.record(case, "plan_cache_hit", "ms", 1e3 * found_again)
        run.record(case, "plan_cache_hit_and_torchrec_plan", "ms", 1e3 * emitted_again)
        run.record(case, "peak_memory_of_process", "MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    sys.exit(main())
