"""Replicas on several hosts: one that spans two of them, and a network that goes away inside a bucket of a merge round."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import hosts
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(num_hosts: int, ranks_per_host: int, folder: Path, mode: str, ranks_per_replica: int) -> list[dict[str, Any]]:
    """Runs the job and returns what each rank wrote."""
    folder.mkdir()
    with hosts(num_hosts, ranks_per_host) as cluster:
        cluster.run(["-m", "tests.multihost.rank_kstep", str(folder), mode, str(ranks_per_replica)], cwd=ROOT, deadline_s=140)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_hosts * ranks_per_host)]


def test_a_replica_over_two_hosts_ends_in_the_bits_of_one_on_one_host(tmp_path: Path) -> None:
    spread = run(4, 1, tmp_path / "spread", "train", 2)
    near = run(1, 4, tmp_path / "near", "train", 2)
    assert [rank["hosts"] for rank in spread] == [2] * 4
    assert [rank["hosts"] for rank in near] == [1] * 4
    for ranks in (spread, near):
        assert all(rank["digest"] == near[rank["position"]]["digest"] for rank in ranks)


def test_a_network_that_goes_away_inside_a_bucket_ends_every_rank_within_the_deadline(tmp_path: Path) -> None:
    """No socket closes, so nobody is told; without deadlines both would wait for TCP to give up, which takes a quarter of an hour."""
    for rank, told in enumerate(run(2, 1, tmp_path / "cut", "cut", 1)):
        assert told["kind"] == "RankFailure"
        assert f"rank {rank} (replica {rank}) lost another rank in round 1 after step 6, exchanging rows: merge round, " in told["text"]
        assert told["duration_s"] < 30
