"""The order of rows in an epoch, and which rank takes which of them: pure functions of numbers, no file is touched here.

The rows of a split stand in one sequence of *positions* 0..N-1. Position P belongs to rank `P % world_size`; the global
batch of step s is the positions `[s * G, (s + 1) * G)` with G = batch_size * world_size * micro_batches. So the set of
rows of a step depends on (seed, epoch, G) alone, every row comes once, and a position is all that resuming needs.

Which row stands at a position is decided window by window. A *full window* is `shuffle_row_groups` row groups of equal
size, one a *lane*: its positions go round the lanes, p lies in lane `p % num_lanes`, each lane in its own permutation. Where
the number of ranks divides the number of lanes, rank r therefore needs only the lanes congruent to r, and no row group is
decoded twice. Row groups left over, and those of another size, come last in *ragged windows*: permuted as a whole, decoded
by every rank. A small set is one ragged window, fully shuffled.

Positions say which rows a batch holds. Inside a batch they need not come in turn: a rank takes its rows lane after lane, so
that each lane gives one run of neighbouring rows.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchrec_kstep.errors import ConfigError

_ORDER_OF_GROUPS = 0  # tags that keep the streams of random numbers of one (seed, epoch) apart
_ORDER_IN_LANE = 1
_ORDER_OF_RAGGED_WINDOW = 2


@dataclass(frozen=True)
class BatchOrder:
    """How an epoch is cut into batches, and whose batches are wanted.

    Attributes:
        rank: the rank whose share is read.
        world_size: ranks that share every global batch.
        batch_size: rows per rank and micro-batch.
        micro_batches: micro-batches per step.
        seed: seed of the shuffle; without effect where `shuffle` is false.
        epoch: index of the epoch; each has its own shuffle.
        shuffle: whether rows come in a seeded random order instead of the order of the files.
    """

    rank: int = 0
    world_size: int = 1
    batch_size: int = 256
    micro_batches: int = 1
    seed: int = 0
    epoch: int = 0
    shuffle: bool = False

    def __post_init__(self) -> None:
        """Refuses orders that cannot exist."""
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of {self.world_size} ranks: a rank must be smaller than the number of ranks")
        if self.batch_size < 1 or self.micro_batches < 1:
            raise ConfigError(f"batch_size {self.batch_size} and micro_batches {self.micro_batches}: both must be at least 1 row")
        if self.seed < 0 or self.epoch < 0:
            raise ConfigError(f"seed {self.seed} and epoch {self.epoch}: neither may be negative")

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all ranks and micro-batches."""
        return self.batch_size * self.world_size * self.micro_batches

    def num_steps(self, num_rows: int) -> int:
        """Steps in an epoch of `num_rows` rows; the last one may be short, none is empty."""
        return -(-num_rows // self.global_batch_size)


@dataclass(frozen=True)
class Share:
    """One rank's part of one global micro-batch.

    Attributes:
        first_position: position of the rank's first row; the next ones follow at distances of `world_size`.
        num_rows: rows of this rank, padding not counted; may be 0.
        num_padded_rows: rows after padding, the same on all ranks and at least 1.
        num_global_rows: rows of the whole step over all ranks and micro-batches, padding not counted.
    """

    first_position: int
    num_rows: int
    num_padded_rows: int
    num_global_rows: int


def shares(order: BatchOrder, num_rows: int, start_step: int = 0) -> Iterator[Share]:
    """Yields the rank's share of every micro-batch from `start_step` to the end of the epoch."""
    rows_per_micro_batch = order.batch_size * order.world_size
    for step in range(start_step, order.num_steps(num_rows)):
        num_global_rows = min(order.global_batch_size, num_rows - step * order.global_batch_size)
        for micro_batch in range(order.micro_batches):
            begin = (step * order.micro_batches + micro_batch) * rows_per_micro_batch
            left = min(max(num_rows - begin, 0), rows_per_micro_batch)
            yield Share(
                first_position=begin + order.rank,
                num_rows=_num_congruent(left, order.rank, order.world_size),
                num_padded_rows=max(1, _num_congruent(left, 0, order.world_size)),
                num_global_rows=num_global_rows,
            )


def num_own_rows_before(order: BatchOrder, num_rows: int, step: int) -> int:
    """Rows of this rank in the steps before `step`: what a resumed stream passes over."""
    return _num_congruent(min(step * order.global_batch_size, num_rows), order.rank, order.world_size)


@dataclass(frozen=True)
class Window:
    """A run of positions whose rows are decoded and held together.

    Attributes:
        first_position: position of its first row in the epoch.
        row_groups: indices of its row groups, one a lane where `is_full`.
        num_rows: rows of the window over all ranks.
        is_full: whether the lanes rule holds, see the module's text.
    """

    first_position: int
    row_groups: tuple[int, ...]
    num_rows: int
    is_full: bool

    def num_own_rows(self, order: BatchOrder) -> int:
        """Rows of the window that belong to the order's rank."""
        return _num_congruent(self.num_rows, _first_own(self, order), order.world_size)


def plan_windows(row_group_rows: Sequence[int], shuffle_row_groups: int, order: BatchOrder) -> list[Window]:
    """Cuts the row groups of a split into windows, in the epoch's order.

    Args:
        row_group_rows: rows of each row group, in file order; empty row groups are passed over.
        shuffle_row_groups: row groups per window.
        order: gives seed, epoch and whether to shuffle; its rank plays no part.

    Returns:
        Windows that hold every row once; full ones come first.
    """
    counts = Counter(rows for rows in row_group_rows if rows)
    if not counts:
        return []
    usual_rows = max(counts, key=lambda rows: (counts[rows], rows))
    usual = [index for index, rows in enumerate(row_group_rows) if rows == usual_rows]
    unusual = [index for index, rows in enumerate(row_group_rows) if rows not in (0, usual_rows)]
    if order.shuffle:
        usual = [usual[i] for i in _generator(order, _ORDER_OF_GROUPS, 0).permutation(len(usual))]
        unusual = [unusual[i] for i in _generator(order, _ORDER_OF_GROUPS, 1).permutation(len(unusual))]
    num_in_full = len(usual) // shuffle_row_groups * shuffle_row_groups
    ragged = usual[num_in_full:] + unusual
    windows: list[Window] = []
    position = 0
    for groups, is_full in ((usual[:num_in_full], True), (ragged, False)):
        for begin in range(0, len(groups), shuffle_row_groups):
            members = tuple(groups[begin : begin + shuffle_row_groups])
            num_rows = sum(row_group_rows[index] for index in members)
            windows.append(Window(position, members, num_rows, is_full))
            position += num_rows
    return windows


class Block(NamedTuple):
    """A rectangle of rows: `num_rows` neighbours in each of `num_lanes` neighbouring lanes of `rows_per_lane` rows laid end to end."""

    first_row: int
    num_lanes: int
    rows_per_lane: int
    num_rows: int

    def indices(self) -> npt.NDArray[np.int64]:
        """Returns where the rows lie, lane after lane."""
        lanes = self.first_row + self.rows_per_lane * np.arange(self.num_lanes, dtype=np.int64)
        return (lanes[:, None] + np.arange(self.num_rows, dtype=np.int64)).reshape(-1)


@dataclass(frozen=True)
class InTurn:
    """Rows that come in turn from lanes of equal size, laid end to end: the first row of each, then the second of each.

    One lane means that rows come as they lie.

    Attributes:
        num_lanes: how many lanes there are.
        num_rows: rows of all of them together.
    """

    num_lanes: int
    num_rows: int

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.num_rows

    def indices(self) -> npt.NDArray[np.int64]:
        """Returns where the rows lie, in the order in which they come."""
        turn, lane = np.divmod(np.arange(self.num_rows, dtype=np.int64), self.num_lanes)
        return lane * (self.num_rows // self.num_lanes) + turn

    def blocks(self, begin: int, end: int) -> list[Block]:
        """Returns where the rows `begin` to `end` of the turn lie, lane after lane: three blocks at most."""
        rows_per_lane = self.num_rows // self.num_lanes
        (first_turn, begun), (last_turn, unfinished) = divmod(begin, self.num_lanes), divmod(end, self.num_lanes)
        bounds = sorted({0, begun, unfinished, self.num_lanes})
        blocks = []
        for lane, next_lane in itertools.pairwise(bounds):
            turn = first_turn + (lane < begun)
            num_rows = last_turn + (lane < unfinished) - turn
            if num_rows:
                blocks.append(Block(lane * rows_per_lane + turn, next_lane - lane, rows_per_lane, num_rows))
        return blocks


class Merged:
    """Rows that come from lanes of any sizes, laid end to end, of which each keeps its order.

    Args:
        lane_of_position: `[num_rows]` the lane of each row in the order in which they come.
        num_lane_rows: rows of each lane.
    """

    _STRIDE = 4096  # positions between two that are counted beforehand

    def __init__(self, lane_of_position: npt.NDArray[np.unsignedinteger], num_lane_rows: Sequence[int]) -> None:
        """Counts the rows of every lane before every `_STRIDE`-th position."""
        self._lane_of_position = lane_of_position
        self._first_rows = np.cumsum([0, *num_lane_rows[:-1]])
        counts = [self._counts(begin, begin + self._STRIDE) for begin in range(0, len(lane_of_position), self._STRIDE)]
        self._counts_before = np.cumsum([np.zeros_like(self._first_rows), *counts], axis=0)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._lane_of_position)

    def indices(self) -> npt.NDArray[np.int64]:
        """Returns where the rows lie, in the order in which they come."""
        rows = np.empty(len(self), dtype=np.int64)
        rows[np.argsort(self._lane_of_position, kind="stable")] = np.arange(len(rows))
        return rows

    def blocks(self, begin: int, end: int) -> list[Block]:
        """Returns where the rows `begin` to `end` lie, lane after lane: a block per lane at most."""
        first_rows, end_rows = (self._first_rows + self._taken_before(position) for position in (begin, end))
        runs = zip(first_rows.tolist(), (end_rows - first_rows).tolist(), strict=True)
        return [Block(first_row, 1, num_rows, num_rows) for first_row, num_rows in runs if num_rows]

    def _taken_before(self, position: int) -> npt.NDArray[np.int64]:
        stride = position // self._STRIDE
        before: npt.NDArray[np.int64] = self._counts_before[stride]
        return before + self._counts(stride * self._STRIDE, position)

    def _counts(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        counts: npt.NDArray[np.int64] = np.bincount(self._lane_of_position[begin:end], minlength=len(self._first_rows))
        return counts


Order = InTurn | Merged | npt.NDArray[np.int64]
"""In which order rows come: by a rule, whose rows may be read lane after lane within a batch, or by `[num_rows]` indices."""


def own_row_groups(window: Window, order: BatchOrder) -> tuple[int, ...]:
    """Says which row groups of a window the order's rank decodes."""
    if window.is_full and len(window.row_groups) % order.world_size == 0:
        return window.row_groups[_first_own(window, order) :: order.world_size]
    return window.row_groups


def own_rows(window: Window, row_group_rows: Sequence[int], order: BatchOrder) -> Order:
    """Says in which order the rows of the rank's row groups come.

    A shuffle permutes each row group (`permutation_of`), while its columns are in the processor's cache, and then merges
    them, reading every row group from front to back. A random merge of random permutations is a random permutation of all.

    Returns:
        The order of the rank's own rows, in terms of its permuted row groups laid end to end.
    """
    groups = own_row_groups(window, order)
    num_lane_rows = [row_group_rows[group] for group in groups]
    rows: InTurn | Merged
    if window.is_full:
        rows = InTurn(len(groups), sum(num_lane_rows))
        if len(groups) < len(window.row_groups):
            return rows
    elif order.shuffle:
        # 16 bits are shuffled and sorted several times faster than 64.
        lanes = np.arange(len(groups), dtype=np.uint16 if len(groups) <= 1 << 16 else np.uint32)
        rows = Merged(_generator(order, _ORDER_OF_RAGGED_WINDOW, *groups).permutation(np.repeat(lanes, num_lane_rows)), num_lane_rows)
    else:
        rows = InTurn(1, window.num_rows)
    if order.world_size == 1:
        return rows
    return np.ascontiguousarray(rows.indices()[_first_own(window, order) :: order.world_size])


def permutation_of(row_group: int, num_rows: int, order: BatchOrder) -> npt.NDArray[np.int64] | None:
    """Returns the `[num_rows]` indices by which the rows of a row group are permuted before merging; None = they keep their order."""
    if not order.shuffle:
        return None
    seed = np.random.SeedSequence([order.seed, order.epoch, _ORDER_IN_LANE, row_group]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(seed[0] >> np.uint64(1)))
    # Drawing 32-bit numbers takes half the time that numpy takes for its 64-bit ones; gathering needs 64 bits.
    return torch.randperm(num_rows, generator=generator, dtype=torch.int32).numpy().astype(np.int64)


def _first_own(window: Window, order: BatchOrder) -> int:
    return (order.rank - window.first_position) % order.world_size


def _num_congruent(num_positions: int, residue: int, modulus: int) -> int:
    """How many of the positions 0..num_positions-1 are `residue` modulo `modulus`, for 0 <= residue < modulus."""
    return max(0, -(-(num_positions - residue) // modulus))


def _generator(order: BatchOrder, *tags: int) -> np.random.Generator:
    return np.random.default_rng([order.seed, order.epoch, *tags])
