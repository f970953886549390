"""The launcher on one machine: usage faults, and hosts that do not find one another. Each ends with one line and a code.

Several hosts are in tests/multihost/test_launch_faults.py.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrec_kstep.errors import LaunchError
from torchrec_kstep.launch import roll_call
from torchrec_kstep.launch.__main__ import main
from torchrec_kstep.launch.roll_call import _reach, call_roll


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torchrec_kstep.launch: ")]
    return line


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--nnodes", "two"], "--nnodes two"),
        (["--nnodes", "2"], "several hosts need the address of one of them"),
        (["--nnodes", "2", "--rdzv-endpoint", "10.0.0.1:port"], "expected HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", ":29500"], "expected HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:70000"], "1..65535"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "-m", "nothing"]) == 2
    assert cause in said(capsys)


def test_an_unknown_host_name_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:29500", "-m", "nothing"]) == 1
    assert "'no-such-host.invalid'" in said(capsys)


def test_host_0_must_own_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "192.0.2.1:29500", "-m", "nothing"]) == 1
    assert "192.0.2.1 is no address of this host" in said(capsys)


def test_a_port_held_by_something_else_is_named_with_its_holder(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", f"127.0.0.1:{port}", "-m", "nothing"]) == 1
    line = said(capsys)
    assert f"port {port} of this host" in line
    assert f"(pid {os.getpid()})" in line


def test_a_port_held_by_another_job_is_not_joined() -> None:
    port = free_port()
    other = subprocess.Popen([sys.executable, "-c", _ROLL_CALL.format(port=port, job="other", deadline_s=40)], stderr=subprocess.PIPE)
    try:
        _until_someone_listens(port)
        with pytest.raises(LaunchError, match=rf"port {port} of this host .* is taken"):
            call_roll("127.0.0.1", port, job="mine", num_hosts=2, deadline_s=10, host_rank=None)
    finally:
        other.kill()
        other.communicate()


def test_something_that_accepts_and_never_speaks_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "HANDSHAKE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} of this host .* is taken"):
            call_roll("127.0.0.1", port, job="mine", num_hosts=2, deadline_s=10, host_rank=None)
        with pytest.raises(LaunchError, match="no rendezvous store"):
            _reach("localhost", "127.0.0.1", port, time.monotonic() + 1)


def test_hosts_of_one_job_may_share_a_machine() -> None:
    port = free_port()
    command = [sys.executable, "-c", _ROLL_CALL.format(port=port, job="one", deadline_s=60)]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [agent.communicate(timeout=80)[0].strip() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    assert sorted(said) == ["False", "True"]  # one of them holds the store


def test_who_came_is_said_when_a_host_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nnodes", "3", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", "join_timeout=1"]
    started_s = time.monotonic()
    assert main([*arguments, "-m", "nothing"]) == 1
    line = said(capsys)
    assert f"1 of 3 hosts came within 1 s: {socket.gethostname()} (127.0.0.1); 2 missing" in line
    assert time.monotonic() - started_s < 20


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 1)])
def test_the_exit_code_of_a_failed_rank_reaches_the_shell(code: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(code)
    command = [sys.executable, "-m", "torchrec_kstep.launch", "--nproc-per-node", "1", str(tmp_path / "rank.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == expected, done.stderr
    assert "torchrec_kstep.launch: rank 0 on host" in done.stderr


# Holds (or shares) the store until all came, says whether it holds it, and leaves last if it does.
_ROLL_CALL = """
import time
from torchrec_kstep.launch.roll_call import _reach, call_roll
meeting = call_roll("127.0.0.1", {port}, job={job!r}, num_hosts=2, deadline_s={deadline_s}, host_rank=None)
print(meeting.holds_store, flush=True)
if meeting.holds_store:
    time.sleep(2)
"""


def _until_someone_listens(port: int) -> None:
    deadline_s = time.monotonic() + 40
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"nobody listens on port {port}")
