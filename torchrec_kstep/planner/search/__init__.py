"""The search for a placement: options of each table, their price together, exact and bounded ways to the best."""

from torchrec_kstep.planner.search.problem import Option, Problem, Score, TableClass
from torchrec_kstep.planner.search.solve import Solution, solve

__all__ = ["Option", "Problem", "Score", "Solution", "TableClass", "solve"]
