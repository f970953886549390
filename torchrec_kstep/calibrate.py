"""`python -m torchrec_kstep.calibrate --topology FILE RUN [RUN...]`: fits the cost model's coefficients to runs of `train`.

    python -m torchrec_kstep.calibrate --topology machine.yaml runs/*     at least 3 runs, better 20 that differ in all that counts

Each run directory holds what was predicted and what was measured (`prediction.json`). The result is written beside the topology, where
`train` and `plan` find it with the topology. Runs on other machines than the topology's are refused; numbers of hosts, cards and drives
may differ, because they are no part of what is fitted.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchrec_kstep._version import __version__
from torchrec_kstep.cost import Coefficients
from torchrec_kstep.cost.calibration import Calibration, calibration_file
from torchrec_kstep.cost.coefficients import FITTED
from torchrec_kstep.cost.fit import Observation, fit
from torchrec_kstep.errors import KStepError, PlanError
from torchrec_kstep.planner.forecast import observation, read_comparison
from torchrec_kstep.topology import ClusterTopology, find_topology, load_topology
from torchrec_kstep.units import format_seconds

EXIT_FAILURE = 1
MIN_RUNS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Fits, prints both predictions of every run, writes the file; returns 0, or 1 where the runs do not allow it."""
    args = _parser().parse_args(argv)
    try:
        file = find_topology(args.topology)
        topology = load_topology(file)
        observations = [_observation(folder, topology) for folder in args.runs]
        if len(observations) < MIN_RUNS:
            raise PlanError(f"a calibration needs at least {MIN_RUNS} runs, got {len(observations)}")
        out = args.out or calibration_file(file)
        made = calibrated(observations, topology)
        made.write(out)
        for line in _told(observations, made):
            print(line)
        print(f"calibration: {out}")
    except (KStepError, OSError) as error:
        print(f"torchrec_kstep.calibrate: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def calibrated(observations: Sequence[Observation], topology: ClusterTopology) -> Calibration:
    """Fits coefficients to runs on the cores of a topology."""
    found = fit(observations)
    return Calibration(
        coefficients=found.coefficients,
        median_error=found.median_error,
        num_runs=found.num_runs,
        cores=topology.cores_fingerprint,
        made=time.strftime("%Y-%m-%d %H:%M"),
        surroundings={
            "host": platform.node(),
            "cores": str(os.cpu_count()),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "torchrec_kstep": __version__,
        },
    )


def _observation(folder: Path, topology: ClusterTopology) -> Observation:
    made, measured = read_comparison(folder)
    if made.topology.cores_fingerprint != topology.cores_fingerprint:
        raise PlanError(
            f"{folder} ran beside other numbers of cores, memories and exchange than {topology.name!r} has: give the topology that it was "
            "planned with (planner.topology), or leave the run out"
        )
    return observation(folder.name, made, measured)


def _told(observations: Sequence[Observation], made: Calibration) -> list[str]:
    """Each run before and after, then the coefficients."""
    lines = [f"{'run':<40} {'measured':>10} {'before':>10} {'after':>10}"]
    for one in observations:
        before, after = one.predicted(Coefficients()), one.predicted(made.coefficients)
        times = (one.step_s, before.seconds, after.seconds)
        lines.append(f"{one.name:<40} " + " ".join(f"{format_seconds(seconds):>10}" for seconds in times))
    lines.append(f"{'coefficient':<40} {'':>10} {'before':>10} {'after':>10}")
    for name in (*FITTED, "measured_error"):
        lines.append(f"{name:<40} {'':>10} {getattr(Coefficients(), name):>10.3g} {getattr(made.coefficients, name):>10.3g}")
    lines.append(f"{made.told} (each run predicted by a fit without it)")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_kstep.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories of train")
    parser.add_argument("--topology", required=True, metavar="NAME|FILE", help="the machines that they ran on, as planner.topology")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: beside the topology")
    return parser


if __name__ == "__main__":
    sys.exit(main())
