"""The main job on several hosts: it trains over slow links, and what crosses them is what its collectives send."""

import json
from pathlib import Path

import pytest

from benchmarks.hosts import hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GLOBAL_BATCH = 512
STEPS = 30


def job(num_ranks: int, run_dir: Path) -> list[str]:
    settings = [f"train.batch_size={GLOBAL_BATCH // num_ranks}", f"train.max_steps={STEPS}", "train.log_every_steps=5", "train.epochs=1"]
    return [*settings, "metrics.tensorboard=false", f"run_dir={run_dir}"]


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "train"]


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_training_sends_what_its_collectives_say(num_hosts: int, tmp_path: Path) -> None:
    with hosts(num_hosts, 1, "1gbit") as cluster:
        result = cluster.run(["-m", "benchmarks.counted_train", *job(num_hosts, tmp_path / "run")], cwd=tmp_path, deadline_s=280)
    own_count = sum(lines[-1]["sent_bytes"] for lines in result.json_lines())  # type: ignore[misc]
    assert result.sent_payload_bytes == pytest.approx(own_count, rel=0.05)
    assert "test AUC" in result.stdout[0]


def test_a_slow_link_changes_the_time_and_not_the_result(tmp_path: Path) -> None:
    """The losses of 2 hosts at 100 Mbit/s are those of one host of two ranks."""
    with hosts(2, 1, "100mbit") as cluster:
        cluster.run(["-m", "torchrec_kstep.train", *job(2, tmp_path / "slow")], cwd=tmp_path, deadline_s=200)
    with hosts(1, 2) as cluster:
        cluster.run(["-m", "torchrec_kstep.train", *job(2, tmp_path / "near")], cwd=tmp_path, deadline_s=200)
    assert len(losses(tmp_path / "slow")) == STEPS // 5
    assert losses(tmp_path / "slow") == pytest.approx(losses(tmp_path / "near"), abs=1e-5)
