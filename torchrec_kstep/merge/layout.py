"""The tables of a merge group as one ordered range of keys, and what of them is merged when."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.row_group import RowGroup, record_fields
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec

WEIGHT = "weight"
MOMENTS = ("m", "v")
_NARROW_ROWS = 1 << 31  # tables with fewer rows send their ids as int32


@dataclass(frozen=True)
class MergedTable:
    """One table, or shard of one, that all replicas of the merge group hold alike.

    Attributes:
        index: position among the tables of the merge group.
        group: holds the rows.
        table: position in the group.
        first_key: key of row 0; the key of a row is `first_key + row`.
        num_shard_rows: rows of the shard, of `num_rows` in the whole table.
    """

    index: int
    group: RowGroup
    table: int
    first_key: int
    num_shard_rows: int

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.group.tables[self.table].name

    @property
    def dim(self) -> int:
        """Columns of the shard."""
        return self.group.tables[self.table].dim

    @property
    def num_rows(self) -> int:
        """Row ids are below this."""
        return self.group.tables[self.table].num_rows

    @property
    def optimizer(self) -> OptimizerSpec:
        """How rows are updated."""
        assert self.group.optimizer is not None
        return self.group.optimizer

    @property
    def has_row_step(self) -> bool:
        """Whether each row counts its own steps for bias correction."""
        return isinstance(self.optimizer, AdamSpec) and self.optimizer.bias_correction == "row"

    @property
    def row_id_type(self) -> torch.dtype:
        """How row ids travel."""
        return torch.int32 if self.num_rows < _NARROW_ROWS else torch.int64

    @property
    def num_trackers(self) -> int:
        """Sets of touched rows that rows keep apart; 0 if they do not remember touches."""
        return 0 if self.optimizer.touches == "none" else self.optimizer.num_trackers

    def moments(self) -> tuple[str, ...]:
        """Record fields that are merged beside the weights: Adam's moments. Other optimizers keep their state to themselves."""
        names = {field.name for field in record_fields(self.group.tables[self.table], self.optimizer)}
        return tuple(name for name in MOMENTS if name in names)


@dataclass(frozen=True)
class Tracker:
    """Record fields that are merged together: one set of touched rows, counts and bases.

    Attributes:
        index: number of the tracker in the row groups; the first has the weights.
        fields: names.
        period_rounds: merged every so many rounds.
    """

    index: int
    fields: tuple[str, ...]
    period_rounds: int

    def fields_of(self, table: MergedTable) -> tuple[str, ...]:
        """Returns those of the fields that a table has."""
        return tuple(field for field in self.fields if field == WEIGHT or field in table.moments())


def lay_out(groups: Sequence[RowGroup], num_shard_rows: Sequence[Sequence[int]] | None) -> tuple[MergedTable, ...]:
    """Orders the tables of all groups.

    Args:
        groups: in the order that all replicas share.
        num_shard_rows: per group and table, rows of the shard; None: shards are whole tables.

    Raises:
        ConfigError: a group is only read.
    """
    tables: list[MergedTable] = []
    first_key = 0
    for number, group in enumerate(groups):
        if group.optimizer is None:
            raise ConfigError(f"tables {', '.join(table.name for table in group.tables[:5])} have no optimizer: nothing trains them")
        for index, table in enumerate(group.tables):
            num_own = table.num_rows if num_shard_rows is None else num_shard_rows[number][index]
            tables.append(MergedTable(len(tables), group, index, first_key, num_own))
            first_key += table.num_rows
    assert first_key < 1 << 62, "row ids of all tables exceed 62 bits"
    return tuple(tables)


def trackers_of(spec: MergeSpec) -> tuple[Tracker, ...]:
    """Sorts the fields of rows by the period at which they are merged; weights come first."""
    periods: dict[int, list[str]] = {1: [WEIGHT]}
    if spec.row_states != "weights":
        for name, period in zip(MOMENTS, (spec.m_period_rounds, spec.v_period_rounds), strict=True):
            periods.setdefault(period, []).append(name)
    return tuple(Tracker(index, tuple(periods[period]), period) for index, period in enumerate(sorted(periods)))


def geometry(tables: Sequence[MergedTable], spec: MergeSpec, num_replicas: int) -> bytes:
    """Returns 32 bytes that are the same on two ranks exactly if they can merge: same shards, records and way to merge."""
    parts: list[object] = [spec, num_replicas]
    for table in tables:
        fields = record_fields(table.group.tables[table.table], table.optimizer)
        parts.append((table.group.tables[table.table], table.num_shard_rows, fields, table.optimizer.kernel_options()))
    return hashlib.sha256(repr(parts).encode()).digest()
