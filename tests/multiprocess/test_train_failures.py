"""Layer: runtime. Goal: when one rank fails in any way the whole job ends soon, says the cause once, and the shell sees it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess

WALL_LIMIT_S = 90.0
JOB = [sys.executable, "-m", "tests.multiprocess.misbehaving_job"]
CAUSE = "the cause of it all"
SILENT = "does not answer: it was killed, ran out of memory or crashed without a message, or it is stopped (SIGSTOP, a debugger)"


@dataclass
class Ended:
    """How a process ended."""

    code: int
    stdout: str
    stderr: str


def run_two_ranks(way: str, culprit: int, signum: int | None = None) -> list[Ended]:
    """Runs the job with two processes of ours; `signum` goes to the culprit once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [*JOB, way, str(culprit)],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        if signum is not None:
            stdout = processes[culprit].stdout
            assert stdout is not None
            assert stdout.readline() == "ready\n"
            processes[culprit].send_signal(signum)
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=WALL_LIMIT_S)
            ended.append(Ended(process.returncode, out, err))
        return ended
    finally:
        for process in processes:
            process.kill()
            process.wait()


FAST = [("none", 0), ("exception-between", 1), ("our_error-between", 0), ("exit-between", 1), ("kill-between", 0)]
RAISING_SLOW = [("exception-before", 1), ("signalled_exception-between", 1), ("exception-after", 1), ("exception-busy", 1)]


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[tuple[str, int], "Future[list[Ended]]"]]:
    """All jobs of the fast lane, two at a time, because most of their time is waiting."""
    with ThreadPoolExecutor(2) as pool:
        yield {key: pool.submit(run_two_ranks, *key) for key in FAST}


Jobs = dict[tuple[str, int], "Future[list[Ended]]"]


def test_a_job_without_trouble_ends_with_zero_and_says_nothing(jobs: Jobs) -> None:
    for rank, ended in enumerate(jobs["none", 0].result(WALL_LIMIT_S)):
        assert (ended.code, ended.stdout, ended.stderr) == (0, f"rank {rank} is done\n", "")


@pytest.mark.parametrize(
    ("way", "culprit"),
    [("exception-between", 1), ("our_error-between", 0), *(pytest.param(*job, marks=pytest.mark.slow) for job in RAISING_SLOW)],
)
def test_a_rank_that_raises_ends_the_job_with_its_cause_once(jobs: Jobs, way: str, culprit: int) -> None:
    ended = jobs[way, culprit].result(WALL_LIMIT_S) if (way, culprit) in jobs else run_two_ranks(way, culprit)
    assert [process.code for process in ended] == [1, 1]
    everything = "".join(process.stderr for process in ended)
    assert everything.count(f"ValueError: {CAUSE}" if "exception" in way else f"error (rank {culprit}): {CAUSE}") == 1
    assert ("Traceback" in everything) == ("exception" in way), "our own errors are written for people"
    assert ended[1 - culprit].stderr == f"rank {1 - culprit} stopped, because rank {culprit} failed first\n"


def test_a_rank_that_vanishes_is_named_by_the_others(jobs: Jobs) -> None:
    ended = jobs["exit-between", 1].result(WALL_LIMIT_S)
    assert [process.code for process in ended] == [1, 3]
    assert ended[0].stderr == f"error: rank 1 {SILENT}\n"


def test_the_rank_with_the_store_can_vanish_too(jobs: Jobs) -> None:
    ended = jobs["kill-between", 0].result(WALL_LIMIT_S)
    assert [process.code for process in ended] == [-signal.SIGKILL, 1]
    assert "rank 1 stopped: lost the job's store, because the process that holds it ended" in ended[1].stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_job_cleanly(signum: signal.Signals) -> None:
    ended = run_two_ranks("wait", 0, signum)
    assert ended[0].code == 128 + signum
    assert ended[1].code == 1
    assert f"stopped by {signum.name}; start it again with the same run_dir" in ended[0].stderr
    assert "Traceback" not in ended[0].stderr + ended[1].stderr
    assert ended[1].stderr == "rank 1 stopped, because rank 0 failed first\n"


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_ended_after_the_deadline_of_a_collective() -> None:
    ended = run_two_ranks("stuck-between", 1)
    assert [process.code for process in ended] == [1, 1]
    assert "waited 15 s (distributed.timeout_s) for other ranks, which live but did not take part" in ended[0].stderr
    assert ended[1].stderr == "rank 1 stopped, because rank 0 failed first\n"


@pytest.mark.slow
@pytest.mark.parametrize(("way", "culprit"), [("exception-between", 1), ("our_error-before", 0), ("kill-between", 1), ("exit-between", 0)])
def test_torchrun_ends_with_an_error_and_the_cause_once(way: str, culprit: int) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.multiprocess.misbehaving_job",
    ]
    ended = subprocess.run([*command, way, str(culprit)], cwd=ROOT, capture_output=True, text=True, timeout=WALL_LIMIT_S)
    assert ended.returncode != 0
    if "exception" in way or "our_error" in way:
        assert ended.stderr.count(CAUSE) == (2 if "exception" in way else 1), "once as source line in the traceback, once as message"
    else:
        assert f"local_rank: {culprit}" in ended.stderr, "torchrun names a rank that vanished"
