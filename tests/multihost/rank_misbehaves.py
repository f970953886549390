"""One rank of a job that goes wrong: `fail` raises on every rank, `hang` never ends, `die RANK FOLDER` kills one rank, once."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

kind, rank = sys.argv[1], int(os.environ["RANK"])
if kind == "fail":
    raise RuntimeError(f"rank {rank} fails on purpose")
if kind == "hang":
    time.sleep(600)
if kind == "die":
    # The second attempt is told by what the first one left: an agent whose own rank did not fail does not count its restart.
    doomed, folder, world_size = int(sys.argv[2]), Path(sys.argv[3]), int(os.environ["WORLD_SIZE"])
    if not (folder / f"started.{rank}").exists():
        (folder / f"started.{rank}").touch()
        while rank == doomed and len(list(folder.glob("started.*"))) < world_size:
            time.sleep(0.05)
        if rank == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # as in a collective: the agents end this rank and start it anew
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} finished")
