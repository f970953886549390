"""The search as a mixed-integer program for HiGHS: exact where small, a lower bound where its integers are let go.

Variables: how many tables of a class take an option; the quantities of each rank; seconds of each phase; seconds of the step.
The step is minimised subject to: each phase is at least as long as each of its resources is busy, the chain of phases fits into the
step, with one more exchange for each further way in which tables are cut, and so do the tiers; no pool overflows.
"""

import os
import sys
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from torchrec_kstep.cost import QUANTITIES
from torchrec_kstep.cost.machine import BESIDE, EXCHANGE_COLUMNS
from torchrec_kstep.planner.search.problem import Problem

_SECONDS = 1e3  # the program counts in milliseconds, which keeps its numbers near 1


@dataclass(frozen=True)
class ProgramResult:
    """What the solver found.

    Attributes:
        counts: tables of each class by option; fractions where integers were let go; None if nothing was found.
        bound_s: no assignment that fits has a shorter step.
        is_optimal: whether `counts` was proven the best, up to the gap that was asked for.
        is_infeasible: whether it was proven that nothing fits.
    """

    counts: list[npt.NDArray[np.float64]] | None
    bound_s: float
    is_optimal: bool
    is_infeasible: bool


class _Rows:
    """Rows of a sparse matrix."""

    def __init__(self) -> None:
        self.starts, self.indexes, self.values = [0], list[npt.NDArray[np.int64]](), list[npt.NDArray[np.float64]]()
        self.lower, self.upper = list[float](), list[float]()

    def add(self, indexes: npt.NDArray[np.int64], values: npt.NDArray[np.float64], lower: float, upper: float) -> None:
        self.indexes.append(indexes)
        self.values.append(values)
        self.starts.append(self.starts[-1] + len(indexes))
        self.lower.append(lower)
        self.upper.append(upper)


def solve_program(problem: Problem, integers: bool, max_nodes: int = 2000, relative_gap: float = 1e-6) -> ProgramResult:
    """Solves the program with one thread and fixed seeds, so that it always ends alike.

    Args:
        problem: what to place.
        integers: whether tables are whole; else the result is a bound and a hint.
        max_nodes: branches looked at, at most.
        relative_gap: distance from the bound at which the search may end.
    """
    columns, rows = _columns(problem), _Rows()
    _class_rows(problem, rows, columns)
    _quantity_rows(problem, rows, columns)
    _phase_rows(problem, rows, columns)
    _way_rows(problem, rows, columns)
    _pool_rows(problem, rows)
    solver = _quiet_solver()
    for name, value in (
        ("threads", 1),
        ("random_seed", 0),
        ("mip_max_nodes", max_nodes),
        ("mip_rel_gap", relative_gap),
        ("mip_abs_gap", 1e-9),
    ):
        solver.setOptionValue(name, value)
    solver.passModel(_model(problem, rows, columns, integers))
    solver.run()
    return _result(problem, solver, columns, integers)


