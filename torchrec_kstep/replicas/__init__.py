"""Replicas of a model over the ranks of a job: which ranks share one, which merge, and how they agree before they do."""

from torchrec_kstep.replicas.agreement import RoundAgreement
from torchrec_kstep.replicas.env import KStepEnv
from torchrec_kstep.replicas.layout import ReplicaLayout
from torchrec_kstep.replicas.plans import localize, plan_digest

__all__ = ["KStepEnv", "ReplicaLayout", "RoundAgreement", "localize", "plan_digest"]
