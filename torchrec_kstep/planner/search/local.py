"""Greedy placement, rounding, and improvement one table at a time: for problems too large to solve exactly."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_kstep.cost.machine import Matrix
from torchrec_kstep.cost.work import Vector
from torchrec_kstep.planner.search.problem import Problem

Choice = npt.NDArray[np.int64]


def complete(problem: Problem, choice: Choice, doublings: int = 2) -> Choice:
    """Places the tables whose entry is -1, the heaviest first, each where the step grows least, by the norm of order 2^doublings."""
    choice = choice.copy()
    loads, use = problem.base_loads.copy(), np.zeros(problem.capacities.size)
    weight = np.zeros(problem.num_tables)
    for index, group in enumerate(problem.classes):
        own_loads, own_use = problem.tables_of(index)
        members = list(group.tables)
        placed = choice[members]
        counts = np.bincount(placed[placed >= 0], minlength=len(group.options))
        loads += counts @ own_loads
        use += counts @ own_use
        weight[members] = problem.step_seconds(own_loads)[0].min() + problem.overflow(own_use).min()
    room = _Room(problem)
    order = sorted((table for table in range(problem.num_tables) if choice[table] < 0), key=lambda table: (-weight[table], table))
    for table in order:
        own_loads, own_use = problem.tables_of(int(problem.class_of[table]))
        best = _best(problem, room.added(own_loads, loads), use + own_use, doublings)
        choice[table] = best
        loads = loads + own_loads[best]
        use = use + own_use[best]
    return choice


def rounded(problem: Problem, counts: Sequence[npt.NDArray[np.float64]]) -> Choice:
    """Takes the whole tables of a fractional solution and places what is left of each class greedily."""
    choice = np.full(problem.num_tables, -1, dtype=np.int64)
    for group, wanted in zip(problem.classes, counts, strict=True):
        position = 0
        for option, number in enumerate(np.floor(wanted + 1e-6).astype(int)):
            for table in group.tables[position : position + int(number)]:
                choice[table] = option
            position += int(number)
    return complete(problem, choice)


def improved(problem: Problem, choice: Choice, max_sweeps: int, doublings: int = 0) -> Choice:
    """Moves one table at a time until no move makes the step shorter, by the norm of order 2^doublings."""
    choice = choice.copy()
    loads, use = problem.totals(choice)
    room = _Room(problem)
    for _ in range(max_sweeps):
        has_moved = False
        for index, group in enumerate(problem.classes):
            own_loads, own_use = problem.tables_of(index)
            for option in np.unique(choice[list(group.tables)]):
                while True:  # each move lowers the score, so this ends
                    rest_loads, rest_use = loads - own_loads[option], use - own_use[option]
                    best = _best(problem, room.added(own_loads, rest_loads), rest_use + own_use, doublings, stay=int(option))
                    if best == option:
                        break
                    table = next(table for table in group.tables if choice[table] == option)
                    choice[table] = best
                    loads, use = rest_loads + own_loads[best], rest_use + own_use[best]
                    has_moved = True
                    if not (choice[list(group.tables)] == option).any():
                        break
        if not has_moved:
            break
    return choice


def improved_by_pairs(problem: Problem, choice: Choice, max_moves: int) -> Choice:
    """Moves two tables at once, e.g. one out of memory and another one in, as long as that helps."""
    choice = choice.copy()
    loads, use = problem.totals(choice)
    for _ in range(max_moves):
        found = _best_pair(problem, choice, loads, use)
        if found is None:
            break
        for table, option in found:
            own_loads, own_use = problem.tables_of(int(problem.class_of[table]))
            loads = loads + own_loads[option] - own_loads[choice[table]]
            use = use + own_use[option] - own_use[choice[table]]
            choice[table] = option
    return choice


class _Room:
    """Memory for sums of loads, used again and again: fresh memory for large matrices costs more than the sums."""

    def __init__(self, problem: Problem) -> None:
        num_options = max((len(group.options) for group in problem.classes), default=0)
        self._matrix = np.empty((num_options, problem.base_loads.size))

    def added(self, own_loads: Matrix, rest: Vector) -> Matrix:
        """Returns `own_loads + rest`, good until the next call."""
        return np.add(own_loads, rest, out=self._matrix[: len(own_loads)])


def _best_pair(problem: Problem, choice: Choice, loads: Vector, use: Vector) -> list[tuple[int, int]] | None:
    best_key = _key(problem, loads, use)
    best: list[tuple[int, int]] | None = None
    for first in range(problem.num_tables):
        a_loads, a_use = problem.tables_of(int(problem.class_of[first]))
        for second in range(first + 1, problem.num_tables):
            b_loads, b_use = problem.tables_of(int(problem.class_of[second]))
            rest_loads = loads - a_loads[choice[first]] - b_loads[choice[second]]
            rest_use = use - a_use[choice[first]] - b_use[choice[second]]
            for a in range(len(a_loads)):
                b = _best(problem, rest_loads + a_loads[a] + b_loads, rest_use + a_use[a] + b_use)
                key = _key(problem, rest_loads + a_loads[a] + b_loads[b], rest_use + a_use[a] + b_use[b])
                if key < (best_key[0], best_key[1] * (1 - 1e-9)):
                    best_key, best = key, [(first, a), (second, b)]
    return best


def _key(problem: Problem, loads: npt.NDArray[np.float64], use: npt.NDArray[np.float64]) -> tuple[float, float]:
    step, tie = problem.step_seconds(loads[None])
    return (round(float(problem.overflow(use[None])[0]), 12), float(step[0] + tie[0]))


def _best(problem: Problem, loads: Matrix, use: Matrix, doublings: int = 0, stay: int | None = None) -> int:
    """Returns the best row; `stay`, unless another one is better by more than rounding."""
    step, tie = problem.step_seconds(loads, doublings)
    total = step + tie
    overflow = np.round(problem.overflow(use), 12)
    best = int(np.lexsort((total, overflow))[0])
    if stay is not None and overflow[stay] <= overflow[best] and total[best] >= total[stay] * (1 - 1e-9):
        return stay
    return best
