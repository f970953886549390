"""Kills a training run (torch-free, real file system) with SIGKILL at random moments, and continues it.

What breaks otherwise: a snapshot that was reported committed is lost, damaged, or does not continue to the same bits. The
driver compares every row of every snapshot with a fresh computation of that step, so a kill that loses or mixes a step
cannot pass. Power loss, which a kill does not imitate, is covered by the C++ sweep over every sync.
"""

import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.crash.native import build

NUM_STEPS = 400
STEPS_PER_SNAPSHOT = 3
MAX_RUN_S = 0.6  # a kill falls somewhere in the first so many seconds of a run
FAST_KILLS = 20
SLOW_KILLS = 500
DRIVER_TIMEOUT_S = 60

pytestmark = pytest.mark.timeout(1200)  # the first test compiles the core


def _folders(tmp_path: Path) -> str:
    return f"{tmp_path}/a,{tmp_path}/b"


def _run_and_kill(driver: Path, folders: str, after_s: float) -> int:
    """Starts the run, kills it after a while, and returns the last step it reported as committed (-1: none)."""
    command = [str(driver), "run", folders, str(NUM_STEPS), str(STEPS_PER_SNAPSHOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            time.sleep(after_s)
        finally:
            process.kill()
        out, err = process.communicate(timeout=DRIVER_TIMEOUT_S)
    assert process.returncode in (-9, 0), err
    committed = [int(line.split()[1]) for line in out.splitlines() if line.startswith("step ")]
    return max(committed, default=-1)


def _check(driver: Path, folders: str) -> str:
    done = subprocess.run([str(driver), "check", folders], capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _kill_many_times(driver: Path, tmp_path: Path, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    folders = _folders(tmp_path)
    newest = -1
    for kill in range(num_kills):
        newest = max(newest, _run_and_kill(driver, folders, rng.uniform(0.0, MAX_RUN_S)))
        checked = _check(driver, folders)
        assert newest < 0 or int(checked.split()[1]) >= 1, f"seed {seed}, kill {kill}: step {newest} was committed, and no snapshot is left"
        if newest >= NUM_STEPS:  # the run is over: start a fresh one in a fresh place
            folders = _folders(tmp_path / str(kill))
            (tmp_path / str(kill)).mkdir()
            newest = -1


def test_every_kill_leaves_a_committed_snapshot(tmp_path: Path) -> None:
    _kill_many_times(build("crash_driver"), tmp_path, FAST_KILLS, seed=random.randrange(1 << 30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_kills_leave_a_committed_snapshot(tmp_path: Path) -> None:
    _kill_many_times(build("crash_driver"), tmp_path, SLOW_KILLS, seed=random.randrange(1 << 30))


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    driver = build("crash_driver")
    folders = _folders(tmp_path)
    with subprocess.Popen([str(driver), "hold", folders], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            second = subprocess.run([str(driver), "check", folders], capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)
        finally:
            holder.kill()
    assert second.returncode == 1
    assert "another process or handle has this store open" in second.stderr
    assert f"{tmp_path}/a/LOCK" in second.stderr
    _check(driver, folders)  # the lock went with its holder


def test_works_with_few_file_handles(tmp_path: Path) -> None:
    """A store of many segments under `ulimit -n 64`."""
    driver = build("crash_driver")
    command = f'ulimit -n 64 && exec "{driver}" run "{_folders(tmp_path)}" 120 10'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
    _check(driver, _folders(tmp_path))
