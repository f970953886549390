"""PlainRows: tables that are plain tensors of somebody else, behind the interface of a row group."""

from collections.abc import Sequence
from typing import Protocol

import torch

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.ops import kernels, reference
from torchrec_kstep.ops.batch import Dedup, RowGradients, TableSpec
from torchrec_kstep.ops.reference import ReferenceGroup, ReferenceTracker
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec, touches_field

_DTYPES = {"f32": torch.float32, "i32": torch.int32}
_FIRST_CAPACITY = 64


class TableTensors(Protocol):
    """Whose tables they are."""

    def weights(self) -> list[torch.Tensor]:
        """Returns `[num_rows, dim]` float32 per table, views that writes go through."""

    def gradients(self) -> list[torch.Tensor] | None:
        """Returns the gradients of `weights`, of the same shapes, or None if there are none."""

    def clear_gradients(self) -> None:
        """Forgets the gradients."""


class PlainRows(RowGroup):
    """Tables that live in tensors, with the rules of updates and merge rounds of row groups, for the rows of a batch only.

    Lookups and backward are those of the tensors' owner; `note` tells of every backward which rows it reached, and their
    gradients wait until they are taken (or `touch`, where the owner updates rows too). Everything is computed by the reference in
    plain PyTorch, so with equal gradients rows hold the bits of a compiled group. Bases take the memory of touched rows; beside
    them 9 bytes per row and counter of touches are kept, and 4 more per row and base.
    """

    def __init__(self, tables: Sequence[TableSpec], optimizer: OptimizerSpec, tensors: TableTensors) -> None:
        """Keeps states of its own beside `tensors`.

        Args:
            tables: names and sizes; initial values are what the tensors hold.
            optimizer: how rows are updated.
            tensors: the tables.

        Raises:
            ConfigError: absent rows are to replay their L2, which whoever reads the tensors would not see.
        """
        if optimizer.replays_l2:
            raise ConfigError(
                f"tables {', '.join(table.name for table in tables)} are plain tensors and have l2_absent_rows='replay': who reads them "
                "sees rows without the steps they missed; choose l2_absent_rows='skip', or tiered tables"
            )
        self._tensors = tensors
        self._pending: list[Dedup] = []
        super().__init__(tables, optimizer, None)

    def _take_source(self, source: object) -> None:
        """Makes the states of the tables."""
        del source
        assert self.optimizer is not None
        fields = [{"weight": weight} for weight in self._tensors.weights()]
        self.state = _PlainState(self.tables, self.optimizer, fields)
        self._tracked = {}

    def note(self, ids: torch.Tensor, offsets: torch.Tensor, table_of_feature: Sequence[int]) -> None:
        """Says that a backward is about to reach the rows of these bags, as `dedup` takes them."""
        self._pending.append(kernels.dedup(ids, offsets, table_of_feature, [table.num_rows for table in self.tables], "error"))

    def touch(self, ids: torch.Tensor, offsets: torch.Tensor, table_of_feature: Sequence[int]) -> None:
        """Says that the tensors' owner is about to update the rows of these bags by itself: counts it, and keeps bases."""
        if self.state.is_tracking:
            batch = kernels.dedup(ids, offsets, table_of_feature, [table.num_rows for table in self.tables], "error")
            for table, trackers in enumerate(self.state.trackers):
                for tracker in trackers:
                    tracker.note(_of_table(batch, table)[0])

    def set_step(self, lr: float, step: int) -> None:
        """See `RowGroup`."""
        self.state.lr, self.state.step = lr, step

    def set_deferred(self, is_deferred: bool) -> None:
        """Does nothing: gradients always wait until they are taken."""
        del is_deferred

    @property
    def num_pending(self) -> int:
        """See `RowGroup`."""
        return len(self._pending)

    def take_pending(self) -> RowGradients:
        """See `RowGroup`; clears the tensors' gradients."""
        gradients = self._tensors.gradients()
        batches, self._pending = self._pending, []
        rows, counts, values, bounds = [], [], [], [0]
        for table, dim in enumerate(self.table_dims):
            unique, number = _union([_of_table(batch, table) for batch in batches])
            rows.append(unique)
            counts.append(number)
            values.append(torch.zeros(unique.numel(), dim) if gradients is None else gradients[table][unique])
            bounds.append(bounds[-1] + unique.numel())
        self._tensors.clear_gradients()
        return RowGradients(torch.cat(rows), torch.tensor(bounds), torch.cat(counts), torch.cat([part.reshape(-1) for part in values]))

    def apply(self, gradients: RowGradients, scales: torch.Tensor | None = None) -> None:
        """See `RowGroup`."""
        with torch.no_grad():
            reference.apply_row_gradients(self.state, gradients, scales)

    def row_norms(self, gradients: RowGradients) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RowGroup`."""
        return reference.row_norms(self.state, gradients)

    def read_ascending(self, table: int, rows: torch.Tensor, field: str = "weight") -> torch.Tensor:
        """See `RowGroup`."""
        return self.state.fields[table][field][rows]

    def write_ascending(self, table: int, rows: torch.Tensor, values: torch.Tensor, field: str = "weight") -> None:
        """See `RowGroup`."""
        with torch.no_grad():
            self.state.fields[table][field][rows] = values

    def track(self, tracker: int, fields: Sequence[str], tables: Sequence[int] | None = None) -> None:
        """See `RowGroup`."""
        for table in range(len(self.tables)) if tables is None else tables:
            self._check_fields(table, fields)
            self.state.track(tracker, fields, [table])
            self._tracked[table, tracker] = tuple(fields)

    def set_tracking(self, is_tracking: bool) -> None:
        """See `RowGroup`."""
        self.state.is_tracking = is_tracking

    def touched_rows(self, table: int, tracker: int = 0) -> torch.Tensor:
        """See `RowGroup`."""
        return self.state.touched_rows(table, tracker)

    def clear_touched(self, table: int, tracker: int = 0) -> None:
        """See `RowGroup`."""
        self.state.clear_touched(table, tracker)

    def detach_touched(self, table: int, tracker: int = 0) -> None:
        """See `RowGroup`."""
        self.state.detach_touched(table, tracker)

    @property
    def base_bytes(self) -> int:
        """See `RowGroup`."""
        return sum(tracker.base_bytes for trackers in self.state.trackers for tracker in trackers if isinstance(tracker, _Tracker))

    def flush(self) -> None:
        """Nothing is written anywhere."""

    def counters(self) -> dict[str, dict[str, float]]:
        """No source counts anything."""
        return {table.name: {} for table in self.tables}


class _PlainState(ReferenceGroup):
    """The reference's state over weights that are there already."""

    def __post_init__(self) -> None:
        """Adds states of zeros and the counters of touches."""
        for table, fields in zip(self.tables, self.fields, strict=True):
            for spec in self.optimizer.record_fields(table.dim)[1:]:
                fields[spec.name] = torch.zeros(table.num_rows, spec.width, dtype=_DTYPES[spec.dtype])
            num_trackers = 0 if self.optimizer.touches == "none" else self.optimizer.num_trackers
            self.trackers.append([_Tracker(fields, touches_field(tracker)) for tracker in range(num_trackers)])


class _Tracker(ReferenceTracker):
    """Keeps bases of touched rows only."""

    def _new_base(self, name: str) -> "_CopiedRows":
        return _CopiedRows(*self.fields[name].shape)

    @property
    def base_bytes(self) -> int:
        """Bytes of the bases of the running and of a detached round."""
        rounds = [self.round] if self.detached is None else [self.round, self.detached]
        return sum(base.num_bytes for kept in rounds for base in kept.bases.values() if isinstance(base, _CopiedRows))


class _CopiedRows:
    """Some rows of a matrix, by row; the others read as zeros."""

    def __init__(self, num_rows: int, width: int) -> None:
        """Holds none."""
        self._places = torch.zeros(num_rows, dtype=torch.int32)  # in `_values`, whose row 0 stands for those not here
        self._values = torch.zeros(_FIRST_CAPACITY, width)
        self._num_used = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows held."""
        return (self._num_used - 1) * self._values.shape[1] * self._values.element_size()

    def __getitem__(self, rows: torch.Tensor, /) -> torch.Tensor:
        """Returns the values of rows."""
        return self._values[self._places[rows].long()]

    def __setitem__(self, rows: torch.Tensor, values: torch.Tensor, /) -> None:
        """Sets the values of rows, each once."""
        new = rows[self._places[rows] == 0]
        needed = self._num_used + new.numel()
        if needed > self._values.shape[0]:
            larger = torch.zeros(max(needed, 2 * self._values.shape[0]), self._values.shape[1])
            larger[: self._num_used] = self._values[: self._num_used]
            self._values = larger
        self._places[new] = torch.arange(self._num_used, needed, dtype=torch.int32)
        self._num_used = needed
        self._values[self._places[rows].long()] = values


def _of_table(batch: Dedup, table: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one table in a batch and how often each occurs."""
    mine = slice(int(batch.table_offsets[table]), int(batch.table_offsets[table + 1]))
    return batch.unique_rows[mine], batch.row_offsets.diff()[mine]


def _union(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all parts, ascending, and the sums of their counts, int32."""
    unique = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, _ in parts)]))
    counts = torch.zeros(unique.numel(), dtype=torch.int32)
    for rows, count in parts:
        counts[torch.searchsorted(unique, rows)] += count.to(torch.int32)
    return unique, counts
