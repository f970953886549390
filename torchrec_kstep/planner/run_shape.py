"""What a plan should know of a run besides its tables: replicas, merge rounds, length, and what its data asks for."""

from collections.abc import Callable
from dataclasses import dataclass

from torchrec_kstep.config.schema import KStepConfig
from torchrec_kstep.planner.traces import Usage

_WIRE_BYTES = {"fp32": (4.0, 4.0), "bf16": (2.0, 2.0), "int8": (1.0, 2.0)}  # of a weight or first moment, and of a second moment


@dataclass(frozen=True)
class RunShape:
    """A run, as far as its plan depends on it.

    Attributes:
        num_hosts: of all replicas together; 0: as many as the ranks that share a replica sit on.
        num_replicas: whole copies of the model; 0: as many as fill the hosts.
        k: steps between merge rounds; 0 for one replica.
        merge_weight_bytes: sent per weight in a merge round.
        num_steps: of the whole run; 0: not known.
        prefetch: whether rows come up ahead.
        usage: what the data asks of tables; called where the plan is made.
    """

    num_hosts: int = 0
    num_replicas: int = 0
    k: int = 0
    merge_weight_bytes: float = 4.0
    num_steps: int = 0
    prefetch: bool = True
    usage: Callable[[], Usage] = Usage


def merge_weight_bytes(kstep: KStepConfig) -> float:
    """Bytes that a merge round sends per weight of a row: the weight and, unless they stay at home, both moments in their rounds.

    A round with k = 1 averages gradients, one value per weight.
    """
    value, second = _WIRE_BYTES[kstep.wire]
    if kstep.k == 1 or kstep.row_states == "weights":
        return value
    return value + value / kstep.m_period_rounds + second / kstep.v_period_rounds
