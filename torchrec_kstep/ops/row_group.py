"""RowGroup: tables that share one row source and one optimizer, as Python holds them."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from torchrec_kstep.errors import DataError
from torchrec_kstep.ops import _library, kernels
from torchrec_kstep.ops._errors import kernel_errors
from torchrec_kstep.ops.batch import INIT_CODES, Dedup, OutOfRange, Pooling, RowGradients, TableSpec
from torchrec_kstep.optim_spec import FieldType, OptimizerSpec, RecordField

DramLayout = Literal["auto", "direct", "packed"]
_LAYOUT_CODES: dict[DramLayout, int] = {"auto": 0, "direct": 1, "packed": 2}
_DTYPES: dict[FieldType, torch.dtype] = {"f32": torch.float32, "i32": torch.int32}
_WEIGHTS_ONLY = "none"


class RowGroup:
    """Owns the compiled group; frees its rows when it dies. Keep it until the last backward of its lookups has run.

    A training step in fused mode::

        group.set_step(lr=1e-3, step=1)
        out = group.pooled(ids, offsets, table_of_feature)      # [B, columns]
        loss(out).backward()                                    # updates the rows

    and in deferred mode, which sums the gradients of any number of backwards::

        group.set_deferred(True)
        ...                                                     # any number of lookups and backwards
        gradients = group.take_pending()                        # exchange, clip, scale
        group.apply(gradients)                                  # the same bits as a fused update of the same sums
    """

    def __init__(self, tables: Sequence[TableSpec], optimizer: OptimizerSpec | None, source: Any) -> None:
        """Takes over a row source; use `RowGroup.in_dram` or the tiered store's own constructor.

        Args:
            tables: the tables of the source, in its order.
            optimizer: how rows are updated; None for a group that is only read.
            source: a `torch.classes.kstep.RowSource` (torch classes have no static type), used up by this call.

        Raises:
            DataError: the records of the source lack a field that the optimizer needs.
        """
        self.tables = tuple(tables)
        self.table_dims = tuple(table.dim for table in tables)
        self.optimizer = optimizer
        self._take_source(source)
        self._anchor = torch.empty(0, requires_grad=True)

    def _take_source(self, source: Any) -> None:
        """Makes the compiled group over `source`."""
        kind = _WEIGHTS_ONLY if self.optimizer is None else self.optimizer.kind
        options = {} if self.optimizer is None else self.optimizer.kernel_options([table.whole_table for table in self.tables])
        with kernel_errors():
            self._native = torch.classes.kstep.RowGroup(source, kind, options)
        self.handle: int = self._native.handle()
        self._tracked: dict[tuple[int, int], tuple[str, ...]] = {}

    @classmethod
    def in_dram(cls, tables: Sequence[TableSpec], optimizer: OptimizerSpec | None = None, layout: DramLayout = "auto") -> "RowGroup":
        """Makes a group whose rows all live in DRAM, each taking memory from its first update on.

        Args:
            tables: at least one.
            optimizer: as in the constructor.
            layout: "direct" reserves each table's whole range and needs no index; "packed" lays out touched rows one after
                the other; "auto" is direct where all tables fit in three quarters of the machine's memory.

        Raises:
            KernelNotBuiltError: the compiled library is missing.
            DataError: a table is malformed.
            TierFullError: the address space or memory is exhausted.
        """
        _library.load()
        with kernel_errors():
            source = torch.classes.kstep.RowSource.dram(*table_arguments(tables, optimizer), _LAYOUT_CODES[layout])
        return cls(tables, optimizer, source)

    def set_step(self, lr: float, step: int) -> None:
        """Sets the learning rate and the step (from 1) of the updates that follow.

        Where absent rows replay their L2, lookups and reads show rows at the end of the step before, and the rate is kept for rows
        that miss this step; of a step set twice the last rate counts. Set every step, also one without a batch.
        """
        with kernel_errors():
            self._native.set_step(lr, step)

    def rates(self) -> list[tuple[int, float, int]]:
        """Returns the learning rates so far, where absent rows replay their L2; else nothing.

        A run of equal rates is (first clock, rate, shift). Rows and rates tell time by a clock that goes on where steps do not; a
        step is clock + shift, and the shift is 0 until rows of another step are loaded.
        """
        first_clocks, rates, shifts = self._native.rates()
        return list(zip(first_clocks, rates, shifts, strict=True))

    def restore_rates(self, rates: Sequence[tuple[int, float, int]]) -> None:
        """Sets what `rates` returned, e.g. before a run goes on from a snapshot; at least one."""
        with kernel_errors():
            self._native.restore_rates(*[list(column) for column in zip(*rates, strict=True)])

    def rebase(self, last_step: int) -> None:
        """Says that all rows are now as at the end of `last_step`, because they were loaded: steps go on from there.

        Does nothing unless absent rows replay their L2: others do not know their step.
        """
        if self.optimizer is not None and self.optimizer.replays_l2:
            with kernel_errors():
                self._native.rebase(last_step)

    def catch_up(self, table: int, payloads: torch.Tensor) -> None:
        """Brings payloads of rows (`[n, payload bytes]` uint8) to the end of the last step, in place."""
        with kernel_errors():
            self._native.catch_up(table, payloads)

    def set_deferred(self, is_deferred: bool) -> None:
        """Chooses between updating rows inside backward (fused, the start value) and keeping summed gradients (deferred)."""
        self._native.set_deferred(is_deferred)

    def dedup(self, ids: torch.Tensor, offsets: torch.Tensor, table_of_feature: Sequence[int], out_of_range: OutOfRange = "error") -> Dedup:
        """`kernels.dedup` against the rows of this group's tables."""
        return kernels.dedup(ids, offsets, table_of_feature, [table.num_rows for table in self.tables], out_of_range)

    def prefetch(self, batch: Dedup) -> None:
        """Says that `batch` will be looked up soon; never changes a result."""
        kernels.prefetch_rows(self.handle, batch.unique_rows, batch.table_offsets)

    def pooled(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        table_of_feature: Sequence[int],
        weights: torch.Tensor | None = None,
        pooling: Pooling = "sum",
        out_of_range: OutOfRange = "error",
    ) -> torch.Tensor:
        """Dedup and `kernels.pooled_lookup` in one call: `[B, columns]` float32, features side by side."""
        batch = self.dedup(ids, offsets, table_of_feature, out_of_range)
        return self.pooled_of(batch, offsets, table_of_feature, weights, pooling)

    def pooled_of(
        self,
        batch: Dedup,
        offsets: torch.Tensor,
        table_of_feature: Sequence[int],
        weights: torch.Tensor | None = None,
        pooling: Pooling = "sum",
    ) -> torch.Tensor:
        """As `pooled`, for a batch that was deduplicated before, e.g. to prefetch it."""
        return kernels.pooled_lookup(self.handle, self._anchor, weights, offsets, batch, table_of_feature, self.table_dims, pooling)

    def sequence(
        self, ids: torch.Tensor, offsets: torch.Tensor, table_of_feature: Sequence[int], out_of_range: OutOfRange = "error"
    ) -> torch.Tensor:
        """Dedup and `kernels.sequence_lookup` in one call: the rows of the ids, flat float32."""
        batch = self.dedup(ids, offsets, table_of_feature, out_of_range)
        return self.sequence_of(batch, offsets, table_of_feature)

    def sequence_of(self, batch: Dedup, offsets: torch.Tensor, table_of_feature: Sequence[int]) -> torch.Tensor:
        """As `sequence`, for a batch that was deduplicated before."""
        return kernels.sequence_lookup(self.handle, self._anchor, offsets, batch, table_of_feature, self.table_dims)

    @property
    def num_pending(self) -> int:
        """Backwards whose gradients are kept and not yet taken."""
        return int(self._native.num_pending())

    def take_pending(self) -> RowGradients:
        """Returns the pending gradients, summed in the order of their backwards, and forgets them."""
        return RowGradients(*self._native.take_pending())

    def apply(self, gradients: RowGradients, scales: torch.Tensor | None = None) -> None:
        """Updates rows from summed gradients; `scales` (`[U]` float32) in place of the optimizer's clip."""
        kernels.apply_row_gradients(self.handle, gradients, scales)

    def row_norms(self, gradients: RowGradients) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the squared norms of gradients and weights per row, `kernels.row_norms`."""
        return kernels.row_norms(self.handle, gradients)

    def field(self, table: int, name: str) -> RecordField:
        """Returns the record field `name` of a table.

        Raises:
            KeyError: the record has no such field.
        """
        for field in record_fields(self.tables[table], self.optimizer):
            if field.name == name:
                return field
        raise KeyError(f"table {self.tables[table].name!r} has no field {name!r}")

    def read(self, table: int, rows: torch.Tensor, field: str = "weight") -> torch.Tensor:
        """Returns `[n, width]` of one field of `rows` (`[n]` int64, in any order, repeats allowed). Materialises nothing."""
        unique, inverse = torch.unique(rows, return_inverse=True)
        return self.read_ascending(table, unique, field)[inverse]

    def read_ascending(self, table: int, rows: torch.Tensor, field: str = "weight") -> torch.Tensor:
        """As `read`, for rows that strictly ascend."""
        spec = self.field(table, field)
        return kernels.read_rows(self.handle, table, rows, field, spec.width, _DTYPES[spec.dtype])

    def write(self, table: int, rows: torch.Tensor, values: torch.Tensor, field: str = "weight") -> None:
        """Overwrites one field of `rows` (`[n]` int64, in any order, each once) by `values` `[n, width]`."""
        ascending, order = torch.sort(rows)
        self.write_ascending(table, ascending, values[order], field)

    def write_ascending(self, table: int, rows: torch.Tensor, values: torch.Tensor, field: str = "weight") -> None:
        """As `write`, for rows that strictly ascend."""
        kernels.write_rows(self.handle, table, rows, field, values)

    def track(self, tracker: int, fields: Sequence[str], tables: Sequence[int] | None = None) -> None:
        """Keeps, from now on, a copy of `fields` of each row as it was before its first update since the last merge round.

        The copies ("bases") live in DRAM, beside the rows and never on disk; `base_bytes` tells their size.

        Args:
            tracker: which counter of touches; the spec's `num_trackers` says how many there are.
            fields: float32 fields with one value per column, in the order in which merges take them: "weight", "m", "v".
            tables: the tables concerned; None for all.

        Raises:
            DataError: a table has no such field or tracker, or rows of it are touched already.
        """
        for table in range(len(self.tables)) if tables is None else tables:
            self._check_fields(table, fields)
            with kernel_errors():
                self._native.track(table, tracker, list(fields))
            self._tracked[table, tracker] = tuple(fields)

    def set_tracking(self, is_tracking: bool) -> None:
        """Chooses whether updates count touches, as they do at first.

        Replicas that exchange their gradients in every step stay equal and need no counts; switch off to save clearing them.

        Raises:
            DataError: rows are touched while tracking shall stop: end their merge round first.
        """
        with kernel_errors():
            self._native.set_tracking(is_tracking)

    def tracked_fields(self, table: int, tracker: int = 0) -> tuple[str, ...]:
        """Returns the fields of which `track` keeps bases; empty if it was not called."""
        return self._tracked.get((table, tracker), ())

    def touched_rows(self, table: int, tracker: int = 0) -> torch.Tensor:
        """Returns the rows updated since `clear_touched`, ascending `[n]` int64; needs `touches` in the optimizer's spec."""
        with kernel_errors():
            rows: torch.Tensor = self._native.touched_rows(table, tracker)
        return rows

    def clear_touched(self, table: int, tracker: int = 0) -> None:
        """Ends a merge round: forgets the touched rows of a table and their bases, and sets their counters to 0.

        After `detach_touched` it forgets the detached rows; those touched since stay.
        """
        with kernel_errors():
            self._native.clear_touched(table, tracker)

    def detach_touched(self, table: int, tracker: int = 0) -> None:
        """Sets the touched rows and their bases apart, so that training goes on while they are exchanged.

        Counters start again from 0, and updates from now on belong to the next round. `merge.apply` then corrects rows that
        moved meanwhile. `clear_touched` ends the round.

        Raises:
            StorageError: the round detached before has not ended.
        """
        with kernel_errors():
            self._native.detach_touched(table, tracker)

    @property
    def base_bytes(self) -> int:
        """Bytes of the bases of all touched rows."""
        return int(self._native.base_bytes())

    def _check_fields(self, table: int, fields: Sequence[str]) -> None:
        known = {"weight", "m", "v"} & {field.name for field in record_fields(self.tables[table], self.optimizer)}
        if not fields or len(set(fields)) != len(fields) or not set(fields) <= known:
            names = ", ".join(sorted(known))
            raise DataError(f"table {self.tables[table].name!r}: cannot keep bases of {list(fields)}; expected some of {names}, each once")

    def flush(self) -> None:
        """Makes dirty rows durable where the row source has somewhere to write them."""
        with kernel_errors():
            self._native.flush()

    def counters(self) -> dict[str, dict[str, float]]:
        """Returns the row source's counters by table name and counter name."""
        return {table.name: dict(counters) for table, counters in zip(self.tables, self._native.counters(), strict=True)}


def record_fields(table: TableSpec, optimizer: OptimizerSpec | None) -> tuple[RecordField, ...]:
    """Returns the record of a row of `table`: what the optimizer asks for, or the weights alone."""
    return (RecordField("weight", "f32", table.dim),) if optimizer is None else optimizer.record_fields(table.dim)


def table_arguments(tables: Sequence[TableSpec], optimizer: OptimizerSpec | None) -> tuple[list[Any], ...]:
    """Spreads tables into the parallel lists that the row sources of the compiled library take."""
    fields = [",".join(f"{field.name}:{field.dtype}:{field.width}" for field in record_fields(table, optimizer)) for table in tables]
    for table in tables:
        if table.init not in INIT_CODES:
            raise ValueError(f"table {table.name!r}: initial values {table.init!r}, expected one of {', '.join(INIT_CODES)}")
    return (
        [table.name for table in tables],
        [table.table_id for table in tables],
        [table.num_rows for table in tables],
        [table.dim for table in tables],
        fields,
        [table.init for table in tables],
        [table.init_a for table in tables],
        [table.init_b for table in tables],
        [table.seed for table in tables],
        [table.first_column for table in tables],
    )