def _quiet_solver() -> highspy.Highs:
    """Makes a solver; its constructor writes a banner to the process's standard output, which is closed to it meanwhile."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        solver = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy annotates part of its methods only
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
    solver.silent()
    return solver


@dataclass(frozen=True)
class _Columns:
    """Where the variables stand."""

    first_option: npt.NDArray[np.int64]  # of each class
    first_quantity: int
    first_phase: int
    step: int
    first_way: int  # whether tables are cut in it
    further_ways: int


def _columns(problem: Problem) -> _Columns:
    sizes = [len(group.options) for group in problem.classes]
    first = np.cumsum([0, *sizes])
    first_phase = int(first[-1]) + problem.machine.num_ranks * len(QUANTITIES)
    step = first_phase + len(problem.machine.phases)
    return _Columns(first, int(first[-1]), first_phase, step, step + 1, step + 1 + len(EXCHANGE_COLUMNS))


def _class_rows(problem: Problem, rows: _Rows, columns: _Columns) -> None:
    for index, group in enumerate(problem.classes):
        options = np.arange(columns.first_option[index], columns.first_option[index + 1])
        rows.add(options, np.ones(len(options)), len(group.tables), len(group.tables))


def _quantity_scales(problem: Problem) -> npt.NDArray[np.float64]:
    """Milliseconds that one unit of a quantity costs at most; quantities are counted in those, so that all are of one size."""
    scales = np.zeros(len(QUANTITIES))
    for phase in problem.machine.phases:
        for position, quantity in enumerate(phase.used):
            if phase.resources:
                scales[quantity] = max(scales[quantity], float(phase.weights[:, position].max()) * _SECONDS)
    return scales


def _quantity_rows(problem: Problem, rows: _Rows, columns: _Columns) -> None:
    """Each quantity of each rank is the sum over the shards that it holds."""
    scales = _quantity_scales(problem)
    indexes: dict[tuple[int, int], list[int]] = {}
    values: dict[tuple[int, int], list[float]] = {}
    for index, group in enumerate(problem.classes):
        for position, option in enumerate(group.options):
            column = int(columns.first_option[index]) + position
            vector = option.work.vector * scales
            for quantity in np.flatnonzero(vector):
                for rank in option.ranks:
                    place = (rank, int(quantity))
                    indexes.setdefault(place, []).append(column)
                    values.setdefault(place, []).append(float(vector[quantity]))
    for rank in range(problem.machine.num_ranks):
        for quantity in np.flatnonzero(scales):
            place = (rank, int(quantity))
            own = columns.first_quantity + rank * len(QUANTITIES) + int(quantity)
            found = np.array([*indexes.get(place, []), own])
            rows.add(found, np.array([*values.get(place, []), -1.0]), 0.0, 0.0)


def _phase_rows(problem: Problem, rows: _Rows, columns: _Columns) -> None:
    scales = _quantity_scales(problem)
    chain = []
    for number, phase in enumerate(problem.machine.phases):
        column = columns.first_phase + number
        if phase.name not in BESIDE:
            chain.append(column)
        quantities = [columns.first_quantity + rank * len(QUANTITIES) + q for rank in range(problem.machine.num_ranks) for q in phase.used]
        for position in range(len(phase.resources)):
            weights = (phase.weights[:, :, position] * _SECONDS / scales[list(phase.used)]).ravel()
            used = np.flatnonzero(weights)
            indexes = np.append(np.asarray(quantities, dtype=np.int64)[used], column)
            limit = -(float(phase.base_s[position]) + phase.fixed_s) * _SECONDS
            rows.add(indexes, np.append(weights[used], -1.0), -highspy.kHighsInf, limit)
        rows.add(np.array([column]), np.array([1.0]), phase.fixed_s * _SECONDS, highspy.kHighsInf)
    tiers, links = (
        [columns.first_phase + number for number, phase in enumerate(problem.machine.phases) if phase.name == name] for name in BESIDE
    )
    again_ms = problem.again_s * _SECONDS
    inside = [(chain, again_ms), (tiers, 0.0)] if problem.machine.prefetch else [(chain + tiers, again_ms)]
    inside += [(links, 0.0)] if links else []
    for part, again_ms in inside:
        inside_step = np.array([*part, columns.further_ways, columns.step])
        rows.add(inside_step, np.array([1.0] * len(part) + [again_ms, -1.0]), -highspy.kHighsInf, 0.0)


def _way_rows(problem: Problem, rows: _Rows, columns: _Columns) -> None:
    """A way in which any table is cut counts, and those beyond the first once more."""
    ways = [columns.first_way + number for number in range(len(EXCHANGE_COLUMNS))]
    for index, group in enumerate(problem.classes):
        is_cut_so = np.array([option.work.vector[EXCHANGE_COLUMNS] > 0 for option in group.options])
        for number, way in enumerate(ways):
            options = columns.first_option[index] + np.flatnonzero(is_cut_so[:, number])
            if options.size:
                values = np.append(np.ones(options.size), -float(len(group.tables)))
                rows.add(np.append(options, way), values, -highspy.kHighsInf, 0.0)
    rows.add(np.array([*ways, columns.further_ways]), np.array([1.0] * len(ways) + [-1.0]), -highspy.kHighsInf, 1.0)


def _pool_rows(problem: Problem, rows: _Rows) -> None:
    """No pool takes more than its capacity; counted in parts of it."""
    uses = [problem.tables_of(index)[1] / problem.capacities for index in range(len(problem.classes))]
    whole = np.concatenate(uses)
    for pool in range(problem.capacities.size):
        used = np.flatnonzero(whole[:, pool])
        if used.size:
            rows.add(used, whole[used, pool], -highspy.kHighsInf, 1.0)


def _model(problem: Problem, rows: _Rows, columns: _Columns, integers: bool) -> highspy.HighsLp:
    model = highspy.HighsLp()
    num_options, num_columns = columns.first_quantity, columns.further_ways + 1
    model.num_col_, model.num_row_ = num_columns, len(rows.lower)
    cost = np.zeros(num_columns)
    cost[columns.step] = 1.0
    upper = np.full(num_columns, highspy.kHighsInf)
    for index, group in enumerate(problem.classes):
        upper[columns.first_option[index] : columns.first_option[index + 1]] = len(group.tables)
    upper[columns.first_way : columns.further_ways] = 1.0
    model.col_cost_, model.col_lower_, model.col_upper_ = cost, np.zeros(num_columns), upper
    model.row_lower_, model.row_upper_ = np.array(rows.lower, dtype=float), np.array(rows.upper, dtype=float)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(rows.starts, dtype=np.int32)
    model.a_matrix_.index_ = np.concatenate(rows.indexes).astype(np.int32)
    model.a_matrix_.value_ = np.concatenate(rows.values)
    if integers:
        kinds = [highspy.HighsVarType.kInteger] * num_options + [highspy.HighsVarType.kContinuous] * (num_columns - num_options)
        kinds[columns.first_way : columns.further_ways] = [highspy.HighsVarType.kInteger] * len(EXCHANGE_COLUMNS)
        model.integrality_ = kinds
    return model


def _result(problem: Problem, solver: highspy.Highs, columns: _Columns, integers: bool) -> ProgramResult:
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return ProgramResult(None, float("inf"), is_optimal=False, is_infeasible=True)
    info = solver.getInfo()
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    bound_ms = info.mip_dual_bound if integers else info.objective_function_value
    has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    counts = None
    if has_values:
        values = np.array(solver.getSolution().col_value)
        counts = [values[columns.first_option[index] : columns.first_option[index + 1]] for index in range(len(problem.classes))]
    bound_s = float(bound_ms) / _SECONDS if integers or is_optimal else 0.0
    return ProgramResult(counts, max(bound_s, 0.0), is_optimal, is_infeasible=False)
