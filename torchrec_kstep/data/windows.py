"""Decoding the windows of a stream ahead of their use. Which rows a window holds, and in which order, is `order`'s business."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from torchrec_kstep.data.background import map_ahead
from torchrec_kstep.data.columns import ColumnsDecoder, RowGroup
from torchrec_kstep.data.manifest import Manifest
from torchrec_kstep.data.open_files import OpenFiles
from torchrec_kstep.data.order import BatchOrder, Order, Window, own_row_groups, own_rows, permutation_of, plan_windows
from torchrec_kstep.data.own_rows import OwnRows
from torchrec_kstep.data.window_memory import SpareMemory

_NUM_THREADS = 2  # decoding takes three quarters of the time that a batch costs, so a third thread, which makes batches, keeps up

_Job = Callable[[], Callable[[], OwnRows] | None]
"""A piece of work for any thread. The last one of a window returns what makes its `OwnRows` when all of its jobs are done."""


@dataclass(frozen=True)
class WindowSource:
    """The row groups of a split, in file order, and how to read them.

    Attributes:
        row_groups: what the windows are made of.
        manifest: names and limits of the columns.
        shuffle_row_groups: row groups per window.
        spare_memory: where windows are decoded; whoever finishes a window gives its memory back.
        verified: row groups of which no stream needs to verify the checksums again.
        is_ahead: whether threads decode the next window while one is in use; if not, all happens in the caller's thread.
    """

    row_groups: Sequence[RowGroup]
    manifest: Manifest
    shuffle_row_groups: int
    spare_memory: SpareMemory
    verified: set[RowGroup]
    is_ahead: bool

    def decode(self, order: BatchOrder, num_rows_to_skip: int) -> Generator[OwnRows, None, None]:
        """Yields the rows of the order's rank window by window, without the first `num_rows_to_skip`."""
        tasks = []
        for window in plan_windows([group.num_rows for group in self.row_groups], self.shuffle_row_groups, order):
            num_own_rows = window.num_own_rows(order)
            if num_rows_to_skip < num_own_rows:
                tasks.append((window, num_rows_to_skip))
            num_rows_to_skip = max(0, num_rows_to_skip - num_own_rows)
        files = OpenFiles()
        jobs = (job for window, num_skipped in tasks for job in self._jobs(window, order, num_skipped, files))
        num_jobs_per_window = max((len(own_row_groups(window, order)) + 2 for window, _ in tasks), default=1)
        results = map_ahead(_run, jobs, _NUM_THREADS, num_jobs_per_window) if self.is_ahead else (job() for job in jobs)
        with closing(files), closing(results):
            for finish in results:
                if finish is not None:
                    yield finish()

    def _jobs(self, window: Window, order: BatchOrder, num_skipped: int, files: OpenFiles) -> Iterator[_Job]:
        indices = own_row_groups(window, order)
        groups = [self.row_groups[index] for index in indices]
        memory = self.spare_memory.take(sum(group.num_rows for group in groups))
        decoder = ColumnsDecoder(groups, self.manifest, memory, files, self.verified)
        found: list[Order] = []

        def find_rows() -> None:
            found.append(own_rows(window, [group.num_rows for group in self.row_groups], order))

        def decode(place: int) -> None:
            decoder.decode(place, permutation_of(indices[place], groups[place].num_rows, order))

        def finish() -> OwnRows:
            return OwnRows(decoder.finish(), memory, found[0], num_skipped, len(found[0]))

        yield find_rows
        for place in range(len(groups)):
            yield partial(decode, place)
        yield lambda: finish


def _run(job: _Job) -> Callable[[], OwnRows] | None:
    return job()
