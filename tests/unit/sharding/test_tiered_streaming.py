"""Goal: saving and loading hold a few rows at a time, never a table. Layer: unit, one-rank group."""

from pathlib import Path

import pytest
import torch

from tests.multiprocess.tiered_cases import Case, gathered, gathered_states, shard, train
from tests.multiprocess.tiny import one_rank_group
from torchrec_kstep.checkpoint import CheckpointManager, TrainState, files
from torchrec_kstep.sharding.tiered import rows_tensor
from torchrec_kstep.sharding.tiered.rows_tensor import RowBlock

CASE = Case(("tw0", "rw", "tw0"))


def test_a_checkpoint_moves_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a table larger than memory could be trained but not saved."""
    sizes: list[int] = []
    read = RowBlock._whole_fields

    def counted(block: RowBlock, rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return read(block, rows)

    monkeypatch.setattr(RowBlock, "_whole_fields", counted)
    monkeypatch.setattr(files, "BLOCK_BYTES", 5 * 4 * CASE.dim)
    monkeypatch.setattr(rows_tensor, "CHUNK_BYTES", 5 * 4 * CASE.dim)
    with one_rank_group() as world:
        dmp, other = shard(CASE, world), shard(CASE, world, seed=12)
        train(CASE, dmp, world, range(3))
        manager = CheckpointManager(tmp_path / "checkpoints", 1, {})
        manager.save(TrainState(step=3), dmp, dmp.fused_optimizer)
        manager.restore(3, other, other.fused_optimizer)
        assert 0 < max(sizes) <= 5
        expected = gathered(dmp.state_dict()) | gathered_states(dmp, world)
        actual = gathered(other.state_dict()) | gathered_states(other, world)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
