"""Layer 2, in process: rows on SSD that replay their L2, through snapshots, restarts and readers."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.tiers import assert_same_state, open_tiered, train, uniform_table
from torchrec_kstep.errors import CorruptionError, KStepError
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.storage.export import export
from torchrec_kstep.storage.replay import ReplayState
from torchrec_kstep.storage.snapshot import Snapshot
from torchrec_kstep.units import KIB

REPLAYING = AdamSpec(lr=0.1, l2=1e-3, l2_absent_rows="replay")


def train_sparsely(group: RowGroup, steps: range) -> None:
    """A few rows per step, at rates that change, and every third step without a batch."""
    for step in steps:
        group.set_step(0.1 / (1 + step % 4), step)
        if step % 3:
            train(group, 0, torch.arange(step * 7 % 500, 900, 97), step, 0.1 / (1 + step % 4))


def test_rows_that_replay_their_l2_continue_from_a_snapshot_to_the_same_bits(tmp_path: Path) -> None:
    tables = [uniform_table()]
    expected = RowGroup.in_dram(tables, REPLAYING)
    train_sparsely(expected, range(1, 31))
    with open_tiered(tmp_path, tables, REPLAYING, dram_bytes=4 * KIB) as group:
        train_sparsely(group, range(1, 16))
        group.snapshot("step-15")
        train_sparsely(group, range(16, 25))
        group.restore("step-15")
        train_sparsely(group, range(16, 31))
        assert_same_state(group, expected, REPLAYING)
    with open_tiered(tmp_path, tables, REPLAYING, dram_bytes=4 * KIB, restore="step-15") as group:
        train_sparsely(group, range(16, 31))
        assert_same_state(group, expected, REPLAYING)


def test_a_snapshot_shows_rows_with_the_steps_they_missed(tmp_path: Path) -> None:
    """Read, evaluated and exported rows are those of the moment of the snapshot, rows without a record included."""
    tables = [uniform_table()]
    with open_tiered(tmp_path, tables, REPLAYING) as group:
        train_sparsely(group, range(1, 21))
        group.set_step(0.1, 21)
        rows = torch.arange(1000)
        present = {field.name: group.read(0, rows, field.name) for field in REPLAYING.record_fields(8)}
        group.snapshot("here")
        snapshot = group.read_snapshot("here")
        shown = snapshot.read("t", rows)
        assert all(torch.equal(shown[name], values) for name, values in present.items())
        assert bool((shown["last_step"] == 20).all())
        reader = snapshot.group()
        assert torch.equal(reader.pooled(rows, torch.arange(1001), [0]).detach(), present["weight"])
        with pytest.raises(KStepError, match="read-only"):
            train(reader, 0, rows, 21)
        chunks = list(snapshot.scan("t", 64))
        assert all(torch.equal(fields["weight"], present["weight"][ids]) for ids, fields in chunks)
        assert sum(ids.numel() for ids, _ in chunks) == group.counters()["t"]["materialised_rows"] < 1000
        assert torch.equal(export_and_read(snapshot, tmp_path / "out"), present["weight"])


def export_and_read(snapshot: Snapshot, folder: Path) -> torch.Tensor:
    (file,) = export(snapshot, folder, "parquet", with_untouched=True)
    return torch.tensor(pq.read_table(file)["weight"].to_pylist())


def test_what_a_snapshot_says_about_l2_is_checked() -> None:
    with pytest.raises(CorruptionError, match="snapshot 'x': what it says about L2"):
        ReplayState.from_json({"rule": {"kind": "adam"}}, "snapshot 'x'")
