"""`python -m torchrec_kstep.calibrate`: from run directories to a file beside the topology. Layer: unit."""

from pathlib import Path

import pytest

from tests.planners import SMALL, planner, sharders, task, without_drives
from torchrec_kstep import calibrate
from torchrec_kstep.cost.calibration import read_calibration
from torchrec_kstep.planner.forecast import Measured, write_comparison
from torchrec_kstep.topology import ClusterTopology, topology_text


def runs(folder: Path, topology: ClusterTopology = SMALL) -> list[str]:
    """Run directories of four sizes, each twice as slow as predicted."""
    found = []
    for number, batch_size in enumerate((64, 512, 2048, 8192)):
        made = planner(topology, 1, 1, batch_size=batch_size)
        made.plan(task([1_000, 50_000]), sharders("tiered"))
        forecast = made.forecast()
        run = folder / f"run{number}"
        run.mkdir()
        optimizer_s = 2 * forecast.step.seconds_of("optimizer")
        write_comparison(run, forecast, Measured(100, 2 * forecast.step.seconds - optimizer_s, optimizer_s))
        found.append(str(run))
    return found


def test_runs_are_fitted_and_the_file_lies_beside_the_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(topology_text(SMALL))
    assert calibrate.main(["--topology", str(file), *runs(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "run3" in told
    assert "step_s" in told
    found = read_calibration(tmp_path / "machine.calibration.json", SMALL)
    assert found.num_runs == 4
    made = planner(SMALL, 1, 1, batch_size=1024, calibration=found)
    made.plan(task([1_000, 50_000]), sharders("tiered"))
    before = planner(SMALL, 1, 1, batch_size=1024)
    before.plan(task([1_000, 50_000]), sharders("tiered"))
    assert made.placement is not None
    assert before.placement is not None
    assert made.placement.step.seconds == pytest.approx(2 * before.placement.step.seconds, rel=0.1)


def test_what_cannot_be_fitted_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = runs(tmp_path)
    assert calibrate.main(["--topology", "small_cpu", folders[0]]) == 1
    assert "at least 3 runs, got 1" in capsys.readouterr().err
    assert calibrate.main(["--topology", "two_socket_cpu", *folders]) == 1
    assert "ran beside other numbers of cores" in capsys.readouterr().err
    assert calibrate.main(["--topology", "small_cpu", *folders, str(tmp_path)]) == 1
    assert "holds no prediction.json" in capsys.readouterr().err
    assert calibrate.main(["--topology", "nowhere", *folders]) == 1


def test_other_drives_and_cards_do_not_matter(tmp_path: Path) -> None:
    folders = runs(tmp_path, without_drives(SMALL))
    assert calibrate.main(["--topology", "small_cpu", "--out", str(tmp_path / "c.json"), *folders]) == 0
