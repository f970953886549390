"""Several hosts on one machine: network namespaces joined by rate-limited links, one torchrun agent in each.

Tests and benchmarks prove everything that crosses hosts here. Every host is a network namespace with an interface `eth0`
(and `eth1`, if there is a second link) that leads to a switch, itself a namespace with one bridge per link, so the
machine's own network is never touched and any number of these clusters may run side by side. Both ends of each link are
shaped with a token bucket, hence each direction of each link has the stated rate.

    with hosts(2, ranks_per_host=1, bandwidth="100mbit") as cluster:
        result = cluster.run(["-m", "torchrec_kstep.train", "train.epochs=1"], deadline_s=120)
        print(result.sent_bytes, result.stdout[0])

Only the standard library is imported, so rank scripts may import `StepFloor` from here at no cost.
"""

import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path

TORCHRUN = "torch.distributed.run"
RENDEZVOUS_PORT = 29500
RENDEZVOUS_ID = "hosts"
STEP_FLOOR_VARIABLE = "KSTEP_STEP_FLOOR_MS"
MTU_BYTES = 9000  # jumbo frames, usual between training hosts: headers stay below 1 % of what the interfaces count
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP with timestamps 32
BURST = "256kb"  # tokens of a shaped link; must exceed the largest segment the kernel hands over (64 KiB)
STOP_GRACE_S = 10.0  # between asking agents to stop and killing them
PEER_GRACE_S = 30.0  # for the peers of an agent that failed to fail by themselves, so that their causes are seen too
CHECKOUT = Path(__file__).resolve().parents[1]

_NAMESPACE = re.compile(r"^kstep_(?P<pid>\d+)_(?P<born>\d+)_\d+_(h\d+|sw)$")
_clusters = itertools.count()


class HostsError(Exception):
    """A command of the harness or one of its agents failed, or the deadline passed; carries every rank's output."""


class StepFloor:
    """Sleeps until each step has lasted a given time, so that few cores can stand for several hosts.

    With real compute on shared cores, four "hosts" would each run four times slower; a floor above the true step time gives
    all of them the same pace, as if each had cores of its own. Every table measured with it must say so.
    """

    def __init__(self, floor_ms: float | None = None) -> None:
        """Starts the first step now; without `floor_ms` the harness's setting is used (0 = no floor)."""
        self.floor_s = (float(os.environ.get(STEP_FLOOR_VARIABLE, "0")) if floor_ms is None else floor_ms) / 1e3
        self._started_s = time.monotonic()

    def wait(self) -> None:
        """Ends a step: sleeps for what is left of its floor and starts the next one."""
        left_s = self._started_s + self.floor_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        self._started_s = time.monotonic()


@dataclass(frozen=True)
class Link:
    """One network that all hosts share, e.g. `eth0`.

    Attributes:
        index: 0 for the first link, 1 for the second.
        bandwidth: rate of every host's link in each direction, in `tc`'s words (`100mbit`, `1gbit`); "" = unlimited.
    """

    index: int
    bandwidth: str

    @property
    def interface(self) -> str:
        """Name of the interface inside each host."""
        return f"eth{self.index}"

    def address(self, host: int) -> str:
        """IPv4 address of `host` on this link."""
        return f"10.77.{self.index}.{host + 1}"


@dataclass(frozen=True)
class HostsResult:
    """What one run left behind; lists are indexed by rank or by host.

    Attributes:
        exit_codes: per host, the agent's exit code; None = still running at the deadline and killed.
        agent_output: per host, stdout and stderr of the torchrun agent itself.
        stdout: per rank, all attempts after one another.
        stderr: per rank, likewise.
        sent_bytes: per link and host, bytes that left through the interface during the run.
        received_bytes: per link and host.
        sent_packets: per link and host, as the interface counts them (a segment that the kernel will cut later is one).
        duration_s: wall time of the run.
    """

    exit_codes: list[int | None]
    agent_output: list[str]
    stdout: list[str]
    stderr: list[str]
    sent_bytes: list[list[int]]
    received_bytes: list[list[int]]
    sent_packets: list[list[int]]
    duration_s: float

    @property
    def sent_payload_bytes(self) -> int:
        """Bytes that left all hosts without the headers, of which every acknowledgement consists: what programs wrote."""
        return sum(map(sum, self.sent_bytes)) - HEADER_BYTES * sum(map(sum, self.sent_packets))

    def json_lines(self) -> list[list[dict[str, object]]]:
        """Returns per rank the stdout lines that are JSON objects: how rank scripts hand back results."""
        return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in self.stdout]

    def report(self) -> str:
        """Returns every host's exit code and every rank's output that holds an error, for a person to read."""
        parts = []
        for host, (code, output) in enumerate(zip(self.exit_codes, self.agent_output, strict=True)):
            parts.append(f"--- host {host}: {'killed at the deadline' if code is None else f'exit code {code}'} ---\n{output[-6000:]}")
        for rank, (out, err) in enumerate(zip(self.stdout, self.stderr, strict=True)):
            if err.strip() or out.strip():
                parts.append(f"--- rank {rank}: stdout (end) ---\n{out[-2000:]}\n--- rank {rank}: stderr (end) ---\n{err[-6000:]}")
        return "\n".join(parts)


