"""Searches against exhaustive pricing on random small problems, and against their own bounds. Layer: unit."""

import numpy as np
import pytest

from torchrec_kstep.cost import AccessCurve, Machine, StepSetup, Table
from torchrec_kstep.cost.machine import EXCHANGE_COLUMNS
from torchrec_kstep.cost.price import price
from torchrec_kstep.planner.options import Wishes, classes_of, rank_sets
from torchrec_kstep.planner.search import Problem, solve
from torchrec_kstep.planner.search.exhaustive import exhaustive, num_assignments
from torchrec_kstep.planner.search.local import complete, improved, rounded
from torchrec_kstep.planner.search.program import solve_program
from torchrec_kstep.topology import ClusterTopology, Drive, DrivePoint, Exchange, Host, Link, Nic, NumaNode
from torchrec_kstep.units import MIB


def random_problem(seed: int, max_tables: int = 4, num_ranks: int = 2, repeats: bool = False, num_hosts: int = 1) -> Problem:
    """Tables of random sizes on hosts with too little DRAM for all of them; several hosts are joined by cards that pass bursts."""
    rng = np.random.default_rng(seed)
    drive = Drive("ssd0", 10**12, (DrivePoint(4096, 128, float(rng.uniform(2e4, 1e6))),), 1e9)
    host = Host(
        "host",
        (NumaNode("numa0", int(rng.uniform(50, 800)) * MIB, 1e10, float(rng.uniform(1e9, 6e9)), 4),),
        Exchange(float(rng.uniform(1e8, 4e9)), 50.0),
        nics=(Nic("nic0", 1e9 if num_hosts == 1 else 1e8, burst_bytes=0.0 if num_hosts == 1 else float(rng.choice([1e4, 2e5, 1e7]))),),
        drives=(drive,),
        links=(Link(("numa0", "nic0"), 1e11, 0.0), Link(("numa0", "ssd0"), 1e11, 0.0)),
    )
    setup = StepSetup(
        int(rng.choice([256, 4096])), world_size=num_ranks, local_world_size=num_ranks // num_hosts, prefetch=bool(rng.integers(2))
    )
    machine = Machine.of(ClusterTopology("c", (host,)).with_hosts(num_hosts), setup)
    tables: list[Table] = []
    for index in range(int(rng.integers(1, max_tables + 1))):
        if repeats and tables and rng.random() < 0.5:
            tables.append(tables[-1])
            continue
        num_rows = int(10 ** rng.uniform(2, 6.3))
        curve = AccessCurve.zipf(num_rows, float(rng.choice([0.0, 1.05, 1.4])))
        tables.append(Table(f"t{index}", num_rows, int(rng.choice([16, 64, 128])), curve, float(rng.choice([1, 5])), 1, 64))
    wishes = [Wishes(("table_wise", "row_wise"), ("dram", "ssd"), cached_rows=round(0.1 * table.num_rows)) for table in tables]
    return Problem(machine, classes_of(tables, setup, wishes, on_device=False))


@pytest.mark.parametrize("seed", range(40))
def test_the_exact_search_finds_what_pricing_everything_finds(seed: int) -> None:
    """Otherwise 'exact' would be a word only."""
    problem = random_problem(seed)
    best = problem.score(exhaustive(problem))
    found = solve_program(problem, integers=True)
    if best.overflow > 0:
        assert found.is_infeasible
        return
    assert found.is_optimal
    assert found.counts is not None
    score = problem.score(rounded(problem, found.counts))
    assert score.overflow == 0
    assert score.step_s == pytest.approx(best.step_s, rel=1e-5)
    assert found.bound_s <= best.step_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_bursts_count_alike_in_prices_searches_and_bounds(seed: int) -> None:
    """A phase that needs less than its burst must get no time back, in no norm and no program."""
    problem = random_problem(seed, num_hosts=2)
    choice = exhaustive(problem)
    best = problem.score(choice)
    if best.overflow > 0:
        return
    assert price(problem.machine, problem.work_of(choice)[0]).seconds == pytest.approx(best.step_s, rel=1e-9)
    loads = problem.totals(choice)[0][None]
    assert problem.step_seconds(loads, doublings=6)[0][0] <= 1.1 * best.step_s, "a high norm is near the busiest resource"
    found = solve(problem, max_exhaustive=0)
    assert found.score.step_s == pytest.approx(best.step_s, rel=1e-5)
    assert found.bound_s <= best.step_s * (1 + 1e-6)
    assert solve_program(problem, integers=True).bound_s <= best.step_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_holds_and_greedy_stays_near(seed: int) -> None:
    problem = random_problem(seed, repeats=True)
    best = problem.score(exhaustive(problem))
    relaxed = solve_program(problem, integers=False)
    greedy = problem.score(improved(problem, complete(problem, np.full(problem.num_tables, -1)), 10))
    if best.overflow > 0:
        assert greedy.overflow >= best.overflow * (1 - 1e-9)
        return
    assert relaxed.bound_s <= best.step_s * (1 + 1e-6)
    assert greedy.step_s <= best.step_s * 2.5 or greedy.overflow > 0
    solution = solve(problem)
    assert solution.score.step_s == pytest.approx(best.step_s, rel=1e-5)
    assert solution.gap <= 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_the_same_problem_has_one_answer(seed: int) -> None:
    """Otherwise a resumed run might be laid out anew for no reason."""
    first, second = (solve(random_problem(seed, max_tables=20, num_ranks=4, repeats=True)) for _ in range(2))
    assert (first.choice == second.choice).all()
    assert first.bound_s == second.bound_s


