"""Layer 3, one child process or mount per test: a full drive, few open files, memory within what was announced.

What breaks otherwise: a run that dies instead of saying which path is full, that opens a file per table, or whose index takes
many times the rows.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkout import ROOT
from tests.tiers import ADAM, open_tiered, store_paths, train, uniform_table
from torchrec_kstep.errors import TierFullError
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import SgdSpec
from torchrec_kstep.storage.snapshot import Snapshot
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB, MIB


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, text=True, timeout=30, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)


def test_a_full_drive_says_so_and_the_store_recovers(small_drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 200 MB on 64 MiB: the failing step changes nothing, and works once there is space; the last snapshot stays good."""
    temporary = tmp_path / "temporary"  # of this test alone: others may be running
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    table = uniform_table(num_rows=250_000, dim=64)  # 200 MB with Adam's moments
    expected = RowGroup.in_dram([table], ADAM)
    filler = small_drive / "filler"
    filler.write_bytes(bytes(40 * MIB))
    group = open_tiered(small_drive, [table], dram_bytes="4MiB", segment_bytes="1MiB")
    train(group, 0, torch.arange(5000))
    train(expected, 0, torch.arange(5000))
    group.snapshot("good")
    begins = iter(range(5000, 250_000, 5000))
    done: list[int] = []

    def fill() -> None:
        for begin in begins:
            done.append(begin)
            train(group, 0, torch.arange(begin, begin + 5000), 2)

    with pytest.raises(TierFullError, match=rf"table 't' of the row store at {small_drive}.*\(no space\)"):
        fill()
    assert not Snapshot.open(store_paths(small_drive), "good").verify().failures
    filler.unlink()
    train(group, 0, torch.arange(done[-1], done[-1] + 5000), 2)  # the same call again
    for begin in done:
        train(expected, 0, torch.arange(begin, begin + 5000), 2)
    used = torch.arange(done[-1] + 5000)
    for field in ("weight", "m", "v"):
        assert torch.equal(group.read(0, used, field), expected.read(0, used, field)), field
    group.snapshot("better")
    assert not group.read_snapshot("better").verify().failures
    group.close()
    with open_tiered(small_drive, [table], dram_bytes="4MiB", segment_bytes="1MiB", restore="better") as again:
        assert torch.equal(again.read(0, used), expected.read(0, used))
    assert Path(tempfile.gettempdir()) == temporary
    assert not list(temporary.iterdir())


FEW_FILES = """
import resource, sys, torch
from pathlib import Path
from tests.tiers import uniform_table, train, ADAM
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB
tables = [uniform_table(f"t{i}", 4000, 1 + i, i) for i in range(26)]  # 26 record sizes: 26 logs
expected = RowGroup.in_dram(tables, ADAM)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
paths = [Path(sys.argv[1]) / f"drive{i}" for i in range(4)]
config = TierConfig("128KiB", paths, segment_bytes=64 * KIB, queue_depth=8)
with TieredTables.open(tables, ADAM, config) as group:
    for step in range(1, 4):
        for table in range(26):
            rows = torch.arange(step % 2, 4000, 2)
            assert torch.equal(train(group, table, rows, step), train(expected, table, rows, step)), (step, table)
    group.snapshot("s")
    assert len(group.segment_map()) > 64, len(group.segment_map())
    print(int(group.stats().store["open_files_count"]))
"""


def test_few_open_files_are_enough(tmp_path: Path) -> None:
    """26 tables in 26 logs over 4 drives, with more segments than files that may be open."""
    done = run_child(FEW_FILES, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) < 64


MEMORY = """
import json, sys, torch
from pathlib import Path
from tests.tiers import uniform_table
from torchrec_kstep.optim_spec import SgdSpec
from torchrec_kstep.storage.estimate import estimate
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig

def peak_bytes():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmHWM"].split()[0]) * 1024

num_rows, batch, optimizer = int(sys.argv[2]), 20_000, SgdSpec(lr=1.0)
config = TierConfig("16MiB", [Path(sys.argv[1])], queue_depth=32)

def sweep(folder, num_rows, num_batches):
    tables = [uniform_table(num_rows=num_rows, dim=16)]
    config = TierConfig("16MiB", [Path(sys.argv[1]) / folder], queue_depth=32)
    with TieredTables.open(tables, optimizer, config) as group:
        for index in range(num_batches):
            rows = torch.arange(index * batch, (index + 1) * batch) % num_rows
            group.write(0, rows, torch.ones(batch, 16))
        group.snapshot("s")
        stats = group.stats()
        return group.announcement, stats.index_bytes_per_row

sweep("warm", batch, 3)  # libraries, the op's own scratch, the allocator's arenas
before = peak_bytes()
announcement, index_bytes_per_row = sweep("full", num_rows, num_rows // batch)
expected = estimate([uniform_table(num_rows=num_rows, dim=16)], optimizer, config.num_dram_bytes, config)
print(json.dumps({"grown": peak_bytes() - before, "announced": expected.memory_bytes, "announcement": announcement,
                  "index_bytes_per_row": index_bytes_per_row}))
"""


@pytest.mark.slow
def test_memory_stays_within_what_was_announced(tmp_path: Path) -> None:
    """2 M rows x 16 floats (128 MB) behind 16 MiB: the process grows by cache, index and buffers, not by the rows."""
    done = run_child(MEMORY, tmp_path, "2000000")
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert "bytes a row" in measured["announcement"]
    assert measured["index_bytes_per_row"] <= 9
    assert measured["grown"] <= measured["announced"] + 16 * MIB, measured


def run_child(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_a_table_of_a_billion_rows_costs_what_is_touched(tmp_path: Path) -> None:
    table = TableSpec("t", 10**9, 16, 0)
    with TieredTables.open([table], SgdSpec(lr=1.0), TierConfig("1MiB", [tmp_path], segment_bytes=256 * KIB)) as group:
        assert group.stats().total("index_bytes") <= 256 * KIB
        rows = torch.arange(0, 10**9, 10**9 // 20_000)
        group.write(0, rows, torch.ones(rows.numel(), 16))
        group.flush()
        assert group.usage().total_bytes <= 1.3 * rows.numel() * (16 * 4 + 20) + 2 * MIB
        assert torch.equal(group.read(0, rows[-5:]), torch.ones(5, 16))
