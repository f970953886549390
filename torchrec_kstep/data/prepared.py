"""A prepared set on disk as a `Dataset`."""

from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from torchrec_kstep.data.batch_memory import BatchMemory
from torchrec_kstep.data.columns import RowGroup
from torchrec_kstep.data.dataset import BatchStream
from torchrec_kstep.data.manifest import Manifest, check_files, read_manifest
from torchrec_kstep.data.order import BatchOrder, num_own_rows_before, shares
from torchrec_kstep.data.own_rows import RowCursor, gather
from torchrec_kstep.data.window_memory import SpareMemory
from torchrec_kstep.data.windows import WindowSource
from torchrec_kstep.types import SPLITS, Batch, FeatureSchema, Split


class PreparedSet:
    """A prepared set on disk, as a `Dataset`.

    Opening reads the manifest and the footers and checks both; rows are read by the streams alone, each with files and
    threads of its own. A stream holds the row groups of two windows (`shuffle_row_groups` each, divided over the ranks where
    their number divides it): the one in use, and the next one, which is decoded meanwhile. Their memory is kept for the next
    stream.

    Args:
        folder: the prepared set.
        limit: rows of the training split that are used, the first ones; 0 = all.
        shuffle_row_groups: row groups that are mixed, see `order`.
        prefetch_batches: batches made ahead per stream; 0 = everything happens in the caller's thread.

    Raises:
        DataError: the set is missing, damaged, of another version, or holds ids outside their tables.
    """

    def __init__(self, folder: Path, limit: int = 0, shuffle_row_groups: int = 16, prefetch_batches: int = 2) -> None:
        """Opens the set, see the class."""
        self.manifest: Manifest = read_manifest(folder)
        check_files(folder, self.manifest)
        self._schema = self.manifest.feature_schema()
        self._shuffle_row_groups = shuffle_row_groups
        self._prefetch_batches = prefetch_batches
        self._spare_memory = SpareMemory(self.manifest)
        self._batch_memory = BatchMemory()
        self._verified: set[RowGroup] = set()
        self._row_groups = {split: _row_groups(folder, self.manifest, split, limit if split == "train" else 0) for split in SPLITS}

    @property
    def schema(self) -> FeatureSchema:
        """Names of the columns and rows of the tables."""
        return self._schema

    @property
    def fingerprint(self) -> str:
        """Digest of the raw files and the options of preparation."""
        return self.manifest.fingerprint

    def num_rows(self, split: Split) -> int:
        """Rows of a split over all ranks, after the limit."""
        return sum(group.num_rows for group in self._row_groups[split])

    def batches(self, split: Split, order: BatchOrder, start_step: int = 0) -> BatchStream:
        """Makes the stream of the order's rank, see `Dataset.batches`."""
        return BatchStream(
            num_steps=order.num_steps(self.num_rows(split)),
            start_step=start_step,
            micro_batches=order.micro_batches,
            prefetch_batches=self._prefetch_batches,
            make_batches=lambda: self._iterate(split, order, start_step),
        )

    def _iterate(self, split: Split, order: BatchOrder, start_step: int) -> Generator[Batch, None, None]:
        num_rows = self.num_rows(split)
        bag_names = [column.name for column in self.manifest.sparse if column.is_bag]
        source = WindowSource(
            self._row_groups[split],
            self.manifest,
            self._shuffle_row_groups,
            self._spare_memory,
            self._verified,
            is_ahead=self._prefetch_batches > 0,
        )
        windows = source.decode(order, num_own_rows_before(order, num_rows, start_step))
        with closing(RowCursor(windows, self._spare_memory.give_back)) as cursor:
            for share in shares(order, num_rows, start_step):
                yield gather(cursor.next_rows(share.num_rows), bag_names, self._schema, self._batch_memory, share)


def _row_groups(folder: Path, manifest: Manifest, split: Split, limit: int) -> list[RowGroup]:
    groups = []
    num_rows_left = limit or manifest.splits[split].num_rows
    for part in manifest.files(split):
        for index, rows in enumerate(part.row_group_rows):
            groups.append(RowGroup(folder / part.path, index, min(rows, num_rows_left)))
            num_rows_left -= groups[-1].num_rows
    return [group for group in groups if group.num_rows]
