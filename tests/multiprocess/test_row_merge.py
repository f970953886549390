"""Merge rounds between processes: the bits of the same replicas in one process, and what happens when one is missing."""

import hashlib
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.merging import dram_group, random_steps, rows_of
from tests.spawn import RanksFailed, SpawnRanks
from torchrec_kstep.errors import DivergenceError, MergeError
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.rows import RowMerger
from torchrec_kstep.merge.transport import ProcessGroupTransport
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess
K = 3
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper_in_buckets": {"row_merge": "mean", "moments": "delta", "bucket_bytes": 1 << 16},
    "int8": {"wire": "int8"},
    "late": {"wire": "bf16", "overlap_steps": 2},
}


def digest(group: RowGroup) -> str:
    data = b"".join(values.numpy().tobytes() for _, values in sorted(rows_of(group).items()))
    return hashlib.sha256(data).hexdigest()


def counts_of(report: RoundReport) -> tuple[Any, ...]:
    """What a report tells that does not depend on time."""
    phases = [dict(sorted(counts.items())) for counts in (report.sent_bytes, report.received_bytes, report.num_union_rows)]
    return (*phases, report.num_buckets, report.drift)


def transport(timeout_s: float = 30.0) -> ProcessGroupTransport:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return ProcessGroupTransport(group, timeout_s)


def merged_by_processes(world: World, way: str) -> tuple[str, list[tuple[Any, ...]]]:
    spec = MergeSpec(k=K, **WAYS[way])
    group = dram_group()
    merger = RowMerger([group], spec, transport())
    reports = []
    for round_index in range(3):
        random_steps(group, world.rank, round_index * 5 + 1, K)
        if spec.overlap_steps:
            merger.begin(round_index, K)
            random_steps(group, world.rank, round_index * 5 + 1 + K, 2)
            reports.append(counts_of(merger.finish(2)))
        else:
            reports.append(counts_of(merger.merge(round_index, K)))
    reports.append(counts_of(merger.merge(3, K)))
    merger.close()
    return digest(group), reports


@pytest.mark.parametrize("way", WAYS)
def test_processes_end_with_the_bits_and_bytes_of_replicas_in_one_process(way: str, spawn_ranks: SpawnRanks) -> None:
    results = spawn_ranks(merged_by_processes, 3, args=(way,))
    spec = MergeSpec(k=K, **WAYS[way])
    groups = [dram_group() for _ in range(3)]
    merger = InProcessMerger([[group] for group in groups], spec)
    reports = []
    for round_index in range(3):
        for replica, group in enumerate(groups):
            random_steps(group, replica, round_index * 5 + 1, K)
        if spec.overlap_steps:
            merger.begin(round_index, K)
            for replica, group in enumerate(groups):
                random_steps(group, replica, round_index * 5 + 1 + K, 2)
            reports.append(merger.finish(2))
        else:
            reports.append(merger.merge(round_index, K))
    reports.append(merger.merge(3, K))
    for replica, (rows, counts) in enumerate(results):
        assert rows == digest(groups[0])
        assert counts == [counts_of(by_replica[replica]) for by_replica in reports]


def refused(world: World, fault: str) -> str:
    """Brings a fault about in one replica of three, and returns what this one raised."""
    is_faulty = world.rank == 1
    group = dram_group()
    joined = transport(timeout_s=5.0)
    begin_s = time.monotonic()
    try:
        merger = RowMerger([group], MergeSpec(k=4 if fault == "spec" and is_faulty else 3), joined)
        random_steps(group, world.rank, 1, K)
        if fault == "nan" and is_faulty:
            rows = group.touched_rows(0)[:1]
            group.write(0, rows, group.read(0, rows) * float("nan"))
        if fault == "late" and is_faulty:
            time.sleep(12.0)
            return "late"
        merger.merge(0, K)
    except (MergeError, DivergenceError) as error:
        assert time.monotonic() - begin_s < 11.0
        return f"{type(error).__name__}: {error}"
    return "merged"


@pytest.mark.parametrize(
    ("fault", "message"),
    [("spec", r"MergeError: replicas [1] hold"), ("nan", "DivergenceError: merge round 0: table 'small' of replica 1")],
)
def test_every_replica_refuses_a_round_that_one_cannot_do(fault: str, message: str, spawn_ranks: SpawnRanks) -> None:
    for text in spawn_ranks(refused, 3, args=(fault,)):
        assert text.startswith(message)


@pytest.mark.slow
def test_nobody_waits_longer_than_the_deadline_for_a_replica_that_is_late(spawn_ranks: SpawnRanks) -> None:
    first, late, last = spawn_ranks(refused, 3, args=("late",))
    assert late == "late"
    for replica, text in ((0, first), (2, last)):
        assert text.startswith(f"MergeError: merge round, opening of weight, m, v: replica {replica} of 3 (ranks [0, 1, 2]) could not")
        assert "5.0 s" in text


def killed(world: World, is_late: bool) -> None:
    group = dram_group()
    merger = RowMerger([group], MergeSpec(k=K, overlap_steps=1), transport(timeout_s=10.0))
    random_steps(group, world.rank, 1, K)
    if world.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    try:
        if is_late:
            merger.begin(0, K)
            merger.finish()
        else:
            merger.merge(0, K)
    except MergeError as error:
        raise RuntimeError(f"told within the deadline: {time.monotonic() - begin_s < 9.0}") from error
    finally:
        merger.close()


@pytest.mark.parametrize("is_late", [False, True], ids=["in_place", "beside_training"])
def test_a_killed_replica_is_told_at_once(is_late: bool, spawn_ranks: SpawnRanks) -> None:
    with pytest.raises(RanksFailed) as caught:
        spawn_ranks(killed, 2, args=(is_late,))
    assert "told within the deadline: True" in str(caught.value)
    assert "exit code -9" in str(caught.value)
