"""Layer: train, as users start it. Goal: the command trains real data to a known quality, and a killed job continues exactly."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess

SMALL = [
    "data.limit=4000",
    "train.epochs=2",
    "train.log_every_steps=2",
    "train.batch_size=128",
    "model.dropout=0.1",
    "metrics.tensorboard=false",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first run of this file puts the prepared MovieLens-100K."""
    pytest.importorskip("recbole", reason="MovieLens-100K comes with recbole: make install")
    return tmp_path_factory.mktemp("prepared") / "ml100k"


def command(prepared: Path, run_dir: Path, *overrides: str) -> list[str]:
    return ["-m", "torchrec_kstep.train", f"data.path={prepared}", f"run_dir={run_dir}", *overrides]


def train(launcher: list[str], arguments: list[str], cwd: Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """Runs the command from a folder of its own, one thread a process, and returns how it ended."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*launcher, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.timeout(300)
def test_the_command_trains_saves_its_configuration_and_continues(prepared: Path, tmp_path: Path) -> None:
    first = train([sys.executable], command(prepared, tmp_path / "run", *SMALL), tmp_path)
    assert first.returncode == 0, first.stderr
    last = first.stdout.splitlines()[-1]
    assert re.fullmatch(r"test AUC 0\.\d{4}", last)
    assert "data.limit" not in first.stderr
    assert "limit: 4000" in (tmp_path / "run" / "config.yaml").read_text()
    again = train([sys.executable], command(prepared, tmp_path / "run", *SMALL), tmp_path)
    assert again.returncode == 0, again.stderr
    assert "continued from step 64" in again.stdout
    assert again.stdout.splitlines()[-1] == last
    record = {name: (tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "run.json", "metrics.jsonl")}
    refused = train([sys.executable], command(prepared, tmp_path / "run", *SMALL, "model.embedding_dim=8"), tmp_path)
    assert refused.returncode == 1
    assert "model.embedding_dim: checkpoint '16', this run '8'" in refused.stderr
    assert "Traceback" not in refused.stderr
    for name, content in record.items():
        assert (tmp_path / "run" / name).read_bytes() == content, f"a refused start leaves {name} alone"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_job_continues_to_the_result_of_an_unbroken_one(prepared: Path, tmp_path: Path, victim: int) -> None:
    options = [*SMALL, "checkpoint.every_steps=3", "planner.sharding=row_wise", "data.limit=2000"]
    whole = train(TORCHRUN, command(prepared, tmp_path / "whole", *options), tmp_path, 150)
    assert whole.returncode == 0, whole.stderr
    run_dir = tmp_path / "broken"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [*TORCHRUN, *command(prepared, run_dir, *options)],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 100
        while not list(run_dir.glob("checkpoints/step_*[0-9]")):
            assert time.monotonic() < deadline_s, "no checkpoint"
            time.sleep(0.02)
        os.kill(_rank_process(job.pid, victim), signal.SIGKILL)
        assert job.wait(60) != 0
    finally:
        job.kill()
        job.communicate()
    resumed = train(TORCHRUN, command(prepared, run_dir, *options), tmp_path, 150)
    assert resumed.returncode == 0, resumed.stderr
    assert "continued from step" in resumed.stdout
    ends = [re.findall(r"test of step.*", run.stdout)[-1] for run in (whole, resumed)]
    assert ends[0] == ends[1]


def _rank_process(launcher: int, rank: int) -> int:
    """Process of a rank among the children of torchrun."""
    children = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    for child in children:
        if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{child}/environ").read_text():
            return child
    raise AssertionError(f"no process of rank {rank} among {children}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_movielens_100k_reaches_its_auc(prepared: Path, tmp_path: Path) -> None:
    ended = train([sys.executable], command(prepared, tmp_path / "run"), tmp_path, 850)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split()[-1]) >= 0.775
