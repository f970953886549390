"""All together, beside synchronous TorchRec: tables four times larger than the DRAM given to them, on hosts behind slow links.

2 hosts x 2 ranks in network namespaces, 100 Mbit/s each way; DLRM on the Criteo-shaped stream with a planted teacher, so that AUC
means something. `ours`: rows on SSD behind a cache of a quarter of their bytes, KStepAdam with k = 20 and a replica per host,
placed by `TopologyShardingPlanner` on the machines as probed, routes carried out, submitted through TorchX. Peers, launched the
same way over the same links and data, every row in DRAM, one model over both hosts:

- `torchrec_sync`: TorchRec with FBGEMM's fused kernels and row-wise Adagrad (FBGEMM has no Adam on CPU), TorchRec's planner;
- `sync_adam`: our kernel in DRAM with the Adam that `ours` uses, so that accuracy can be compared at one optimizer.

Samples per second are those between log lines of training, all ranks, merge rounds included, the first third left out. Bytes are
what left the interfaces of both hosts over the whole job, evaluation included. `prediction` is the planner's, uncalibrated, for a
step of `ours`. All hosts share this machine's cores.
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._harness import Harness, Spread
from benchmarks.hosts import hosts, why_unavailable
from benchmarks.torchx_hosts import run_by_torchx
from benchmarks.train_runs import QUIET, last_tiers, step_seconds, synthetic
from torchrec_kstep.planner.forecast import read_comparison
from torchrec_kstep.probing.drives import measure_drive
from torchrec_kstep.topology import Link, Nic, this_machine, topology_text
from torchrec_kstep.units import MIB

NUM_HOSTS, RANKS_PER_HOST = 2, 2
LINK, LINK_BYTES_PER_S = "100mbit", 1.25e7
DRAM_SHARE = 4  # bytes of rows over the DRAM for them
ZIPF = 1.05
K = 20
ADAM_VALUES = 3  # per weight: itself and two moments
VALUE_BYTES = 4
DEADLINE_S = 1500.0


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        num_tables: of the model.
        num_rows: of each table.
        dim: columns.
        batch: rows of data per rank.
        num_steps: optimizer steps.
        num_eval_rows: of validation and of test, each.
    """

    num_tables: int
    num_rows: int
    dim: int
    batch: int
    num_steps: int
    num_eval_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows with Adam's moments."""
        return self.num_tables * self.num_rows * self.dim * ADAM_VALUES * VALUE_BYTES

    def overrides(self) -> list[str]:
        """Of every run: model, data, length."""
        num_ranks = NUM_HOSTS * RANKS_PER_HOST
        return [
            *QUIET,
            *synthetic([self.num_rows] * self.num_tables, self.batch * num_ranks * self.num_steps, ZIPF),
            f"data.synthetic.num_eval_rows={self.num_eval_rows}",
            "model=dlrm",
            f"model.embedding_dim={self.dim}",
            "model.mlp=[64,32]",
            "model.bottom_mlp=[64]",
            f"train.batch_size={self.batch}",
            f"train.log_every_steps={max(K, self.num_steps // 12)}",
        ]


QUICK = Size(num_tables=4, num_rows=8_000, dim=16, batch=128, num_steps=60, num_eval_rows=4_000)
FULL = Size(num_tables=16, num_rows=50_000, dim=32, batch=1024, num_steps=400, num_eval_rows=40_000)


