"""From quantities to seconds: the time of a step, where it goes, and how far it may be off."""

import math
from dataclasses import dataclass, replace

from torchrec_kstep.cost.machine import BESIDE, TIERS, Machine, Matrix


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a step.

    Attributes:
        name: of the phase.
        seconds: that it takes.
        bottleneck: the resource that is busy longest, "" where nothing but a fixed time counts.
        is_hidden: whether it runs beside the other phases and ends before them.
    """

    name: str
    seconds: float
    bottleneck: str
    is_hidden: bool = False


@dataclass(frozen=True)
class StepTime:
    """A predicted step.

    Attributes:
        seconds: of the whole step.
        error_s: how far it may be off: after a calibration four of five runs lie within, else one standard deviation by estimate.
        phases: in order; those that are not hidden add up to `seconds`.
    """

    seconds: float
    error_s: float
    phases: tuple[PhaseTime, ...]

    @property
    def spread_s(self) -> float:
        """What the error is a part of: phases are off independently."""
        return math.sqrt(sum(time.seconds**2 for time in self.phases if not time.is_hidden))

    def seconds_of(self, *names: str) -> float:
        """Of some phases together, those that are hidden left out."""
        return sum(time.seconds for time in self.phases if time.name in names and not time.is_hidden)


def price(machine: Machine, work: Matrix) -> StepTime:
    """Prices the quantities of all ranks, `[ranks, QUANTITIES]`."""
    chain: list[PhaseTime] = []
    beside: list[PhaseTime] = []
    num_further = machine.num_further_exchanges(work)
    for phase in machine.phases:
        loads = phase.loads_s(work)
        busiest = int(loads.argmax()) if loads.size else -1
        is_busy = bool(loads.size and loads[busiest] > 0)
        seconds = phase.fixed_s + num_further * phase.again_s + (float(loads[busiest]) if is_busy else 0.0)
        time = PhaseTime(phase.name, seconds, phase.resources[busiest] if is_busy else "")
        is_beside = phase.name in BESIDE and (machine.prefetch or phase.name != TIERS)
        (beside if is_beside else chain).append(time)
    chain_s = sum(time.seconds for time in chain)
    longest = max(beside, key=lambda time: time.seconds, default=None)
    # Where the chain runs inside the longest of the others, what is left of that is the wait for it.
    waits = [
        replace(time, seconds=time.seconds - chain_s) if time is longest and time.seconds > chain_s else replace(time, is_hidden=True)
        for time in beside
    ]
    phases = (*chain, *waits)
    seconds = sum(time.seconds for time in phases if not time.is_hidden)
    relative = machine.coefficients.measured_error if machine.is_measured else machine.coefficients.declared_error
    step = StepTime(seconds, 0.0, phases)
    return replace(step, error_s=relative * step.spread_s)
