"""Plans: which rank holds which part of which table."""

from torchrec_kstep.planner.plan import make_plan
from torchrec_kstep.planner.report import PlacedShard, format_plan, placed_shards
from torchrec_kstep.planner.tables import find_tables
from torchrec_kstep.planner.topology_planner import Job, TopologyShardingPlanner

__all__ = ["Job", "PlacedShard", "TopologyShardingPlanner", "find_tables", "format_plan", "make_plan", "placed_shards"]
