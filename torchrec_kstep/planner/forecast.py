"""A prediction that can be held against a measured run: what each rank has to do in a step, and what that takes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from torchrec_kstep.cost import QUANTITIES, Coefficients, Machine, PhaseTime, StepSetup, StepTime, Table, shard_work
from torchrec_kstep.cost.fit import Observation
from torchrec_kstep.cost.machine import Matrix
from torchrec_kstep.cost.price import price
from torchrec_kstep.errors import PlanError, TopologyError
from torchrec_kstep.planner.placement import Placement
from torchrec_kstep.topology import ClusterTopology, load_topology, topology_text

FORMAT = 3
_FAR_ERRORS = 2.0  # error bars above the prediction that are no chance any more
PREDICTION_NAME, TOPOLOGY_NAME = "prediction.json", "topology.yaml"  # in a run directory


@dataclass(frozen=True)
class Forecast:
    """A prediction with all it was computed from.

    Attributes:
        topology: the machines.
        setup: of a step.
        threads_per_rank: cores that a rank computes with, at most.
        work: of all ranks of a replica, `[ranks, QUANTITIES]`.
        step: predicted.
        calibration: what the coefficients come from, in words.
    """

    topology: ClusterTopology
    setup: StepSetup
    threads_per_rank: float
    work: Matrix
    step: StepTime
    calibration: str = ""

    def quantity(self, name: str, rank: int = 0) -> float:
        """How much of a quantity a rank has per step."""
        return float(self.work[rank % len(self.work), QUANTITIES.index(name)])


@dataclass(frozen=True)
class Measured:
    """What a run took per step, without its first steps, and waiting for data not counted.

    Attributes:
        num_steps: that were measured.
        forward_backward_s: from ids to updated rows, waits for rows included.
        optimizer_s: dense optimizer and merge rounds.
        counters: per step, of rank 0; see `Forecast.quantity`.
    """

    num_steps: int
    forward_backward_s: float
    optimizer_s: float
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.forward_backward_s + self.optimizer_s


def forecast(
    topology: ClusterTopology,
    setup: StepSetup,
    threads_per_rank: float,
    tables: Sequence[Table],
    placement: Placement,
    coefficients: Coefficients,
) -> Forecast:
    """Adds up what a placement gives each rank to do.

    Args:
        topology: the machines.
        setup: of a step.
        threads_per_rank: cores of a rank.
        tables: in the order of the placement.
        placement: of these tables.
        coefficients: of the software.
    """
    machine = Machine.of(topology, setup, threads_per_rank=threads_per_rank, coefficients=coefficients)
    work = np.zeros((setup.world_size, len(QUANTITIES)))
    for table, placed in zip(tables, placement.tables, strict=True):
        shard = shard_work(table, setup, placed.sharding, len(placed.ranks), placed.tier, placed.cached_rows, machine.on_device)
        for rank in placed.ranks:
            work[rank] += shard.vector
    return Forecast(topology, setup, threads_per_rank, work, price(machine, work))


def write_comparison(run_dir: Path, made: Forecast, measured: Measured) -> None:
    """Writes a prediction with what was measured, and the topology that it was made for, into a run directory."""
    values = {
        "format": FORMAT,
        "calibration": made.calibration,
        "predicted": asdict(made.step),
        "measured": asdict(measured),
        "threads_per_rank": made.threads_per_rank,
        "setup": asdict(made.setup),
        "work": [dict(zip(QUANTITIES, row.tolist(), strict=True)) for row in made.work],
    }
    (run_dir / TOPOLOGY_NAME).write_text(topology_text(made.topology, "What this run was planned for."), encoding="utf-8")
    unfinished = run_dir / (PREDICTION_NAME + ".tmp")
    unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(run_dir / PREDICTION_NAME)


def read_comparison(run_dir: Path) -> tuple[Forecast, Measured]:
    """Reads what `write_comparison` wrote.

    Raises:
        PlanError: there is none, or it cannot be read.
        TopologyError: the topology beside it is damaged.
    """
    file = run_dir / PREDICTION_NAME
    try:
        values = cast(dict[str, Any], json.loads(file.read_text(encoding="utf-8")))
        if values["format"] != FORMAT:
            raise PlanError(f"{file}: a prediction of another format than {FORMAT}: train anew")
        step = values["predicted"]
        made = Forecast(
            load_topology(run_dir / TOPOLOGY_NAME),
            StepSetup(**values["setup"]),
            float(values["threads_per_rank"]),
            np.array([[float(row[name]) for name in QUANTITIES] for row in values["work"]]),
            StepTime(step["seconds"], step["error_s"], tuple(PhaseTime(**phase) for phase in step["phases"])),
            str(values["calibration"]),
        )
        return made, Measured(**{name.name: values["measured"][name.name] for name in fields(Measured)})
    except FileNotFoundError as error:
        raise PlanError(
            f"{run_dir} holds no {PREDICTION_NAME}: `train` writes it at the end of a run that planner.engine=topology planned"
        ) from error
    except TopologyError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(f"{file}: not a prediction: {type(error).__name__}: {error}") from error


def observation(name: str, made: Forecast, measured: Measured) -> Observation:
    """A comparison as the fit wants it."""
    return Observation(name, made.topology, made.setup, made.threads_per_rank, made.work, measured.step_s, measured.optimizer_s)


def comparison_lines(made: Forecast, measured: Measured) -> list[str]:
    """Predicted and measured, a line per part of the step, and what to make of them.

    After a calibration that is a warning where the machine was far slower than described. Before one the prediction is coarse, and a
    factor says little of the machine: what it rests on is said instead, and what narrows it.
    """
    lines = [f"{name}: predicted {predicted}, measured {found}" for name, predicted, found in comparison_rows(made, measured)]
    is_far = measured.step_s > made.step.seconds + _FAR_ERRORS * made.step.error_s
    if not made.calibration:
        lines.append(_not_calibrated(made, measured.step_s / made.step.seconds if is_far else None))
    elif is_far:
        lines.append(
            f"warning: a step took {measured.step_s / made.step.seconds:.1f} times what was predicted for {made.topology.name!r}: other "
            "work on these machines, or drives, links or cores slower than the topology says; `python -m torchrec_kstep.probe` measures "
            "them, `python -m torchrec_kstep.calibrate` fits the times of the software to this run"
        )
    return lines


def _not_calibrated(made: Forecast, times_slower: float | None) -> str:
    """What a prediction without a calibration rests on."""
    origin, probe = "probes of these machines", ""
    if not made.topology.is_measured:
        origin = f"what is declared for {made.topology.name!r}"
        probe = "`python -m torchrec_kstep.probe --out machine.yaml` measures these machines, and "
    told = f", and a step took {times_slower:.1f} times that" if times_slower is not None else ""
    return (
        f"not calibrated: predicted from {origin} alone, with times of the software from another machine{told}; {probe}"
        "`python -m torchrec_kstep.calibrate --topology machine.yaml RUN RUN RUN...` fits those times to runs with "
        "planner.topology=machine.yaml, which narrows the prediction (docs/planner.md)"
    )


def comparison_rows(made: Forecast, measured: Measured) -> list[tuple[str, str, str]]:
    """(what, predicted, measured) as texts, for words and tables alike."""
    optimizer_s = made.step.seconds_of("optimizer", "merge")

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.4g} ms"

    rows = [
        ("step", f"{ms(made.step.seconds)} +- {1e3 * made.step.error_s:.3g}", ms(measured.step_s)),
        ("of it forward and backward", ms(made.step.seconds - optimizer_s), ms(measured.forward_backward_s)),
        ("of it optimizer and merge rounds", ms(optimizer_s), ms(measured.optimizer_s)),
    ]
    if "tier_rows" in measured.counters:
        read = made.quantity("drive_reads") + made.quantity("merge_reads")
        rows.append(("rows read from SSD per step, rank 0", f"{read:,.0f}", f"{measured.counters['tier_rows']:,.0f}"))
    if "merge_bytes" in measured.counters:
        sent_bytes = made.quantity("merge_bytes") * (made.setup.num_replicas - 1)
        rows.append(("sent in merge rounds per step, rank 0", f"{sent_bytes:,.0f} bytes", f"{measured.counters['merge_bytes']:,.0f} bytes"))
    return rows