@pytest.mark.parametrize("seed", range(6))
def test_larger_problems_end_near_their_bound(seed: int) -> None:
    solution = solve(random_problem(1000 + seed, max_tables=40, num_ranks=4, repeats=True))
    if solution.score.overflow == 0:
        assert 0 <= solution.gap < 0.5


@pytest.mark.parametrize("seed", range(10))
def test_problem_and_price_agree(seed: int) -> None:
    """The search adds loads up by table, the report prices quantities by rank: one answer, also where tables are cut in several ways."""
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    choice = np.array([int(rng.integers(len(problem.classes[index].options))) for index in problem.class_of])
    work, memory = problem.work_of(choice)
    assert price(problem.machine, work).seconds == pytest.approx(problem.score(choice).step_s, rel=1e-9)
    use = problem.totals(choice)[1]
    assert problem.machine.pool_use(memory) == pytest.approx(use)


def row_or_column_wise(num_tables: int, num_hosts: int) -> Problem:
    """Tables that columns suit a little better than rows, each by less than the exchange costs that the first one brings."""
    host = Host(
        "host",
        (NumaNode("numa0", 64_000 * MIB, 1e10, 6e9, 4),),
        Exchange(4e9, 50.0),
        nics=(Nic("nic0", 1e10),),
        links=(Link(("numa0", "nic0"), 1e11, 0.0),),
    )
    setup = StepSetup(2048, world_size=2, local_world_size=2 // num_hosts)
    machine = Machine.of(ClusterTopology("c", (host,)).with_hosts(num_hosts), setup)
    # None is like another, so that classes of equal tables are no help.
    tables = [Table(f"t{rows}", rows, 16, AccessCurve.zipf(rows, 0.0), 1.0, 1, 64) for rows in range(200, 200 + num_tables)]
    return Problem(machine, classes_of(tables, setup, [Wishes(("row_wise", "column_wise"), ("dram",))] * num_tables, on_device=False))


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("doublings", [1, 2, 4, 6])
def test_norms_let_the_first_table_be_cut_in_another_way(doublings: int, num_hosts: int) -> None:
    """The first pays for an exchange of its own alone; by the price itself it never goes, though all together gain by it."""
    problem = row_or_column_wise(24, num_hosts)
    ways = [[option.sharding for option in problem.classes[index].options] for index in problem.class_of]
    rows, columns = (np.array([names.index(way) for names in ways]) for way in ("row_wise", "column_wise"))
    first = np.where(np.arange(len(rows)) == 0, columns, rows)
    assert problem.score(columns).step_s < 0.95 * problem.score(rows).step_s
    assert problem.score(first).step_s > problem.score(rows).step_s, "else no norm is needed"
    assert (improved(problem, rows, 10) == rows).all()
    assert problem.score(improved(problem, rows, 10, doublings)).step_s <= problem.score(columns).step_s * (1 + 1e-9)


def test_further_ways_to_cut_tables_count_in_the_price_and_in_no_norm() -> None:
    problem = row_or_column_wise(2, num_hosts=1)
    one_way = problem.base_loads[None].copy()
    one_way[0, -len(EXCHANGE_COLUMNS)] = 2
    two_ways = problem.base_loads[None].copy()
    two_ways[0, -len(EXCHANGE_COLUMNS) :][:2] = 1
    assert problem.again_s > 0
    added = {n: float(problem.step_seconds(two_ways, n)[0][0] - problem.step_seconds(one_way, n)[0][0]) for n in range(7)}
    assert added.pop(0) == pytest.approx(problem.again_s)
    assert set(added.values()) == {0.0}


def test_equal_tables_share_a_class() -> None:
    """Otherwise a thousand tables of two hundred shapes would cost five times as much to plan."""
    problem = random_problem(3, max_tables=30, repeats=True)
    assert len(problem.classes) < problem.num_tables
    assert num_assignments(problem) >= 1


@pytest.mark.parametrize(
    ("sharding", "dim", "expected"),
    [
        ("table_wise", 16, [(0,), (1,), (2,), (3,)]),
        ("row_wise", 16, [(0, 1, 2, 3)]),
        ("data_parallel", 16, [(0, 1, 2, 3)]),
        ("table_row_wise", 16, [(0, 1), (2, 3)]),
        ("column_wise", 16, [(0, 1), (1, 2), (2, 3), (0, 1, 2, 3)]),
        ("column_wise", 8, [(0, 1), (1, 2), (2, 3)]),
        ("column_wise", 4, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_sets_of_ranks(sharding: str, dim: int, expected: list[tuple[int, ...]]) -> None:
    setup = StepSetup(1, world_size=4, local_world_size=2)
    assert list(rank_sets(sharding, setup, dim)) == expected  # type: ignore[arg-type]
