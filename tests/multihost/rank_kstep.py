"""One rank of replicas on several hosts: `python -m tests.multihost.rank_kstep FOLDER MODE RANKS_PER_REPLICA`.

MODE `train`: trains, merges, and writes a digest of everything it holds. MODE `cut`: host 1 loses its network inside a bucket of
the second round; every rank writes what it was told and after how many seconds.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.multiprocess.dying import Watched
from tests.multiprocess.kstep_cases import Trained, outcome_of
from torchrec_kstep.replicas import KStepEnv

K, TIMEOUT_S, CUT_S = 3, 6.0, 14.0


def set_link(state: str) -> None:
    """Takes this host's interface up or down."""
    subprocess.run(["ip", "link", "set", "dev", "eth0", state], check=True, timeout=10)


def cut_network(number: int, _phase: str) -> None:
    """Between the header of a bucket and its rows; the link comes back by itself, so that the launchers can end the job."""
    if number == 2:
        set_link("down")
        threading.Timer(CUT_S, set_link, args=("up",)).start()


folder, mode, ranks_per_replica = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
env = KStepEnv.from_torchrun(ranks_per_replica, timeout_s=TIMEOUT_S if mode == "cut" else 60.0)
trained = Trained.make(env, k=K)
if mode == "train":
    trained.train(range(7))
    trained.optimizer.merge()
    digest = hashlib.sha256(b"".join(bits for _, bits in sorted(trained.bits().items()))).hexdigest()
    told = {"digest": digest, "position": env.layout.position, "hosts": env.replica_world.num_hosts}
else:
    trained.train(range(2 * K - 1))
    if env.world.rank == 1:
        merger = trained.optimizer._rows
        assert merger is not None
        merger._transport = Watched(merger._transport, cut_network, lambda _number, _phase: None)  # type: ignore[arg-type]
    begin_s = time.monotonic()
    kind, text = outcome_of(lambda: trained.train([2 * K - 1]))
    told = {"kind": kind, "text": text, "duration_s": time.monotonic() - begin_s}
(folder / f"{env.world.rank}.json").write_text(json.dumps(told), encoding="utf-8")
if mode == "cut":
    time.sleep(CUT_S + 2)  # the job ends with its network back
    os._exit(0)  # its groups are lost, so there is nothing to tear down
dist.destroy_process_group()
