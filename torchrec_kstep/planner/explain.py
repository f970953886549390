"""A placement in words: the step, where it goes, and why each table is where it is."""

from collections.abc import Iterator, Sequence

from torchrec_kstep.cost.machine import TIERS
from torchrec_kstep.planner.options import COLUMN_MULTIPLE
from torchrec_kstep.planner.placement import PlacedTable, Placement
from torchrec_kstep.units import format_bytes, format_seconds

_PHASE_WORDS = {
    "loop": "the loop itself: Python, pipeline, autograd, copies of the batch",
    "ids": "sending ids to the ranks that hold the rows",
    "lookup": "looking rows up and pooling them",
    "outputs": "sending pooled rows back",
    "dense": "dense layers, forward and backward",
    "gradients": "sending gradients of pooled rows",
    "update": "updating rows",
    "all_reduce": "summing gradients of dense layers and replicated tables",
    "optimizer": "optimizer of the dense parameters",
    "merge": "merge rounds, spread over their steps",
    "tiers": "waiting for drives and for rows on their way to devices",
    "links": "waiting for network cards that are never idle",
}
_HIDDEN_WORDS = {
    "tiers": "drives and the way to devices, beside the other phases",
    "links": "all that network cards send in a step at the rate that they keep up, beside the other phases",
}
_NEAR_ZERO_S = 1e-9


def step_lines(placement: Placement) -> list[str]:
    """The prediction: seconds with their error, then each phase with its bottleneck."""
    step = placement.step
    lines = [f"predicted step {format_seconds(step.seconds)} +- {format_seconds(step.error_s)} on {placement.topology}"]
    for phase in sorted(step.phases, key=lambda phase: -phase.seconds):
        if phase.seconds < _NEAR_ZERO_S:
            continue
        share = "hidden" if phase.is_hidden else f"{phase.seconds / step.seconds:.0%}"
        words = _HIDDEN_WORDS[phase.name] if phase.is_hidden else _PHASE_WORDS[phase.name]
        bottleneck = f"; slowest: {phase.bottleneck}" if phase.bottleneck else ""
        lines.append(f"  {phase.name:<10} {format_seconds(phase.seconds):>9} {share:>6}  {words}{bottleneck}")
    return lines


def reasons(placement: Placement) -> list[str]:
    """One sentence per table, then one per rank that stands out, then how good the plan is."""
    is_hidden = all(phase.is_hidden for phase in placement.step.phases if phase.name == TIERS)
    lines = [_table_reason(table, is_hidden) for table in placement.tables]
    lines += _rank_reasons(placement)
    lines.append(_method(placement))
    return lines


def _table_reason(table: PlacedTable, is_hidden: bool) -> str:
    place = _place(table)
    why = "which ends before the other phases do" if is_hidden else "which is waited for; other tables gain more from the DRAM"
    if table.tier == "ssd":
        return (
            f"{table.name} goes to SSD on {place}, with {table.cached_rows:,.0f} of {table.num_rows:,} rows cached: the cache meets "
            f"{table.hit_rate:.1%} of its ids, and each shard reads {table.missed_rows:,.0f} rows per step, {why}"
        )
    if table.tier == "dram" and table.cached_rows < table.num_rows:
        return (
            f"{table.name} rests in DRAM behind {place}, with {table.cached_rows:,.0f} of {table.num_rows:,} rows on the device: "
            f"{table.hit_rate:.1%} of its ids meet the cache"
        )
    if table.sharding == "column_wise" and len(table.ranks) == 1:
        return (
            f"{table.name} stays in {table.tier} on {place}, whole ({format_bytes(table.bytes_per_rank)}): these ranks cannot share its "
            f"{table.dim} columns in equal parts of a multiple of {COLUMN_MULTIPLE} that are no narrower than wished for"
        )
    cut = {
        "table_wise": "whole, so that its bags are sent once",
        "row_wise": "cut by rows, which splits its bytes and lookups evenly and sends partial sums from every rank",
        "table_row_wise": "cut by rows within a host, so that only sums cross the network",
        "column_wise": "cut by columns, which splits its bytes and updates without partial sums",
        "data_parallel": "replicated: summing its gradients costs less than sending its ids and bags",
    }[table.sharding]
    return f"{table.name} stays in {table.tier} on {place}, {cut} ({format_bytes(table.bytes_per_rank)} per rank)"


def _place(table: PlacedTable) -> str:
    if len(table.ranks) == 1:
        return f"rank {table.ranks[0]}"
    is_range = list(table.ranks) == list(range(table.ranks[0], table.ranks[0] + len(table.ranks)))
    return f"ranks {table.ranks[0]}-{table.ranks[-1]}" if is_range else "ranks " + ", ".join(map(str, table.ranks))


def bytes_by_rank(placement: Placement) -> list[int]:
    """Weights and optimizer states that each rank holds, in whatever tier."""
    held = [0] * placement.world_size
    for table in placement.tables:
        for rank in table.ranks:
            held[rank] += table.bytes_per_rank
    return held


def _rank_reasons(placement: Placement) -> Iterator[str]:
    empty = [rank for rank, held in enumerate(bytes_by_rank(placement)) if not held]
    if not empty:
        return
    ranks = f"rank {empty[0]} gets" if len(empty) == 1 else f"ranks {_listed(empty)} get"
    yield (
        f"{ranks} no table: with one there, the step would take no less, because the way there or the rank itself is slower than others, "
        "or because there are fewer tables than ranks"
    )


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _method(placement: Placement) -> str:
    if placement.method in ("exhaustive", "exact") and placement.gap <= 1e-4:
        return "no other placement of the options looked at has a shorter predicted step (searched exactly)"
    if placement.gap < 0:
        return "found greedily and improved table by table; how far the best could be from it is not known"
    return f"the predicted step is at most {placement.gap:.1%} longer than that of the best placement (proven by a bound)"


def placement_table(placement: Placement) -> list[str]:
    """One line per table, with columns."""
    header = ("table", "rows", "dim", "sharding", "ranks", "tier", "cached", "hits", "bytes per rank")
    lines = [header]
    for table in placement.tables:
        has_cache = table.cached_rows < table.num_rows or table.tier == "ssd"
        lines.append(
            (
                table.name,
                f"{table.num_rows:,}",
                str(table.dim),
                table.sharding,
                _place(table).removeprefix("ranks ").removeprefix("rank "),
                table.tier,
                f"{table.cached_rows:,.0f}" if has_cache else "-",
                f"{table.hit_rate:.1%}" if has_cache else "-",
                format_bytes(table.bytes_per_rank),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def pool_lines(placement: Placement) -> list[str]:
    """What is taken of each memory."""
    return [
        f"  {pool.name}: {format_bytes(pool.used_bytes)} of {format_bytes(pool.capacity_bytes)} usable"
        for pool in placement.pools
        if pool.used_bytes > 0
    ]