@dataclass
class Hosts:
    """A running cluster; made by `hosts`."""

    name: str
    num_hosts: int
    ranks_per_host: int
    links: list[Link]
    step_floor_ms: float
    _agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def namespace(self, host: int) -> str:
        """Name of the network namespace of `host`."""
        return f"{self.name}_h{host}"

    @property
    def switch(self) -> str:
        """Name of the namespace that holds the bridges."""
        return f"{self.name}_sw"

    def run(
        self,
        command: Sequence[str],
        *,
        deadline_s: float = 120.0,
        join_timeout_s: int = 30,
        max_restarts: int = 0,
        launcher: str = TORCHRUN,
        endpoint: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        missing_hosts: Sequence[int] = (),
        command_of_host: Mapping[int, Sequence[str]] | None = None,
        env_of_host: Mapping[int, Mapping[str, str]] | None = None,
        check: bool = True,
    ) -> HostsResult:
        """Starts one torchrun agent per host with `ranks_per_host` ranks each and waits for all of them.

        Args:
            command: what torchrun runs: a script or `-m module`, then its arguments.
            deadline_s: after this many seconds everything is killed.
            join_timeout_s: how long agents wait for one another.
            max_restarts: torchrun's `--max-restarts`.
            launcher: module that starts a host's ranks: torchrun, or one that takes the same options and finds out by itself
                who holds the store and which interface leads to the others.
            endpoint: where the hosts meet, if not at a port of host 0.
            env: variables added to every rank's environment.
            cwd: working directory; the caller's if not given.
            missing_hosts: hosts whose agent is never started.
            command_of_host: commands of single hosts that differ from `command`.
            env_of_host: further variables of single hosts.
            check: raise if an agent fails or the deadline passes.

        Raises:
            HostsError: (with `check`) with the output of every host and every rank.
        """
        started_s = time.monotonic()
        before = self._counters()
        logs = Path(tempfile.mkdtemp(prefix=f"{self.name}_"))
        try:
            started = [host for host in range(self.num_hosts) if host not in missing_hosts]
            options = {"--max-restarts": max_restarts, "--rdzv-endpoint": endpoint or f"{self.links[0].address(0)}:{RENDEZVOUS_PORT}"}
            agents = {
                host: self._start_agent(
                    host,
                    [*self._launch(host, launcher, options, join_timeout_s, logs), *(command_of_host or {}).get(host, command)],
                    {**(env or {}), **(env_of_host or {}).get(host, {})},
                    logs,
                    cwd,
                )
                for host in started
            }
            hung = self._wait(agents, started_s + deadline_s)
            result = self._collect(agents, hung, logs, before, time.monotonic() - started_s)
        finally:
            self.stop()
            shutil.rmtree(logs, ignore_errors=True)
        if check and any(code != 0 for code in result.exit_codes):
            raise HostsError(f"{self.num_hosts} hosts x {self.ranks_per_host} ranks: {' '.join(command)}\n{result.report()}")
        return result

    def sent_bytes(self) -> list[list[int]]:
        """Returns the bytes that have left through each link's interface on each host since the cluster was made."""
        return [[sent for sent, _, _ in link] for link in self._counters()]

    def execute(self, host: int, command: Sequence[str], *, deadline_s: float = 30.0) -> str:
        """Runs one plain command inside a host's namespace and returns its stdout.

        Raises:
            HostsError: it failed or did not end in time.
        """
        return _run("ip", "netns", "exec", self.namespace(host), *command, deadline_s=deadline_s)

    @contextmanager
    def listening(self, host: int, port: int) -> Iterator[int]:
        """Holds a TCP port inside a host, as another program would; yields the holder's process id."""
        code = f"import socket, time; server = socket.create_server(('', {port})); print('ready', flush=True); time.sleep(3600)"
        command = ["ip", "netns", "exec", self.namespace(host), sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent) as holder:
            try:
                if holder.stdout is None or holder.stdout.readline() != "ready\n":
                    raise HostsError(f"port {port} of host {host} cannot be held")
                yield holder.pid
            finally:
                holder.kill()

    def stop(self) -> None:
        """Ends everything that runs inside the hosts."""
        for agent in self._agents:
            if agent.poll() is None:
                agent.terminate()
        deadline_s = time.monotonic() + STOP_GRACE_S
        for agent in self._agents:
            try:
                agent.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        self._agents.clear()
        for host in range(self.num_hosts):
            _kill_namespace(self.namespace(host))

    def _launch(self, host: int, launcher: str, options: Mapping[str, object], join_timeout_s: int, logs: Path) -> list[str]:
        """Returns the command line of a host's agent, up to what the agent runs."""
        conf = f"join_timeout={join_timeout_s},read_timeout={join_timeout_s},last_call_timeout=1"
        command = [sys.executable, "-m", launcher, f"--nnodes={self.num_hosts}", f"--nproc-per-node={self.ranks_per_host}"]
        command += [f"--node-rank={host}", f"--rdzv-id={RENDEZVOUS_ID}", *(f"{name}={value}" for name, value in options.items())]
        command += ["--redirects=3", f"--log-dir={logs / f'host{host}'}"]
        if launcher != TORCHRUN:
            return [*command, f"--rdzv-conf={conf}"]
        # Without its own address an agent gives its peers the machine's host name, which leads out of the namespace.
        return [
            *command,
            "--rdzv-backend=c10d",
            f"--rdzv-conf={conf},is_host={int(host == 0)}",
            f"--local-addr={self.links[0].address(host)}",
        ]

    def _start_agent(
        self, host: int, command: Sequence[str], env: Mapping[str, str], logs: Path, cwd: Path | None
    ) -> "subprocess.Popen[bytes]":
        (logs / f"host{host}").mkdir()
        interfaces = ",".join(link.interface for link in self.links)
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": interfaces,
            "NCCL_SOCKET_IFNAME": interfaces,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")])),
            STEP_FLOOR_VARIABLE: str(self.step_floor_ms),
            **env,
        }
        with (logs / f"host{host}" / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=cwd,
                preexec_fn=_die_with_parent,
            )
        self._agents.append(agent)
        return agent

    def _wait(self, agents: Mapping[int, "subprocess.Popen[bytes]"], deadline_s: float) -> set[int]:
        """Waits for all agents; returns the hosts that were still running when time was up."""
        while any(agent.poll() is None for agent in agents.values()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
            if any(agent.poll() not in (None, 0) for agent in agents.values()):
                deadline_s = min(deadline_s, time.monotonic() + PEER_GRACE_S)
        return {host for host, agent in agents.items() if agent.poll() is None}

    def _collect(
        self,
        agents: Mapping[int, "subprocess.Popen[bytes]"],
        hung: set[int],
        logs: Path,
        before: list[list[tuple[int, int, int]]],
        duration_s: float,
    ) -> HostsResult:
        after = self._counters()
        moved = [[tuple(map(sub, *pair)) for pair in zip(now, then, strict=True)] for now, then in zip(after, before, strict=True)]
        output = {host: (logs / f"host{host}" / "agent.log").read_text(errors="replace") for host in agents}
        return HostsResult(
            exit_codes=[None if host in hung else agents[host].poll() if host in agents else 0 for host in range(self.num_hosts)],
            agent_output=[output.get(host, "(not started)") for host in range(self.num_hosts)],
            stdout=self._rank_output(logs, "stdout.log"),
            stderr=self._rank_output(logs, "stderr.log"),
            sent_bytes=[[sent for sent, _, _ in link] for link in moved],
            received_bytes=[[received for _, received, _ in link] for link in moved],
            sent_packets=[[packets for _, _, packets in link] for link in moved],
            duration_s=duration_s,
        )

    def _rank_output(self, logs: Path, name: str) -> list[str]:
        """Reads what each rank wrote; torchrun keeps it under `<id>_<random>/attempt_<n>/<local_rank>/`."""
        return [
            "".join(path.read_text(errors="replace") for path in sorted((logs / f"host{host}").glob(f"*/attempt_*/{local_rank}/{name}")))
            for host in range(self.num_hosts)
            for local_rank in range(self.ranks_per_host)
        ]

    def _counters(self) -> list[list[tuple[int, int, int]]]:
        """Returns bytes sent, bytes received and packets sent of every link's interface on every host."""
        return [[_interface_counters(self.namespace(host), link.interface) for host in range(self.num_hosts)] for link in self.links]


@contextmanager
def hosts(
    n: int,
    ranks_per_host: int,
    bandwidth: str | None = None,
    second_link: str | None = None,
    step_floor_ms: float | None = None,
) -> Iterator[Hosts]:
    """Builds a cluster of `n` hosts, and removes it with everything that still runs in it.

    Clusters of processes that died are recognised by process id and birth time and removed first.

    Args:
        n: hosts, 1 to 250.
        ranks_per_host: ranks of each host's torchrun agent.
        bandwidth: rate of each direction of each host's link `eth0`, in `tc`'s words (`100mbit`); None or "" = unlimited.
        second_link: the same for a second interface `eth1`; None = no such interface, "" = unlimited.
        step_floor_ms: handed to ranks for `StepFloor`; every table that uses it must say so.

    Raises:
        HostsError: a link could not be made; see `why_unavailable`.
    """
    remove_stale()
    links = [Link(0, bandwidth or "")] + ([Link(1, second_link)] if second_link is not None else [])
    cluster = Hosts(
        name=f"kstep_{os.getpid()}_{_birth(os.getpid())}_{next(_clusters)}",
        num_hosts=n,
        ranks_per_host=ranks_per_host,
        links=links,
        step_floor_ms=step_floor_ms or 0.0,
    )
    try:
        _build(cluster)
        yield cluster
    finally:
        cluster.stop()
        for name in [*(cluster.namespace(host) for host in range(n)), cluster.switch]:
            _delete_namespace(name)


def why_unavailable() -> str:
    """Returns why clusters cannot be made here ("" if they can), by making a small one."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing (Debian package iproute2)"
    try:
        with hosts(1, 1, "1gbit"):
            return ""
    except HostsError as error:
        return f"network namespaces are not permitted here: {str(error).splitlines()[0]}"


def remove_stale() -> list[str]:
    """Removes the namespaces that dead processes left behind, ends what still runs in them, and returns their names."""
    root = Path("/run/netns")
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    stale = []
    for name in names:
        match = _NAMESPACE.match(name)
        if match and _birth(int(match["pid"])) != int(match["born"]):
            _kill_namespace(name)
            _delete_namespace(name)
            stale.append(name)
    return stale


def _build(cluster: Hosts) -> None:
    _run("ip", "netns", "add", cluster.switch)
    for link in cluster.links:
        _run("ip", "-n", cluster.switch, "link", "add", f"br{link.index}", "mtu", str(MTU_BYTES), "type", "bridge")
        _run("ip", "-n", cluster.switch, "link", "set", f"br{link.index}", "up")
    for host in range(cluster.num_hosts):
        namespace = cluster.namespace(host)
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        for link in cluster.links:
            port = f"h{host}l{link.index}"
            ends = ["link", "add", link.interface, "mtu", str(MTU_BYTES), "type", "veth", "peer", "name", port]
            _run("ip", "-n", namespace, *ends, "mtu", str(MTU_BYTES), "netns", cluster.switch)
            _run("ip", "-n", cluster.switch, "link", "set", port, "master", f"br{link.index}", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{link.address(host)}/24", "dev", link.interface)
            _run("ip", "-n", namespace, "link", "set", link.interface, "up")
            if link.bandwidth:
                for where, device in ((namespace, link.interface), (cluster.switch, port)):
                    _run(
                        "tc",
                        "-n",
                        where,
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        "root",
                        "tbf",
                        "rate",
                        link.bandwidth,
                        "burst",
                        BURST,
                        "latency",
                        "50ms",
                    )


def _run(*command: str, deadline_s: float = 30.0) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        raise HostsError(f"`{' '.join(command)}` did not end within {deadline_s:.0f} s") from None
    if done.returncode:
        raise HostsError(f"`{' '.join(command)}` failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _interface_counters(namespace: str, interface: str) -> tuple[int, int, int]:
    (device,) = json.loads(_run("ip", "-n", namespace, "-json", "-stats", "link", "show", "dev", interface))
    sent, received = device["stats64"]["tx"], device["stats64"]["rx"]
    return sent["bytes"], received["bytes"], sent["packets"]


def _delete_namespace(name: str) -> None:
    """Deletes a namespace, which takes its interfaces with it; one that is gone already is fine."""
    if Path("/run/netns", name).exists():
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30.0, check=False)


def _kill_namespace(name: str) -> None:
    """Kills every process inside a namespace; all of them descend from an agent of ours."""
    if not Path("/run/netns", name).exists():
        return
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=30.0, check=False)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _birth(pid: int) -> int:
    """Returns when a process started, in clock ticks since boot (0 if there is no such process); pids are used again, this pair is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def _die_with_parent() -> None:
    """Runs in the forked agent: the kernel ends it when this process dies, however that happens."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
