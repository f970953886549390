"""When nothing fits: which table, which memory, how many bytes short, and what would make it fit."""

import math
from collections.abc import Sequence

import numpy as np

from torchrec_kstep.cost import Table
from torchrec_kstep.planner.search import Option, Problem, Solution
from torchrec_kstep.topology import ClusterTopology
from torchrec_kstep.units import format_bytes


def misfit_text(problem: Problem, solution: Solution, tables: Sequence[Table], topology: ClusterTopology, kernel: str) -> str:
    """Explains the nearest miss that the search found.

    Args:
        problem: what was to be placed.
        solution: the assignment that lacks least.
        tables: in the order of the problem.
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
        f"the {len(tables)} tables do not fit on {topology.name!r}: {pool.name} is {format_bytes(short[worst])} short "
        f"({format_bytes(use[worst])} needed, {format_bytes(capacities[worst])} usable) in the best placement found",
        f"the largest part is table {tables[largest].name!r}, {option.sharding} on rank{'s' if len(option.ranks) > 1 else ''} "
        f"{', '.join(map(str, option.ranks[:8]))}{'...' if len(option.ranks) > 8 else ''}, {format_bytes(own[largest])} there",
    ]
    if pool.memory == "dram_bytes" and option.work.memory.get("index_bytes"):
        lines += _index_lines(option, tables[largest], pool.ranks, float(capacities[worst] - use[worst]))
    least = _least_bytes(problem)
    alike = [other.memory == pool.memory for other in problem.machine.pools]
    lines.append("what would make it fit:")
    where = ""
    if pool.memory == "ssd_bytes":
        where = " (tiers.ssd_bytes, where it bounds them; else what is free on the drives of tiers.ssd_paths)"
    lines.append(f"  - {format_bytes(short[worst])} more of {pool.name}{where}")
    have, need = float(capacities[alike].sum()), max(float(use[alike].sum()), least)
    if have > 0 and need > have:
        lines.append(f"  - {math.ceil(need / have * len(topology.hosts))} hosts like these instead of {len(topology.hosts)}")
    elif have > 0:
        lines.append(
            f"  - cutting {tables[largest].name!r} by rows (row_wise): all ranks have {format_bytes(have)} for {format_bytes(need)}"
        )
    if (
        kernel == "tiered"
        and pool.memory != "ssd_bytes"
        and not any(o.tier == "ssd" for o in problem.classes[problem.class_of[largest]].options)
    ):
        lines.append("  - a tier on SSD: drives in the topology, tiers=dram_ssd with tiers.ssd_paths")
    elif kernel != "tiered":
        lines.append("  - planner=tiered with tiers=dram_ssd, which keeps rows on SSD")
    if pool.memory == "dram_bytes" and option.work.memory.get("index_bytes"):
        lines.append(
            "  - fewer rows that are ever touched: ids hashed into fewer rows (data.num_hash_rows), or a shorter run (train.max_steps)"
        )
        lines.append("  - planner.engine=torchrec, which does not count indexes, at the risk of running out of memory late in the run")
    lines.append("  - fewer rows or columns, or an optimizer with less state")
    return "\n  ".join(lines)


def _index_lines(option: Option, table: Table, ranks: Sequence[int], left_bytes: float) -> list[str]:
    """Says what the index of a table on SSD takes, which stays in DRAM however small the cache is, and how many rows it could find."""
    num_shards = sum(rank in ranks for rank in option.ranks)
    index_bytes = option.work.memory["index_bytes"] * num_shards
    touched = option.work.touched_rows * num_shards
    room = max(index_bytes + left_bytes, 0.0)
    return [
        f"of that, {format_bytes(index_bytes)} is the index that finds its rows on SSD and stays in DRAM: {touched:,.0f} of its "
        f"{table.num_rows:,} rows will be touched in the run, {index_bytes / touched:.1f} bytes each; there is room for the index of about "
        f"{room / index_bytes * touched:,.0f} rows"
    ]


def _least_bytes(problem: Problem) -> float:
    """Bytes that the tables take at least, over all pools."""
    return float(sum(problem.tables_of(index)[1].sum(axis=1).min() * len(group.tables) for index, group in enumerate(problem.classes)))
