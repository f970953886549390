"""Routes of ranks: which cores, memory, drives and network interfaces each uses; chosen from the machines, then carried out."""

from torchrec_kstep.routes.carry_out import CarriedOut, carry_out
from torchrec_kstep.routes.choose import choose_routes
from torchrec_kstep.routes.environment import gloo_over
from torchrec_kstep.routes.of_run import drive_here, routes_of_run
from torchrec_kstep.routes.values import JobRoutes, RankRoutes, RouteWishes

__all__ = ["CarriedOut", "JobRoutes", "RankRoutes", "RouteWishes", "carry_out", "choose_routes", "drive_here", "gloo_over", "routes_of_run"]
