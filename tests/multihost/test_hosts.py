"""The multi-host harness itself: links carry what they claim, faults are shown whole, nothing is left behind.

Needs network namespaces (root on Linux); skips elsewhere. No training happens here.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import CHECKOUT, HostsError, StepFloor, hosts, remove_stale

HERE = Path(__file__).parent
TRAFFIC = str(HERE / "rank_traffic.py")
MISBEHAVES = str(HERE / "rank_misbehaves.py")
MIB = 1 << 20


def namespaces_of(pid: int) -> list[str]:
    root = Path("/run/netns")
    return [path.name for path in root.iterdir() if path.name.startswith(f"kstep_{pid}_")] if root.is_dir() else []


def traffic_agrees(num_hosts: int, ranks_per_host: int, kind: str, payload_bytes: int, bandwidth: str = "") -> tuple[int, float]:
    """Runs one collective; requires that the interfaces counted what the collectives did, within 5 %."""
    with hosts(num_hosts, ranks_per_host, bandwidth) as cluster:
        result = cluster.run([TRAFFIC, kind, str(payload_bytes), str(ranks_per_host)], deadline_s=100)
    lines = [line for (line,) in result.json_lines()]
    own_count = sum(line["sent_bytes"] for line in lines)
    at_interfaces = sum(result.sent_bytes[0])
    assert at_interfaces == pytest.approx(own_count, rel=0.05), f"{kind}: interfaces {at_interfaces} B, collectives {own_count} B"
    assert sum(result.received_bytes[0]) == pytest.approx(at_interfaces, rel=0.01)
    return own_count, max(line["duration_s"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all", "all_to_all_uneven", "all_gather", "reduce_scatter", "broadcast"])
def test_interfaces_count_what_every_collective_sends(num_hosts: int, ranks_per_host: int, kind: str) -> None:
    if kind == "broadcast" and ranks_per_host > 1:
        pytest.skip("which sends of a tree cross hosts depends on its root; counted for one rank per host only")
    traffic_agrees(num_hosts, ranks_per_host, kind, 24 * MIB)


def test_a_slow_link_is_as_slow_as_it_says_and_interfaces_count_what_it_carries() -> None:
    """4 MiB each way over 100 Mbit/s need at least 0.33 s; without the token bucket they need a few milliseconds."""
    own_count, duration_s = traffic_agrees(2, 1, "all_reduce", 4 * MIB, "100mbit")
    assert own_count == 2 * 4 * MIB  # 2 ranks, each 2 (2-1)/2 of the payload
    assert duration_s > 0.8 * 4 * MIB * 8 / 100e6


def test_hosts_with_two_links_of_different_rate_reach_each_other_over_both() -> None:
    with hosts(2, 1, "1gbit", second_link="100mbit") as cluster:
        for link in cluster.links:
            cluster.execute(0, [sys.executable, "-c", _LISTEN_AND_DIAL, cluster.switch, cluster.namespace(1), link.address(0)])
        rates = [cluster.execute(1, ["tc", "qdisc", "show", "dev", link.interface]) for link in cluster.links]
    assert "rate 1Gbit" in rates[0]
    assert "rate 100Mbit" in rates[1]


# Listens on host 0 and has host 1 dial the address; fails if the greeting does not come through.
_LISTEN_AND_DIAL = """
import socket, subprocess, sys
_, switch, peer, address = sys.argv
server = socket.create_server((address, 0)); server.settimeout(10)
dial = f"import socket; socket.create_connection(({address!r}, {server.getsockname()[1]}), 5).sendall(b'hello')"
child = subprocess.Popen(["ip", "netns", "exec", peer, sys.executable, "-c", dial])
connection, _ = server.accept()
assert connection.recv(5) == b"hello"
assert child.wait(10) == 0
"""


@pytest.mark.slow
def test_every_rank_s_traceback_is_shown() -> None:
    with hosts(2, 2) as cluster, pytest.raises(HostsError) as failed:
        cluster.run([MISBEHAVES, "fail"], deadline_s=60)
    for rank in range(4):
        assert f"RuntimeError: rank {rank} fails on purpose" in str(failed.value)


def test_a_hang_ends_at_the_deadline_and_is_named() -> None:
    started_s = time.monotonic()
    with hosts(2, 1) as cluster, pytest.raises(HostsError, match="killed at the deadline"):
        cluster.run([MISBEHAVES, "hang"], deadline_s=5)
    assert time.monotonic() - started_s < 60
    assert not namespaces_of(os.getpid())


@pytest.mark.slow
def test_a_killed_rank_comes_back_when_restarts_are_allowed(tmp_path: Path) -> None:
    with hosts(2, 1) as cluster:
        result = cluster.run([MISBEHAVES, "die", "1", str(tmp_path)], deadline_s=100, max_restarts=1)
    assert (tmp_path / "started.1").exists()
    assert [f"rank {rank} finished" in result.stdout[rank] for rank in range(2)] == [True, True]


def test_what_a_killed_process_left_behind_is_removed_and_nothing_else() -> None:
    script = f"""
import sys; sys.path.insert(0, {str(CHECKOUT)!r})
from benchmarks.hosts import hosts
with hosts(2, 1) as cluster:
    print("ready", flush=True)
    cluster.run([{MISBEHAVES!r}, "hang"], deadline_s=300)
"""
    with hosts(1, 1) as mine, subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        deadline_s = time.monotonic() + 20
        inside: list[str] = []
        while not inside and time.monotonic() < deadline_s:
            inside = [pid for name in namespaces_of(other.pid) for pid in _pids(name)]
        other.send_signal(signal.SIGKILL)
        other.wait(10)
        assert len(namespaces_of(other.pid)) == 3  # two hosts and their switch
        stale = remove_stale()
        assert set(map(re.compile(rf"kstep_{other.pid}_\d+_0_(h0|h1|sw)").fullmatch, stale)).isdisjoint({None})
        assert not namespaces_of(other.pid)
        assert mine.execute(0, ["echo", "alive"]) == "alive\n"
        deadline_s = time.monotonic() + 20
        while any(Path(f"/proc/{pid}/ns/net").exists() for pid in inside) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{pid}/ns/net").exists() for pid in inside)


def _pids(namespace: str) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=10, check=False).stdout.split()


class Clock:
    """A clock that goes on only when somebody sleeps, so that a stall of the machine is no step."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_step_floor_paces_steps_and_never_hurries_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("benchmarks.hosts.time", clock)
    floor = StepFloor(30)
    for _ in range(3):
        clock.sleep(0.01)
        floor.wait()
    assert clock.now_s == pytest.approx(100.09)
    clock.sleep(0.05)
    floor.wait()
    assert clock.now_s == pytest.approx(100.14)
    floor.wait()
    assert clock.now_s == pytest.approx(100.17)


def test_ranks_receive_the_step_floor() -> None:
    with hosts(1, 1, step_floor_ms=25.0) as cluster:
        result = cluster.run([str(HERE / "rank_floor.py")], deadline_s=60)
    assert result.json_lines()[0][0]["floor_ms"] == pytest.approx(25.0)
