"""Training jobs that can be killed: `train` on one or more ranks, each a process, with tables on SSD and a set made from a seed.

The processes are forked from a server that has imported torch once, so that one starts in a fraction of a second.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.spawn import PRELOADED
from torchrec_kstep.checkpoint.manifest import read_manifest
from torchrec_kstep.storage.snapshot import Snapshot

NUM_STEPS = 48
OVERRIDES = [
    "data=synthetic",
    "data.synthetic.num_eval_rows=64",
    "data.synthetic.num_rows_per_table=[300,40,9]",
    "data.synthetic.num_dense=2",
    "data.synthetic.max_ids_per_bag=3",
    "model.mlp=[8]",
    "model.embedding_dim=4",
    "model.dropout=0.1",
    "planner=tiered",
    "planner.sharding=row_wise",
    "tiers=dram_ssd",
    "tiers.dram_bytes=4KiB",
    "tiers.segment_bytes=64KiB",
    "train.batch_size=16",
    "train.epochs=2",
    "train.early_stop_patience=0",
    "train.log_every_steps=1",
    "checkpoint.every_steps=4",
    "metrics.tensorboard=false",
    "metrics.report=false",
    "metrics.progress=none",
]
JOB_LIMIT_S = 90.0
POLL_S = 0.0005


@dataclass(frozen=True)
class TrainingJob:
    """One run: its folder, and its ranks."""

    folder: Path
    num_ranks: int

    @property
    def run_dir(self) -> Path:
        """What `run_dir` says."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """What all attempts and ranks print."""
        return self.folder / "log.txt"

    def start(self) -> list[BaseProcess]:
        """Starts an attempt; it continues from the newest checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = [
            *OVERRIDES,
            f"data.synthetic.num_train_rows={NUM_STEPS // 2 * 16 * self.num_ranks}",
            f"run_dir={self.run_dir}",
            f"tiers.ssd_paths=[{self.folder}/ssd_a,{self.folder}/ssd_b]",
        ]
        context = _server()
        port = _free_port()
        processes: list[BaseProcess] = []
        for rank in range(self.num_ranks):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.num_ranks, "LOCAL_WORLD_SIZE": self.num_ranks}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            values = {name: str(value) for name, value in env.items()} if self.num_ranks > 1 else {}
            processes.append(context.Process(target=_train, args=(arguments, values, str(self.log)), daemon=True))
            processes[-1].start()
        return processes

    def finish(self) -> "Trained":
        """Runs an attempt to its end."""
        processes = self.start()
        end_s = time.monotonic() + JOB_LIMIT_S
        try:
            for process in processes:
                process.join(max(0.0, end_s - time.monotonic()))
            assert [process.exitcode for process in processes] == [0] * self.num_ranks, self.log.read_text()
        finally:
            kill(processes)
        return Trained.of(self)

    def kill_when(self, is_time: Callable[[], bool], victims: slice = slice(None)) -> bool:
        """Runs an attempt until `is_time`, then kills ranks with SIGKILL; those that are left must end by themselves.

        Returns:
            Whether the attempt was still running.
        """
        processes = self.start()
        end_s = time.monotonic() + JOB_LIMIT_S
        try:
            while not is_time() and any(process.is_alive() for process in processes):
                assert time.monotonic() < end_s, self.log.read_text()
                time.sleep(POLL_S)
            was_running = all(process.is_alive() for process in processes)
            kill(processes[victims])
            for process in processes:
                process.join(max(0.0, end_s - time.monotonic()))
                assert process.exitcode is not None, f"a rank outlives the others by {JOB_LIMIT_S} s:\n{self.log.read_text()}"
        finally:
            kill(processes)
        return was_running

    def is_amid_snapshot(self) -> bool:
        """Whether a row store is making or removing a snapshot."""
        return any(path.name.endswith(".partial") for path in self.folder.glob("ssd_?/*/rank-*/snapshots/*"))

    def is_amid_publishing(self) -> bool:
        """Whether a checkpoint is being written, or an old one removed."""
        return any(path.name.endswith((".tmp", ".deleted")) for path in self.run_dir.glob("checkpoints/step_*"))


@dataclass(frozen=True)
class Trained:
    """What a finished run has to show.

    Attributes:
        numbers: losses and metrics by event and step, to the last bit.
        state: checksums of the last checkpoint: its files, and every row of its tables.
    """

    numbers: dict[tuple[str, int], dict[str, Any]]
    state: dict[str, str]

    @classmethod
    def of(cls, job: TrainingJob) -> "Trained":
        """Reads what a finished run left."""
        numbers = {}
        for line in (job.run_dir / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["event"] in ("train", "validation", "test"):
                key = (record["event"], record["step"])
                assert key not in numbers, f"{key} was written twice"
                numbers[key] = {name: value for name, value in record.items() if not name.endswith("_s")}
        checkpoints = sorted((job.run_dir / "checkpoints").glob("step_*"))
        manifest = read_manifest(checkpoints[-1])
        assert manifest.step == NUM_STEPS
        state = {name: info.sha256 for name, info in manifest.files.items()}
        for reference in manifest.stores:
            snapshot = Snapshot.open([job.folder / drive / reference.folder for drive in ("ssd_a", "ssd_b")], reference.snapshot)
            for part in reference.parts:
                rows = snapshot.read(part.table, torch.arange(part.first_row, part.first_row + part.num_rows))
                for field, values in rows.items():
                    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
                    state[f"{reference.rank} {reference.folder} {part.table} {field}"] = digest
        return cls(numbers, state)


def warm_up() -> None:
    """Starts the server of processes and waits for its imports."""
    process = _server().Process(target=os.getpid)
    process.start()
    process.join(JOB_LIMIT_S)
    assert process.exitcode == 0


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "torchrec_kstep.train"])
    return context


def kill(processes: list[BaseProcess]) -> None:
    """Ends them the hard way."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join(10.0 if not process.is_alive() else None)


def _train(arguments: list[str], env: dict[str, str], log: str) -> None:
    """Runs in a process of its own."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    from torchrec_kstep.train import main

    sys.exit(main(arguments))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
