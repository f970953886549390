"""Goal: how the quota of SSD is divided over the row stores of a model. Layer: unit."""

import os
from pathlib import Path

import pytest
import torch

from torchrec_kstep.config.schema import OptimConfig, PlannerConfig, TiersConfig
from torchrec_kstep.errors import StorageIOError
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding import TieredEmbeddingBagCollectionSharder, build_sharders
from torchrec_kstep.sharding.tiered.opening import OpenOnSsd
from torchrec_kstep.sharding.tiered.shares import StoreShare
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.world import World

TABLES = [TableSpec("small", 100, 8)]


@pytest.mark.parametrize(("share", "local_world_size"), [(1e-6, 1), (1e-6, 4), (0.0, 2)])
def test_the_smallest_store_of_a_model_still_has_room_for_its_segments(tmp_path: Path, share: float, local_world_size: int) -> None:
    """Otherwise a model with one huge table could not be opened, because its small tables get next to nothing of the quota."""
    tiers = TierConfig("1MiB", [tmp_path], ssd_bytes="1GiB", segment_bytes="1MiB")
    world = World(0, local_world_size, 0, local_world_size)
    with OpenOnSsd(tiers, world)("small", TABLES, AdamSpec(lr=0.1), StoreShare(ssd=share, num_stores=2 * local_world_size)) as group:
        group.replay(group.dedup(torch.arange(5), torch.tensor([0, 5]), [0]))
        group.snapshot("one")
        assert group.snapshots() == ["one"]


def test_a_path_that_is_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "drive").write_text("")
    opener = OpenOnSsd(TierConfig("1MiB", [tmp_path / "drive"], segment_bytes="1MiB"), World())
    with pytest.raises(StorageIOError, match=r"drive/small/rank-0.*name folders in ssd_paths, one per drive"):
        opener("small", TABLES, AdamSpec(lr=0.1), StoreShare())


def test_packed_rows_take_memory_for_themselves_alone() -> None:
    """Ids of a long stream are scattered over tables of millions of rows: laid out directly, a few batches take the memory of all."""
    (sharder,) = build_sharders(PlannerConfig(kernel="tiered"), OptimConfig(), TiersConfig(dram_layout="packed"))
    assert isinstance(sharder, TieredEmbeddingBagCollectionSharder)
    num_rows, stride_bytes = 4_000_000, 3 * 4 * 16
    group = sharder._open_rows("large", [TableSpec("large", num_rows, 16)], AdamSpec(lr=0.1), StoreShare())
    rows = torch.arange(0, num_rows, num_rows // 32)
    before = resident_bytes()
    group.write(0, rows, torch.ones(len(rows), 16))
    assert resident_bytes() - before < num_rows * stride_bytes / 16
    assert torch.equal(group.read(0, rows), torch.ones(len(rows), 16))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
