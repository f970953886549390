"""docs/launching.md is true: its commands run, on one machine and on two hosts; those for schedulers as dry runs.

Runs are cut short by an override behind `optim.lr=1e-3`, and the document's addresses become those of the simulated hosts.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "launching.md").read_text()
SHORT = "optim.lr=1e-3 train.max_steps=4 train.epochs=1 metrics.tensorboard=false"
KINDS = {"bash", "bash host 0", "bash host 1", "bash dry run", "bash by hand", "python", "python by hand"}


def blocks(info: str) -> list[str]:
    return [body for found, body in re.findall(r"^```([^\n]+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL) if found == info]


def shortened(line: str) -> str:
    return line.replace("optim.lr=1e-3", SHORT)


@pytest.fixture
def environment() -> dict[str, str]:
    """An activated environment, and the checkout for the copies of it that run elsewhere."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert set(re.findall(r"^```([^\n]+)\n", TEXT, re.MULTILINE)) == KINDS


@pytest.mark.parametrize("line", "".join(blocks("bash")).splitlines())
def test_commands_for_one_machine_train(line: str, tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", shortened(line)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "test AUC 0." in done.stdout + done.stderr


@pytest.mark.parametrize("number", range(len(blocks("bash host 0"))))
def test_commands_for_two_hosts_train(number: int, tmp_path: Path, environment: dict[str, str]) -> None:
    with hosts(2, 1, "1gbit") as cluster:
        agents = [begin(cluster, host, blocks(f"bash host {host}")[number], tmp_path, environment) for host in range(2)]
        said = []
        try:
            said = [agent.communicate(timeout=300)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert "test AUC 0." in "".join(said)


def begin(cluster: Hosts, host: int, block: str, cwd: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    link = cluster.links[0]
    for number in range(2):
        block = block.replace(f"10.0.0.{number + 1}", link.address(number))
    # As on a machine of its own: nobody has told gloo which interface to use, but for plain torchrun, where the user must.
    environment = environment if "torchrec_kstep.launch" in block else {**environment, "GLOO_SOCKET_IFNAME": link.interface}
    command = ["ip", "netns", "exec", cluster.namespace(host), "bash", "-c", shortened(block)]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("line", "".join(blocks("bash dry run")).splitlines())
def test_dry_runs_for_schedulers(line: str, tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "torchrec_kstep.train" in done.stdout


@pytest.mark.parametrize("code", blocks("python"))
def test_the_request_to_kubernetes_is_made(code: str, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes", reason="the extra torchrec_kstep[kubernetes] is not installed")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "kind: Job" in done.stdout
