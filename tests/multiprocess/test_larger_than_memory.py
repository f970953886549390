"""Goal: `train` takes tables larger than memory, with no more to say than `tiers=dram_ssd`. Layer: multiprocess."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from torchrec_kstep.config.schema import TiersConfig
from torchrec_kstep.train import tiers_in
from torchrec_kstep.units import GIB, MIB
from torchrec_kstep.world import World

SYNTHETIC = ("data=synthetic", "data.synthetic.num_eval_rows=2000", "model=dlrm", "metrics.progress=none")


def train(run_dir: Path, *overrides: str, timeout_s: float = 110) -> dict[str, float]:
    """Trains in a process of its own; returns the last counters of the tables."""
    command = [sys.executable, "-m", "torchrec_kstep.train", *overrides, f"run_dir={run_dir}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.fullmatch(r"test AUC 0\.\d{4}", done.stdout.splitlines()[-1])
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counters: dict[str, float] = [record for record in records if record["event"] == "tiers"][-1]
    return counters


def test_rows_are_below_the_run_directory_where_no_place_is_named(tmp_path: Path) -> None:
    """Hosts may share that directory, but not a row store."""
    places = [tiers_in(tmp_path, TiersConfig(), World(rank, 4, rank % 2, 2)).ssd_paths for rank in range(4)]
    assert places == [[f"{tmp_path}/rows/host{host}"] for host in (0, 0, 1, 1)]
    named = TiersConfig(ssd_paths=["/drive/rows"])
    assert tiers_in(tmp_path, named, World()) == named


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ssd_needs_no_further_key(tmp_path: Path) -> None:
    counters = train(
        tmp_path,
        *SYNTHETIC,
        "data.synthetic.num_rows_per_table=[20000,300]",
        "train.max_steps=60",
        "tiers=dram_ssd",
        "tiers.dram_bytes=256KiB",
    )
    assert counters["misses_rows"] > 0
    assert list((tmp_path / "rows" / "host0").rglob("MANIFEST"))
    page = (tmp_path / "report.html").read_text()
    assert "Tables on SSD" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_table_of_200_million_rows_trains(tmp_path: Path) -> None:
    """77 GB of records, of which those that occur are ten times the cache."""
    counters = train(
        tmp_path,
        "experiment=larger_than_memory",
        "data.limit=100000",
        "data.synthetic.num_eval_rows=5000",
        "tiers.dram_bytes=2MiB",
        "metrics.progress=none",
        timeout_s=550,
    )
    record_bytes = 3 * 32 * 4
    assert counters["materialised_rows"] * record_bytes > 10 * 2 * MIB
    assert counters["misses_rows"] > 0
    assert counters["device_written_bytes"] > 10 * MIB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 2 * GIB
