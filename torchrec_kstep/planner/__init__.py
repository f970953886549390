"""Plans: which rank holds which part of which table."""

from torchrec_kstep.planner.plan import find_tables, make_plan
from torchrec_kstep.planner.report import PlacedShard, format_plan, placed_shards

__all__ = ["PlacedShard", "find_tables", "format_plan", "make_plan", "placed_shards"]
