"""Launches that go wrong on several hosts: each ends by itself on every host, and the cause is said in one line.

How long that takes is reported by benchmarks.bench_hosts, not asserted here: on an idle machine it is under 30 s.

The second layer of tests/unit/launch and tests/unit/doctor: real processes, interfaces and stores. Slow: each starts two
hosts, and some wait for a deadline on purpose.
"""

import re
import shutil
import socket
from pathlib import Path

import pytest

from benchmarks.hosts import RENDEZVOUS_PORT, Hosts, HostsResult, hosts

pytestmark = pytest.mark.slow

LAUNCHER = "torchrec_kstep.launch"
JOIN_TIMEOUT_S = 12
TRAIN = ["-m", "torchrec_kstep.train", "train.max_steps=5", "metrics.tensorboard=false"]


def fails(cluster: Hosts, command: list[str], **options: object) -> HostsResult:
    """Runs a launch that must fail on every host that was started, with a code, before the deadline."""
    options = {"launcher": LAUNCHER, "join_timeout_s": JOIN_TIMEOUT_S, "deadline_s": 100, **options}
    result = cluster.run(command, check=False, **options)  # type: ignore[arg-type]
    missing = options.get("missing_hosts", ())
    for host in range(cluster.num_hosts):
        if host not in missing:  # type: ignore[operator]
            assert result.exit_codes[host] not in (0, None), result.report()
    return result


def line(output: str, start: str = "torchrec_kstep.launch: ") -> str:
    """The first line of the launcher's own."""
    return next((text for text in output.splitlines() if text.startswith(start)), f"no line of the launcher in: {output}")


def test_a_wrong_address() -> None:
    with hosts(2, 1) as cluster:
        result = fails(cluster, TRAIN, endpoint="10.77.0.99:29500")
    assert "10.77.0.99 is no address of this host (10.77.0.1 on eth0)" in line(result.agent_output[0])
    assert "cannot reach 10.77.0.99:29500, where host 0 should hold the rendezvous: no " in line(result.agent_output[1])


def test_a_busy_port() -> None:
    with hosts(2, 1) as cluster, cluster.listening(0, RENDEZVOUS_PORT) as holder:
        result = fails(cluster, TRAIN)
    told = re.escape(f"port {RENDEZVOUS_PORT} of this host ({socket.gethostname()}) is taken by python")
    assert re.search(rf"{told}\S* \(pid {holder}\)", line(result.agent_output[0]))  # the interpreter may be called python3.11
    assert f"cannot reach 10.77.0.1:{RENDEZVOUS_PORT}" in line(result.agent_output[1])
    assert "no rendezvous store" in line(result.agent_output[1])


def test_a_missing_host() -> None:
    with hosts(3, 1) as cluster:
        result = fails(cluster, TRAIN, missing_hosts=(2,))
    assert "2 of 3 hosts came within 12 s" in line(result.agent_output[0])
    assert "10.77.0.1" in line(result.agent_output[0])
    assert "10.77.0.2" in line(result.agent_output[0])
    assert "1 missing" in line(result.agent_output[0])
    assert "1 missing" in line(result.agent_output[1]) or "host 0 ended" in line(result.agent_output[1])


def test_host_0_is_missing() -> None:
    with hosts(2, 1) as cluster:
        result = fails(cluster, TRAIN, missing_hosts=(0,))
    assert "cannot reach 10.77.0.1:29500" in line(result.agent_output[1])


def test_different_configurations(tmp_path: Path) -> None:
    with hosts(2, 1) as cluster:
        result = fails(cluster, TRAIN, command_of_host={1: [*TRAIN, "optim.lr=0.5"]}, cwd=tmp_path)
    assert "rank 1 (host 1, " in result.stderr[1]
    assert "optim.lr is 0.5, there 0.001; start all ranks with the same command line" in result.stderr[1]
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_different_code(tmp_path: Path, root: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(root / "torchrec_kstep", copy / "torchrec_kstep", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "torchrec_kstep" / "loop.py").open("a") as changed:
        changed.write("# changed\n")
    with hosts(2, 1) as cluster:
        result = fails(cluster, TRAIN, cwd=tmp_path, env_of_host={1: {"PYTHONPATH": f"{copy}:{root}"}})
    assert "code of torchrec_kstep is " in result.stderr[1]
    assert "install the same versions on all hosts" in result.stderr[1]


def test_an_interface_that_does_not_lead_to_the_other_hosts(tmp_path: Path) -> None:
    with hosts(2, 1) as cluster:
        result = fails(cluster, TRAIN, cwd=tmp_path, env={"GLOO_SOCKET_IFNAME": "lo"})
    said = "".join(result.stderr)
    assert "cannot reach host " in said
    assert "127.0.0.1 on lo): refused" in said
    assert "set GLOO_SOCKET_IFNAME" in said


def test_a_sound_launch_without_settings_finds_its_interface(tmp_path: Path) -> None:
    """Nothing but the endpoint is given: the launcher tells gloo the interface through which the hosts met."""
    with hosts(2, 2) as cluster:
        unset = {"GLOO_SOCKET_IFNAME": ""}
        result = cluster.run(TRAIN, launcher=LAUNCHER, cwd=tmp_path, env=unset, deadline_s=110)
    assert "test AUC" in result.stdout[0]
