"""Jobs run by TorchX's command line on this machine, as a user types it. Slow: each starts launchers and ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TORCHX = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "local_cwd", "-cfg", "log_dir=logs"]
SHORT = ["train.epochs=1", "metrics.tensorboard=false"]


@pytest.fixture
def environment() -> dict[str, str]:
    """PATH as in an activated environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def start(folder: Path, environment: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*TORCHX, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(job: "subprocess.Popen[str]", deadline_s: float = 240.0) -> str:
    """Waits for a job and returns what it said; what is left of it is ended."""
    try:
        return job.communicate(timeout=deadline_s)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            job.communicate(timeout=30)


def logged(folder: Path) -> str:
    """What ranks wrote to stdout, from their logs.

    Not from what TorchX shows of them: of two hosts, the follower of one may stop while its last lines are still being merged,
    because `Tee.close` returns at once to whoever calls it second.
    """
    return "".join(path.read_text() for path in folder.rglob("stdout.log"))


def test_two_hosts_on_one_machine_train_as_written(tmp_path: Path, environment: dict[str, str]) -> None:
    """`torchx run -s local_cwd kstep.train -j 2x1 -- optim.lr=1e-3`, cut short."""
    job = start(tmp_path, environment, "kstep.train", "-j", "2x1", "--", "optim.lr=1e-3", "train.max_steps=5", *SHORT)
    said = finish(job)
    assert job.returncode == 0, said
    assert "test AUC 0." in logged(tmp_path), said
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"/{run_dir.name}" in said  # the job's id names the run directory
    assert "lr: 0.001" in (run_dir / "config.yaml").read_text()
    facts = json.loads((run_dir / "run.json").read_text())
    assert facts["ranks"]["ranks"] == 2
    assert "<!doctype html>" in (run_dir / "report.html").read_text()
    (logs,) = set(re.findall(r"logs of the ranks: (\S+)", said))
    assert list(Path(logs).rglob("stdout.log"))


def test_a_failing_job_fails_at_the_shell_and_its_logs_stay(tmp_path: Path, environment: dict[str, str]) -> None:
    job = start(tmp_path, environment, "kstep.train", "--", "data=criteo", "data.path=/nonexistent/set", *SHORT)
    said = finish(job)
    assert job.returncode != 0
    assert "/nonexistent/set holds no prepared set" in said
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")]
    assert any("/nonexistent/set holds no prepared set" in text for text in logs)


def test_a_killed_rank_resumes_from_the_newest_checkpoint(tmp_path: Path, environment: dict[str, str]) -> None:
    overrides = ["train.max_steps=300", "train.epochs=9", "checkpoint.every_steps=20", "metrics.tensorboard=false"]
    job = start(tmp_path, environment, "kstep.train", "-j", "2x1", "--max_retries", "1", "--", *overrides)
    try:
        run_dir = wait_for(lambda: next(iter((tmp_path / "runs").glob("*/checkpoints/step_??????????")), None)).parent.parent
        os.kill(wait_for(lambda: rank_process(run_dir.name, 1)), signal.SIGKILL)
    except BaseException:
        os.killpg(job.pid, signal.SIGTERM)
        raise
    said = finish(job)
    assert job.returncode == 0, said
    first, second = json.loads((run_dir / "run.json").read_text())["attempts"]
    assert first["from_step"] == 0
    assert second["from_step"] > 0, said
    assert f"continued from step {second['from_step']}" in logged(tmp_path), said
    assert "test AUC 0." in logged(tmp_path), said


def wait_for(find, deadline_s: float = 120.0):  # type: ignore[no-untyped-def]
    """Returns what `find` finds, once it finds something."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if found := find():
            return found
        time.sleep(0.05)
    pytest.fail(f"nothing found within {deadline_s} s")


def rank_process(job_id: str, rank: int) -> int | None:
    """Finds the process of a rank by the variables that torchrun gave it."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TORCHELASTIC_RUN_ID={job_id}".encode() in variables and f"RANK={rank}".encode() in variables:
            return int(environ.parent.name)
    return None
