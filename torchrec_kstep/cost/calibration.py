"""Fitted coefficients as a dated file beside the topology that they belong to."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrec_kstep.cost.coefficients import Coefficients
from torchrec_kstep.errors import TopologyError
from torchrec_kstep.topology import ClusterTopology

FORMAT = 2
SUFFIX = ".calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Coefficients that were fitted to runs.

    Attributes:
        coefficients: of the software.
        median_error: of predictions of runs that the fit did not see, over the measured step.
        num_runs: fitted to.
        cores: hash over what the topology says of cores, memories and exchange; the coefficients are what is left beside these.
        made: when.
        surroundings: versions and hardware.
    """

    coefficients: Coefficients
    median_error: float
    num_runs: int
    cores: str
    made: str
    surroundings: Mapping[str, str]

    def write(self, file: Path) -> None:
        """Writes the file; a reader never sees half of it."""
        values = {
            "format": FORMAT,
            "made": self.made,
            "cores": self.cores,
            "num_runs": self.num_runs,
            "median_error": self.median_error,
            "coefficients": self.coefficients.values(),
            "surroundings": dict(self.surroundings),
        }
        unfinished = file.with_name(file.name + ".tmp")
        unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(file)

    @property
    def told(self) -> str:
        """In one line."""
        return f"calibrated {self.made} on {self.num_runs} runs, median error {self.median_error:.0%}"


def calibration_file(topology_file: Path) -> Path:
    """Where the calibration of a topology file lies: beside it."""
    return topology_file.with_name(topology_file.stem + SUFFIX)


def read_calibration(file: Path, topology: ClusterTopology) -> Calibration:
    """Reads a calibration that must have been fitted for these cores.

    Raises:
        TopologyError: it cannot be read, is damaged, or belongs to other measurements.
    """
    again = f"calibrate anew (python -m torchrec_kstep.calibrate), or delete {file}"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        fault = "" if values["format"] == FORMAT else f"a calibration of another format than {FORMAT}"
        numbers = {str(name): float(value) for name, value in values["coefficients"].items()}
        if any(not 0 <= value < float("inf") for value in numbers.values()):
            fault = fault or "a coefficient is negative or not finite"
        if fault:
            raise TopologyError(f"{file}: {fault}: {again}")
        found = Calibration(
            Coefficients(**numbers),
            float(values["median_error"]),
            int(values["num_runs"]),
            str(values["cores"]),
            str(values["made"]),
            {str(name): str(value) for name, value in values["surroundings"].items()},
        )
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{file}: cannot be read: {error}") from error
    except TopologyError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TopologyError(f"{file}: not a calibration: {type(error).__name__}: {error}; {again}") from error
    if found.cores != topology.cores_fingerprint:
        raise TopologyError(f"{file} was fitted beside other numbers of cores, memories and exchange than {topology.name!r} has: {again}")
    return found
