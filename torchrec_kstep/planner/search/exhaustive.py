"""Every assignment of a small problem, priced one by one: the measure of all other searches."""

import itertools

import numpy as np
import numpy.typing as npt

from torchrec_kstep.planner.search.problem import Problem

_CHUNK = 4096


def num_assignments(problem: Problem) -> int:
    """How many there are."""
    total = 1
    for group in problem.classes:
        total *= len(group.options) ** len(group.tables)
    return total


def exhaustive(problem: Problem) -> npt.NDArray[np.int64]:
    """Returns the best assignment of all. Use it for some hundred thousand at most."""
    members = [(table, index) for index, group in enumerate(problem.classes) for table in group.tables]
    ranges = [range(len(problem.classes[index].options)) for _, index in members]
    tables = [problem.tables_of(index) for _, index in members]
    best, best_key = np.zeros(problem.num_tables, dtype=np.int64), (np.inf, np.inf)
    combinations = itertools.product(*ranges)
    while chunk := list(itertools.islice(combinations, _CHUNK)):
        choices = np.array(chunk)
        loads = problem.base_loads + sum(loads[choices[:, column]] for column, (loads, _) in enumerate(tables))
        use = sum(use[choices[:, column]] for column, (_, use) in enumerate(tables))
        step, tie = problem.step_seconds(np.asarray(loads))
        overflow = np.round(problem.overflow(np.asarray(use)), 12)
        first = np.lexsort((step + tie, overflow))[0]
        key = (float(overflow[first]), float(step[first] + tie[first]))
        if key < best_key:
            best_key = key
            for column, (table, _) in enumerate(members):
                best[table] = choices[first, column]
    return best
