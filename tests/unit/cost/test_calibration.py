"""Calibration files: kept whole, and refused where they do not belong. Layer: unit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planners import SMALL, without_drives
from torchrec_kstep.cost import Coefficients
from torchrec_kstep.cost.calibration import Calibration, calibration_file, read_calibration
from torchrec_kstep.errors import TopologyError


def calibration() -> Calibration:
    fitted = Coefficients().having({"step_s": 0.004, "measured_error": 0.3})
    return Calibration(fitted, 0.07, 21, SMALL.cores_fingerprint, "2026-12-01 12:00", {"host": "h"})


def test_a_calibration_is_read_as_it_was_written_beside_its_topology(tmp_path: Path) -> None:
    file = calibration_file(tmp_path / "machine.yaml")
    assert file.name == "machine.calibration.json"
    calibration().write(file)
    assert read_calibration(file, SMALL) == calibration()
    assert read_calibration(file, SMALL.with_hosts(1)) == calibration()
    assert "21 runs" in calibration().told


def test_cards_and_drives_may_differ_but_not_the_cores(tmp_path: Path) -> None:
    """Otherwise coefficients of one machine would be taken for those of another."""
    file = tmp_path / "c.json"
    calibration().write(file)
    host = SMALL.hosts[0]
    assert read_calibration(file, without_drives(SMALL)) == calibration()
    other = replace(SMALL, hosts=(replace(host, numa_nodes=(replace(host.numa_nodes[0], num_cores=99), *host.numa_nodes[1:])),))
    with pytest.raises(TopologyError, match="was fitted beside other numbers of cores"):
        read_calibration(file, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 9}, "another format"),
        ({"coefficients": {"step_s": -1.0}}, "negative or not finite"),
        ({"coefficients": {"stepp_s": 1.0}}, "not a calibration"),
        ({"made": None, "num_runs": "many"}, "not a calibration"),
    ],
)
def test_a_damaged_calibration_is_refused_with_what_to_do(change: dict[str, object], said: str, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    calibration().write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(TopologyError, match=said) as error:
        read_calibration(file, SMALL)
    assert str(error.value).count("calibrate anew") == 1, "one clear error"
    file.write_text("{")
    with pytest.raises(TopologyError, match="not a calibration"):
        read_calibration(file, SMALL)
