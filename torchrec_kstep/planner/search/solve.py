"""Chooses the search by the size of the problem, and says how far from the best its result can be."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_kstep.planner.search.bound import weighted_bound
from torchrec_kstep.planner.search.exhaustive import exhaustive, num_assignments
from torchrec_kstep.planner.search.local import complete, improved, improved_by_pairs, rounded
from torchrec_kstep.planner.search.problem import Problem, Score
from torchrec_kstep.planner.search.program import ProgramResult, solve_program

_MAX_EXHAUSTIVE = 4096  # assignments
_MAX_EXACT = 300  # options of all tables together, for the program with integers
_MAX_RELAXED = 400_000  # (class, option) pairs times ranks, for the program without
_MAX_KICKED = 6000  # options of all tables together, for starting over from parts of the best placement
_KICKS, _KICKED_SHARE, _KICKED_ORDERS = 24, 0.2, (3, 5, 0)
_MAX_PAIRS = 12  # tables, for moves of two at once
_MANY_RANKS = 32
_SWEEPS, _SWEEPS_MANY_RANKS = 12, 2
_ORDERS, _FEW_ORDERS = (2, 3, 4, 5, 6, 0), (3, 5, 0)  # doublings of the norm: 4, 8, ... and at last the busiest resource alone


@dataclass(frozen=True)
class Solution:
    """What a search found.

    Attributes:
        choice: option of each table.
        score: its price.
        bound_s: no placement has a shorter step.
        method: "exhaustive", "exact", "bounded" or "greedy".
    """

    choice: npt.NDArray[np.int64]
    score: Score
    bound_s: float
    method: str

    @property
    def gap(self) -> float:
        """Upper bound on (step - best step) / best step; infinite without a bound."""
        if self.bound_s <= 0:
            return float("inf")
        return max(self.score.step_s / self.bound_s - 1, 0.0)


def solve(problem: Problem, max_exhaustive: int = _MAX_EXHAUSTIVE, starts: Sequence[npt.NDArray[np.int64]] = ()) -> Solution:
    """Searches for the placement with the shortest step. The same problem always gives the same answer.

    Small problems are solved exactly: by pricing every assignment, or by a mixed-integer program. Larger ones start from the
    program without integers, whose value is also the bound, are rounded and improved table by table. The largest are placed
    greedily and improved, with a bound from prices of resources.

    Args:
        problem: what to place.
        max_exhaustive: price every assignment if there are no more; 0 leaves it to the program.
        starts: assignments that are known; what is found is never worse than one of them. -1 stands for a table that it leaves open.
    """
    if num_assignments(problem) <= max_exhaustive:
        choice = exhaustive(problem)
        score = problem.score(choice)
        return Solution(choice, score, score.step_s, "exhaustive")
    start = np.full(problem.num_tables, -1, dtype=np.int64)
    candidates = [_polished(problem, complete(problem, start))]
    candidates += [_polished(problem, complete(problem, known)) for known in starts]
    num_options = sum(len(group.options) * len(group.tables) for group in problem.classes)
    num_columns = sum(len(group.options) for group in problem.classes)
    found: ProgramResult | None = None
    method = "greedy"
    if num_options <= _MAX_EXACT:
        found, method = solve_program(problem, integers=True), "exact"
        if not found.is_optimal:
            method = "bounded"
    elif num_columns * problem.machine.num_ranks <= _MAX_RELAXED:
        found, method = solve_program(problem, integers=False), "bounded"
    if found is not None and found.counts is not None:
        candidates.append(_polished(problem, rounded(problem, found.counts)))
    choice = min(candidates, key=lambda candidate: problem.score(candidate).key)
    if method != "exact" and num_options <= _MAX_KICKED:
        choice = _kicked(problem, choice)
    bound_s = weighted_bound(problem, problem.totals(choice)[0])
    if found is not None and not found.is_infeasible:
        bound_s = max(bound_s, found.bound_s)
    return Solution(choice, problem.score(choice), bound_s, method)


def _polished(problem: Problem, choice: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Improves by norms of rising order, and keeps the best of what each order ends with."""
    many = problem.machine.num_ranks > _MANY_RANKS
    best = choice
    for doublings in _FEW_ORDERS if many else _ORDERS:
        choice = improved(problem, choice, _SWEEPS_MANY_RANKS if many else _SWEEPS, doublings)
        best = min(best, choice, key=lambda candidate: problem.score(candidate).key)
    if problem.num_tables <= _MAX_PAIRS:
        best = improved(problem, improved_by_pairs(problem, best, max_moves=20), _SWEEPS)
    return best


def _kicked(problem: Problem, best: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Takes a fifth of the tables out, places them anew and improves, again and again; always the same fifths."""
    generator = np.random.default_rng(0)
    best_key = problem.score(best).key
    for _ in range(_KICKS):
        choice = best.copy()
        choice[generator.random(problem.num_tables) < _KICKED_SHARE] = -1
        choice = complete(problem, choice, int(generator.integers(1, 6)))
        for doublings in _KICKED_ORDERS:
            choice = improved(problem, choice, _SWEEPS, doublings)
        key = problem.score(choice).key
        if key < best_key:
            best, best_key = choice, key
    return best
