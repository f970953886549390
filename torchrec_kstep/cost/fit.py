"""Fits the coefficients of the software to steps that were measured: robust, non-negative least squares.

For given works of all ranks each phase takes as long as its busiest resource, and how long a resource is busy is linear in the
coefficients. So the fit takes the busiest resources under the coefficients so far, solves a linear problem, and repeats. Errors count in
parts of the measured step; those above `_HUBER` count less and less (Huber). What the runs say nothing about stays where it was: a weak
pull towards the start is part of the problem.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_kstep.cost.coefficients import FACTORS, FITTED, Coefficients
from torchrec_kstep.cost.machine import BESIDE, TIERS, Machine, Matrix
from torchrec_kstep.cost.price import StepTime, price
from torchrec_kstep.cost.work import StepSetup, Vector
from torchrec_kstep.topology import ClusterTopology

OPTIMIZER_PHASES = ("optimizer", "merge")
_HUBER = 0.15  # part of a step
_PULL = 1e-2  # weight of the start, against a run that is off by the whole step; of 3e-4 .. 1e-1 best at predicting runs left out
_ROUNDS = 40
COVERAGE = 0.8  # part of runs that the fit did not see that the error bar covers: wider ones tell little, narrower ones are wrong too often


@dataclass(frozen=True)
class Observation:
    """One run: what its ranks had to do in a step, and how long that took.

    Attributes:
        name: for people.
        topology: where it ran.
        setup: of the step.
        threads_per_rank: cores that a rank computes with, at most.
        work: of all ranks of a replica, `[ranks, QUANTITIES]`.
        step_s: measured seconds of a step, data not counted.
        optimizer_s: of it, in the dense optimizer and in merge rounds.
    """

    name: str
    topology: ClusterTopology
    setup: StepSetup
    threads_per_rank: float
    work: Matrix
    step_s: float
    optimizer_s: float

    def predicted(self, coefficients: Coefficients) -> StepTime:
        """The step under given coefficients."""
        return price(self.machine(coefficients), self.work)

    def machine(self, coefficients: Coefficients, keeps_all: bool = False) -> Machine:
        """The machines in numbers."""
        return Machine.of(self.topology, self.setup, threads_per_rank=self.threads_per_rank, coefficients=coefficients, keeps_all=keeps_all)


@dataclass(frozen=True)
class Fit:
    """What a fit found.

    Attributes:
        coefficients: fitted, with `measured_error` such that the error bar covers four of five runs that the fit did not see.
        median_error: median distance of predicted and measured steps over the measured one, each run predicted without itself.
        num_runs: that were used.
    """

    coefficients: Coefficients
    median_error: float
    num_runs: int


def fit(observations: Sequence[Observation], start: Coefficients | None = None) -> Fit:
    """Fits `FITTED` and the error bar; each run is also predicted by a fit without it, which tells how far predictions are off.

    Raises:
        ValueError: there are fewer than three runs.
    """
    if len(observations) < 3:
        raise ValueError(f"a fit needs at least 3 runs, got {len(observations)}")
    start = start or Coefficients()
    linear = [_Linear.of(observation) for observation in observations]
    values = _solved(linear, start)
    errors, in_bars = [], []
    for index, observation in enumerate(observations):
        rest = linear[:index] + linear[index + 1 :]
        step = observation.predicted(start.having(dict(zip(FITTED, _solved(rest, start), strict=True))))
        distance = abs(step.seconds - observation.step_s)
        errors.append(distance / observation.step_s)
        in_bars.append(distance / step.spread_s)
    place = min(math.ceil(COVERAGE * (len(in_bars) + 1)), len(in_bars)) - 1
    fitted = dict(zip(FITTED, values, strict=True)) | {"measured_error": sorted(in_bars)[place]}
    return Fit(start.having(fitted), float(np.median(errors)), len(observations))


@dataclass(frozen=True)
class _Linear:
    """An observation whose phases are written as `at_zero + slopes @ coefficients` for each resource.

    Attributes:
        phases: of each name, `[resources]` and `[resources, FITTED]`.
        prefetch: as in `StepSetup`.
        step_s: measured.
        optimizer_s: measured.
    """

    phases: Mapping[str, tuple[Vector, Matrix]]
    prefetch: bool
    step_s: float
    optimizer_s: float

    @classmethod
    def of(cls, observation: Observation) -> "_Linear":
        """Prices the work once for each coefficient alone."""
        zero = Coefficients.zero().having(dict.fromkeys(FACTORS, 0.0))
        machines = [observation.machine(zero.having({name: 1.0}), keeps_all=True) for name in FITTED]
        nothing = observation.machine(zero, keeps_all=True)
        num_further = nothing.num_further_exchanges(observation.work)
        phases = {}
        for index, phase in enumerate(nothing.phases):
            at_zero = _busy(phase.loads_s(observation.work), phase.fixed_s + num_further * phase.again_s)
            slopes = []
            for machine in machines:
                other = machine.phases[index]
                slopes.append(_busy(other.loads_s(observation.work), other.fixed_s + num_further * other.again_s) - at_zero)
            phases[phase.name] = (at_zero, np.stack(slopes, axis=1))
        return cls(phases, observation.setup.prefetch, observation.step_s, observation.optimizer_s)

    def equations(self, values: Vector) -> list[tuple[Vector, float]]:
        """(slopes, what they must add up to), in parts of the measured step: the whole step, and its optimizer alone."""
        found: dict[str, tuple[float, Vector]] = {}
        for name, (at_zero, slopes) in self.phases.items():
            busiest = int((at_zero + slopes @ values).argmax())
            found[name] = (float(at_zero[busiest]), slopes[busiest])
        is_beside = {name: name in BESIDE and (self.prefetch or name != TIERS) for name in found}
        chain = _added([found[name] for name in found if not is_beside[name]])
        optimizer = _added([found[name] for name in OPTIMIZER_PHASES])
        parts = [chain, *(found[name] for name in found if is_beside[name])]
        step = max(parts, key=lambda part: part[0] + float(part[1] @ values))
        return [
            (step[1] / self.step_s, (self.step_s - step[0]) / self.step_s),
            (optimizer[1] / self.step_s, (self.optimizer_s - optimizer[0]) / self.step_s),
        ]


def _busy(loads: Vector, fixed_s: float) -> Vector:
    """Seconds of the phase by resource; one that is never busy stands for phases without any."""
    return np.append(loads, 0.0) + fixed_s


def _added(parts: Sequence[tuple[float, Vector]]) -> tuple[float, Vector]:
    return sum(part[0] for part in parts), np.sum([part[1] for part in parts], axis=0)


def _solved(observations: Sequence[_Linear], start: Coefficients) -> list[float]:
    """The coefficients in the order of `FITTED`."""
    origin = np.array([getattr(start, name) for name in FITTED])
    scales = np.where(origin > 0, origin, 1.0)
    target = origin / scales
    values, best, best_loss = origin.copy(), origin.copy(), math.inf
    for _ in range(_ROUNDS):
        equations = [equation for observation in observations for equation in observation.equations(values)]
        slopes = np.stack([slope for slope, _ in equations]) * scales
        wanted = np.array([value for _, value in equations])
        residuals = slopes @ (values / scales) - wanted
        pull = _PULL * float(((values / scales - target) ** 2).sum())
        loss = float(np.where(abs(residuals) < _HUBER, residuals**2, 2 * _HUBER * abs(residuals) - _HUBER**2).sum()) + pull
        if loss < best_loss * (1 - 1e-9):
            best, best_loss = values, loss
        weights = np.minimum(1.0, _HUBER / np.maximum(abs(residuals), 1e-12))
        gram = (slopes * weights[:, None]).T @ slopes + _PULL * np.eye(len(FITTED))
        moments = (slopes * weights[:, None]).T @ wanted + _PULL * target
        # Half way, or two sets of busiest resources could take turns for ever.
        values = 0.5 * values + 0.5 * nonnegative_least_squares(gram, moments) * scales
    return [float(value) for value in best]


def nonnegative_least_squares(gram: npt.NDArray[np.float64], moments: Vector) -> Vector:
    """Minimises `x @ gram @ x / 2 - moments @ x` over x >= 0 for a positive definite `gram` (Lawson and Hanson's active sets)."""
    size = len(moments)
    solution: Vector = np.zeros(size)
    is_free = np.zeros(size, dtype=bool)
    for _ in range(10 * size):
        gradient = np.where(is_free, -np.inf, moments - gram @ solution)
        entering = int(gradient.argmax())
        if gradient[entering] <= 1e-12 * max(1.0, float(abs(moments).max())):
            break
        is_free[entering] = True
        while True:
            free = np.flatnonzero(is_free)
            trial = np.zeros(size)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], moments[free])
            if not free.size or trial[free].min() > 0:
                solution = trial
                break
            leaving = free[trial[free] <= 0]
            steps = solution[leaving] / np.maximum(solution[leaving] - trial[leaving], 1e-300)
            solution = solution + float(steps.min()) * (trial - solution)
            solution[leaving[steps <= steps.min()]] = 0.0
            is_free &= solution > 0
    return solution
