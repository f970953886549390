"""One TorchX job whose hosts are network namespaces: the component `kstep.train` under TorchX's local scheduler.

The local scheduler starts every host of a job on this machine. Here each enters the namespace of its own before its line of
shell runs; nothing else of the submitted role is changed.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchx.runner import get_runner
from torchx.specs import AppState, is_terminal, macros

from benchmarks.hosts import CHECKOUT, RENDEZVOUS_PORT, Hosts, HostsError
from torchrec_kstep import components

_POLL_S = 0.5


@dataclass(frozen=True)
class TorchXResult:
    """What a job left behind.

    Attributes:
        stdout: per host, with the output of its ranks.
        sent_bytes: per link and host.
        duration_s: from submission to the end.
    """

    stdout: list[str]
    sent_bytes: list[list[int]]
    duration_s: float


def run_by_torchx(cluster: Hosts, overrides: Sequence[str], folder: Path, deadline_s: float) -> TorchXResult:
    """Submits `kstep.train` for all hosts of a cluster and waits for its end.

    Args:
        cluster: hosts that have nothing else to do.
        overrides: of the training.
        folder: working directory of the ranks; logs go below it.
        deadline_s: after this many seconds the job is cancelled.

    Raises:
        HostsError: the job failed, or did not end in time; with what its hosts said.
    """
    logs = folder / "torchx"
    env = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    app = components.train(*overrides, j=f"{cluster.num_hosts}x{cluster.ranks_per_host}", env=env, rdzv_port=RENDEZVOUS_PORT)
    (role,) = app.roles
    namespace = cluster.namespace(0).removesuffix("0") + macros.replica_id
    first = f"TORCHX_RANK0_HOST={cluster.links[0].address(0)}"  # the scheduler itself would say localhost
    role.args = ["netns", "exec", namespace, "env", "-C", str(folder), first, role.entrypoint, *role.args]
    role.entrypoint = "ip"
    before, started_s = cluster.sent_bytes(), time.monotonic()
    with get_runner() as runner:
        handle = runner.run(app, "local_cwd", cfg={"log_dir": str(logs)})
        state = AppState.SUBMITTED
        try:
            while not is_terminal(state) and time.monotonic() - started_s < deadline_s:
                time.sleep(_POLL_S)
                status = runner.status(handle)
                state = AppState.UNKNOWN if status is None else status.state
        finally:
            if not is_terminal(state):
                runner.cancel(handle)
            cluster.stop()
    duration_s = time.monotonic() - started_s
    sent = [[now - then for now, then in zip(*link, strict=True)] for link in zip(cluster.sent_bytes(), before, strict=True)]
    stdout = [_logged(logs, host, "stdout.log") for host in range(cluster.num_hosts)]
    if state != AppState.SUCCEEDED:
        said = "\n".join(stdout[host][-3000:] + _logged(logs, host, "stderr.log")[-3000:] for host in range(cluster.num_hosts))
        raise HostsError(f"the job ended as {state.name} after {duration_s:.0f} s: {' '.join(overrides)}\n{said}")
    return TorchXResult(stdout, sent, duration_s)


def _logged(logs: Path, host: int, name: str) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(logs.glob(f"**/{components.train.__name__}/{host}/{name}")))