@dataclass(frozen=True)
class JobResult:
    """What one job did.

    Attributes:
        samples_per_s: between log lines.
        test_auc: at its end, of the weights with the best validation AUC.
        sent_bytes: over both hosts' links.
        duration_s: of the job, from submission on.
        tiers: rank 0's counters.
        run_dir: of the job.
    """

    samples_per_s: list[float]
    test_auc: float
    sent_bytes: int
    duration_s: float
    tiers: dict[str, float]
    run_dir: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the three jobs and returns the exit status; where namespaces are not permitted it says so and measures nothing."""
    harness = Harness.from_command_line("end_to_end", __doc__, argv)
    if reason := why_unavailable():
        print(f"end_to_end: skipped: {reason}")
        return 0
    size = QUICK if harness.quick else FULL
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:  # not below /tmp, which may be memory
        folder = Path(scratch)
        print(f"ours: rows of {size.row_bytes / MIB:.0f} MiB, {size.row_bytes / DRAM_SHARE / MIB:.0f} MiB of DRAM for them", flush=True)
        ours = run_job(size, our_overrides(size, folder), folder / "ours")
        forecast, measured = read_comparison(ours.run_dir)
        peers = {}
        for name, overrides in peer_overrides(size).items():
            print(name, flush=True)
            peers[name] = run_job(size, overrides, folder / name)
    case = {"hosts": f"{NUM_HOSTS}x{RANKS_PER_HOST}", "link": LINK, "k": K, "dram": f"1/{DRAM_SHARE}", "batch": size.batch, "dim": size.dim}
    num_samples = size.num_steps * size.batch * NUM_HOSTS * RANKS_PER_HOST
    for name, peer in peers.items():
        speeds = Spread.of(ours.samples_per_s), Spread.of(peer.samples_per_s)
        harness.record(case, "training", "samples/s", speeds[0], name, speeds[1], higher_is_better=True)
        harness.record(case, "test AUC", "", ours.test_auc, name, peer.test_auc, higher_is_better=True)
        sent = (one.sent_bytes / num_samples for one in (ours, peer))
        harness.record(case, "bytes between hosts", "B/sample", next(sent), name, next(sent))
        harness.record(case, "job", "s", ours.duration_s, name, peer.duration_s)
    harness.record(case, "rows found in DRAM", "", ours.tiers["hit_ratio"])
    harness.record(case, "step", "ms", measured.step_s * 1e3, "prediction", forecast.step.seconds * 1e3)
    return harness.finish()


def our_overrides(size: Size, folder: Path) -> list[str]:
    """Rows on SSD, k-step merging, placed on the machines as they are described below `folder`."""
    drive = folder / "drive"
    segment_bytes = 1 << 20
    return [
        *size.overrides(),
        "tiers=dram_ssd",
        f"tiers.dram_bytes={size.row_bytes // DRAM_SHARE}B",
        f"tiers.segment_bytes={segment_bytes}B",
        "kstep=default",
        f"kstep.k={K}",
        "kstep.wire=bf16",
        f"planner.topology={machines(folder / 'machines.yaml', drive)}",
    ]


def peer_overrides(size: Size) -> dict[str, list[str]]:
    """Synchronous training with every row in DRAM."""
    common = [*size.overrides(), "routes=off"]
    return {
        "torchrec_sync": [
            *common,
            "planner=fused",
            "planner.engine=torchrec",
            "optim=adagrad",
            "optim.embedding=rowwise_adagrad",
            "optim.embedding_lr=0.02",
        ],
        "sync_adam": [*common, "planner.engine=torchrec"],
    }


def machines(file: Path, drive: Path) -> Path:
    """Describes the hosts: each has its part of this machine's cores, memory and drive, as measured, and the link they have."""
    measured, _ = measure_drive("drive0", drive, 5.0, lambda _: None, file_bytes=64 * MIB)
    reads = tuple(replace(point, operations_per_s=point.operations_per_s / NUM_HOSTS) for point in measured.reads)
    half_drive = replace(measured, reads=reads, write_bytes_per_s=measured.write_bytes_per_s / NUM_HOSTS)
    local = this_machine()
    host = replace(local.hosts[0], nics=(Nic("nic0", LINK_BYTES_PER_S, "eth0"),), drives=(half_drive,))
    numa = host.numa_nodes[0]
    shared = replace(
        numa,
        num_cores=max(1, numa.num_cores // NUM_HOSTS),
        memory_bytes=numa.memory_bytes // NUM_HOSTS,
        bandwidth_bytes_per_s=numa.bandwidth_bytes_per_s / NUM_HOSTS,
    )
    links = tuple(Link((numa.name, part), 1e10, 1.0) for part in ("nic0", "drive0"))
    host = replace(host, numa_nodes=(shared, *host.numa_nodes[1:]), links=links)
    file.write_text(topology_text(replace(local, name="two hosts", hosts=(host,)).with_hosts(NUM_HOSTS)), encoding="utf-8")
    return file


def run_job(size: Size, overrides: Sequence[str], folder: Path) -> JobResult:
    """Runs one job through TorchX on hosts of its own.

    Raises:
        RuntimeError: it printed no test AUC.
        HostsError: it failed.
    """
    folder.mkdir()
    run_dir = folder / "run"
    with hosts(NUM_HOSTS, RANKS_PER_HOST, LINK) as cluster:
        result = run_by_torchx(cluster, [*overrides, f"run_dir={run_dir}"], folder, DEADLINE_S)
    found = re.search(r"test AUC (\d\.\d+)$", result.stdout[0], flags=re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no test AUC: {result.stdout[0][-3000:]}")
    global_batch = size.batch * NUM_HOSTS * RANKS_PER_HOST
    return JobResult(
        samples_per_s=[global_batch / seconds for seconds in step_seconds(run_dir)],
        test_auc=float(found.group(1)),
        sent_bytes=sum(map(sum, result.sent_bytes)),
        duration_s=result.duration_s,
        tiers=last_tiers(run_dir),
        run_dir=run_dir,
    )


if __name__ == "__main__":
    sys.exit(main())
