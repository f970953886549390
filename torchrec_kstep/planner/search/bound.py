"""A lower bound on the step without a solver, for problems of any size."""

import numpy as np

from torchrec_kstep.cost.work import Vector
from torchrec_kstep.planner.search.problem import Problem

_ORDERS = (1.0, 3.0, 7.0, 15.0, 31.0)
_TIER_SHARES = (0.0, 0.5, 1.0)


def weighted_bound(problem: Problem, loads: Vector) -> float:
    """Seconds below which no placement can be, from prices of resources.

    A phase takes at least any weighted mean of how long its resources are busy, so a step takes at least the sum over tables of
    the cheapest option under such weights (Lagrange's bound with the capacities left out). Weights follow a good placement:
    powers of how busy its resources are.

    Args:
        problem: what is placed.
        loads: of a good placement, `[resources]` in seconds.
    """
    best = 0.0
    for order in _ORDERS:
        for tier_share in _TIER_SHARES if problem.machine.prefetch else (None,):
            weights, fixed_s = problem.resource_weights(loads, order, tier_share)
            total = fixed_s + float(problem.base_loads @ weights)
            for index, group in enumerate(problem.classes):
                own_loads, _ = problem.tables_of(index)
                total += len(group.tables) * float((own_loads @ weights).min())
            best = max(best, total)
    return best * (1 - 1e-9) if np.isfinite(best) else 0.0
