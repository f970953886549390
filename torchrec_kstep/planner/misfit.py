"""When nothing fits: which table, which memory, how many bytes short, and what would make it fit."""

import math
from collections.abc import Sequence

import numpy as np

from torchrec_kstep.planner.search import Problem, Solution
from torchrec_kstep.topology import ClusterTopology
from torchrec_kstep.units import format_bytes


def misfit_text(problem: Problem, solution: Solution, names: Sequence[str], topology: ClusterTopology, kernel: str) -> str:
    """Explains the nearest miss that the search found.

    Args:
        problem: what was to be placed.
        solution: the assignment that lacks least.
        names: of the tables.
        topology: the machines.
        kernel: of the configuration.
    """
    _, use = problem.totals(solution.choice)
    capacities = problem.machine.capacities_bytes
    short = use - capacities
    worst = int(np.argmax(short / np.maximum(capacities, 1.0)))
    pool = problem.machine.pools[worst]
    own = [problem.tables_of(int(problem.class_of[table]))[1][option, worst] for table, option in enumerate(solution.choice)]
    largest = int(np.argmax(own))
    option = problem.classes[problem.class_of[largest]].options[solution.choice[largest]]
    lines = [
        f"the {len(names)} tables do not fit on {topology.name!r}: {pool.name} is {format_bytes(short[worst])} short "
        f"({format_bytes(use[worst])} needed, {format_bytes(capacities[worst])} usable) in the best placement found",
        f"the largest part is table {names[largest]!r}, {option.sharding} on rank{'s' if len(option.ranks) > 1 else ''} "
        f"{', '.join(map(str, option.ranks[:8]))}{'...' if len(option.ranks) > 8 else ''}, {format_bytes(own[largest])} there",
    ]
    least = _least_bytes(problem)
    alike = [other.memory == pool.memory for other in problem.machine.pools]
    lines.append("what would make it fit:")
    lines.append(f"  - {format_bytes(short[worst])} more of {pool.name}")
    have, need = float(capacities[alike].sum()), max(float(use[alike].sum()), least)
    if have > 0 and need > have:
        lines.append(f"  - {math.ceil(need / have * len(topology.hosts))} hosts like these instead of {len(topology.hosts)}")
    elif have > 0:
        lines.append(
            f"  - cutting {names[largest]!r} by rows (sharding row_wise): all ranks have {format_bytes(have)} for {format_bytes(need)}"
        )
    if (
        kernel == "tiered"
        and pool.memory != "ssd_bytes"
        and not any(o.tier == "ssd" for o in problem.classes[problem.class_of[largest]].options)
    ):
        lines.append("  - a tier on SSD: drives in the topology, tiers=dram_ssd with tiers.ssd_paths")
    elif kernel != "tiered":
        lines.append("  - planner=tiered with tiers=dram_ssd, which keeps rows on SSD")
    lines.append("  - fewer rows or columns, or an optimizer with less state")
    return "\n  ".join(lines)


def _least_bytes(problem: Problem) -> float:
    """Bytes that the tables take at least, over all pools."""
    return float(sum(problem.tables_of(index)[1].sum(axis=1).min() * len(group.tables) for index, group in enumerate(problem.classes)))
