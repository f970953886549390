"""Where the rows of tiered tables are opened: in DRAM, or in a cache in DRAM over SSD."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import DramLayout, RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.sharding.tiered.shares import StoreShare, quota_of
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.world import World


class RowsOpener(Protocol):
    """Opens the rows of a group of tables."""

    def __call__(self, name: str, tables: Sequence[TableSpec], optimizer: OptimizerSpec, share: StoreShare) -> RowGroup:
        """Returns a row group over `tables`.

        Args:
            name: names the group on this rank, the same in every run of a plan; it can be the name of a folder.
            tables: the rank's shards; `num_rows` is that of the whole table, and row ids are the table's own.
            optimizer: how rows are updated.
            share: the group's part of what the host may use.
        """


@dataclass(frozen=True)
class OpenInDram:
    """Opens rows that all live in DRAM, each taking memory from its first update on.

    Attributes:
        layout: as in `RowGroup.in_dram`.
    """

    layout: DramLayout = "auto"

    def __call__(self, name: str, tables: Sequence[TableSpec], optimizer: OptimizerSpec, share: StoreShare) -> RowGroup:
        """Makes the group."""
        del name, share
        return RowGroup.in_dram(tables, optimizer, self.layout)


@dataclass(frozen=True)
class OpenOnSsd:
    """Opens rows in a cache over SSD.

    Attributes:
        tiers: sizes and places of the host.
        world: which rank of the host this is.
    """

    tiers: TierConfig
    world: World

    def __call__(self, name: str, tables: Sequence[TableSpec], optimizer: OptimizerSpec, share: StoreShare) -> TieredTables:
        """Opens one row store, in a folder named after the group below each path. Errors are those of `TieredTables.open`."""
        size, ssd_bytes = self.world.local_world_size, quota_of(share, self.tiers)
        tiers = replace(
            self.tiers,
            dram_bytes=int(self.tiers.num_dram_bytes * share.dram),
            ssd_bytes=None if ssd_bytes is None else ssd_bytes * size,  # what a store is given is divided over the ranks of the host
            ssd_paths=[str(Path(path) / name) for path in self.tiers.ssd_paths],
        )
        return TieredTables.open(tables, optimizer, tiers, world=self.world)

    def bytes_per_rank(self) -> int:
        """Returns the rank's part of the quota, or of what is free on the drives of this host where there is none."""
        quota = self.tiers.num_ssd_bytes
        if quota is None:
            folders = [_nearest_folder(Path(path)) for path in self.tiers.ssd_paths]
            quota = sum({folder.stat().st_dev: shutil.disk_usage(folder).free for folder in folders}.values())
        return quota // self.world.local_world_size


def _nearest_folder(path: Path) -> Path:
    """Returns the folder itself, or the one above it in which it would be made."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
