"""What a training step costs: pure functions from tables, machines and placements to bytes, operations and seconds.

Nothing here knows TorchRec or torch. Bytes and counts carry their unit in their name; seconds end in `_s`.
"""

from torchrec_kstep.cost.access import AccessCurve
from torchrec_kstep.cost.coefficients import Coefficients
from torchrec_kstep.cost.index_memory import index_memory_bytes
from torchrec_kstep.cost.machine import Machine, Phase
from torchrec_kstep.cost.price import PhaseTime, StepTime
from torchrec_kstep.cost.work import MEMORIES, QUANTITIES, ShardWork, StepSetup, Table, Tier, shard_work

__all__ = [
    "MEMORIES",
    "QUANTITIES",
    "AccessCurve",
    "Coefficients",
    "Machine",
    "Phase",
    "PhaseTime",
    "ShardWork",
    "StepSetup",
    "StepTime",
    "Table",
    "Tier",
    "index_memory_bytes",
    "shard_work",
]
