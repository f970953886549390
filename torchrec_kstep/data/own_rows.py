"""The rows of one rank, window after window, and batches copied out of them. Which rows, and in which order, is `order`'s business."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.batch_memory import BatchMemory
from torchrec_kstep.data.collate import Bags, ids_dtype, make_single_valued_batch, pad_batch
from torchrec_kstep.data.columns import Columns
from torchrec_kstep.data.order import Block, Order, Share
from torchrec_kstep.data.window_memory import WindowMemory
from torchrec_kstep.types import Batch, FeatureSchema


@dataclass(frozen=True)
class OwnRows:
    """Some rows of this rank in one window, in the order in which they come.

    Attributes:
        columns: the row groups that the rank decodes.
        memory: where the columns lie.
        rows: in which order the rows of the columns come.
        begin: first of the rows in this order.
        end: behind the last one.
    """

    columns: Columns
    memory: WindowMemory
    rows: Order
    begin: int
    end: int

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.end - self.begin

    def cut(self, num_rows: int) -> tuple["OwnRows", "OwnRows"]:
        """Returns the first `num_rows` rows, or all if there are fewer, and the rest."""
        middle = min(self.begin + num_rows, self.end)
        return replace(self, end=middle), replace(self, begin=middle)

    def copy(self, columns: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Copies the rows of `columns`, `[num_columns, num_rows_of_window]`, to `out`, `[num_columns, len(self)]`."""
        if isinstance(self.rows, np.ndarray):
            out[:] = columns.take(self.rows[self.begin : self.end], axis=1)
            return
        end = 0
        for block in self.rows.blocks(self.begin, self.end):
            begin, end = end, end + block.num_lanes * block.num_rows
            # Splitting an axis never copies. The number of columns is spelt out, because of sets without a column of a kind.
            to = out[:, begin:end].reshape(len(columns), block.num_lanes, block.num_rows)
            to[:] = _block(columns, block)

    def bags(self, name: str) -> Bags:
        """Gathers the bags of the rows, in the same order as `copy`."""
        if isinstance(self.rows, np.ndarray):
            return self.columns.bags[name].take(self.rows[self.begin : self.end])
        blocks = self.rows.blocks(self.begin, self.end)
        return self.columns.bags[name].take(np.concatenate([block.indices() for block in blocks]))


def _block(columns: npt.NDArray[Any], block: Block) -> npt.NDArray[Any]:
    """Returns a view `[num_columns, num_lanes, num_rows]`."""
    if block.num_lanes == 1:
        return columns[:, None, block.first_row : block.first_row + block.num_rows]
    lane, turn = divmod(block.first_row, block.rows_per_lane)
    lanes = columns.reshape(len(columns), columns.shape[1] // block.rows_per_lane, block.rows_per_lane)
    return lanes[:, lane : lane + block.num_lanes, turn : turn + block.num_rows]


class RowCursor:
    """Walks over the rows of successive windows; a batch may begin in one window and end in the next."""

    def __init__(self, windows: Generator[OwnRows, None, None], give_back: Callable[[WindowMemory], None]) -> None:
        """Starts before the first row of the first window; `give_back` is called with the memory of every finished window."""
        self._windows = windows
        self._give_back = give_back
        self._rest: OwnRows | None = None

    def next_rows(self, num_rows: int) -> Generator[OwnRows, None, None]:
        """Yields the next `num_rows` rows, in one piece per window that they touch; a piece is valid until the next one is asked for."""
        while num_rows:
            if not self._rest:
                if self._rest is not None:  # given back first, so that the window after the next one can be decoded into it
                    self._give_back(self._rest.memory)
                self._rest = next(self._windows)
            piece, self._rest = self._rest.cut(num_rows)
            num_rows -= len(piece)
            yield piece

    def close(self) -> None:
        """Ends the source of windows and its threads."""
        self._windows.close()
        if self._rest is not None:
            self._give_back(self._rest.memory)


def gather(pieces: Iterable[OwnRows], bag_names: Sequence[str], schema: FeatureSchema, memory: BatchMemory, share: Share) -> Batch:
    """Makes the batch of a share out of the rows of `pieces`; takes no piece before the last is copied."""
    num_rows = share.num_rows
    ids = memory.lend((len(schema.sparse) - len(bag_names), num_rows), np.dtype(ids_dtype(schema)))
    numbers = memory.lend((1 + schema.num_dense, num_rows), np.dtype(np.float32))
    bags: dict[str, list[Bags]] = {name: [] for name in bag_names}
    end = 0
    for piece in pieces:
        begin, end = end, end + len(piece)
        piece.copy(piece.columns.ids, ids[:, begin:end])
        piece.copy(piece.columns.numbers, numbers[:, begin:end])
        for name in bag_names:
            bags[name].append(piece.bags(name))
    # Columns one after the other, as they lie in the file: what multiplies a matrix with them takes either layout.
    dense, label = numbers[1:].T, numbers[0]
    if not bag_names:
        return make_single_valued_batch(schema, dense, ids, label, share.num_padded_rows, share.num_global_rows)
    next_ids = iter(ids)
    in_order = [Bags.join(bags[name]) if name in bags else Bags(next(next_ids)) for name in schema.sparse_names]
    return pad_batch(schema, dense, in_order, label, share.num_padded_rows, share.num_global_rows)
