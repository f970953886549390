"""How merge messages are laid out: value types that the ops of `messages` take.

A message is what one replica tells another of some tables. Of each table it has sections of equal items, each filled up to 8
bytes, one table after the other:

    up (sender to owner):    row ids | touches, where the policy needs them | each field's change, encoded
    down (owner to all):     row ids | union touches, where moments need them | each field's merged change, encoded

How many rows each table has goes ahead, so that both sides know all sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from torchrec_kstep.ops.batch import WIRE_CODES, Wire
from torchrec_kstep.ops.merge import row_bytes

ALIGNMENT = 8
Number = TypeVar("Number", int, torch.Tensor)


@dataclass(frozen=True)
class Format:
    """What a message says of each row of one table; the same on all replicas.

    Attributes:
        row_id_type: int32 or int64.
        count_type: how touches travel (up: uint8, int16 or int32), or their union (down: float32); None: they do not.
        dim: columns of the table.
        fields: what travels of each row, in the order in which the group tracks it.
        wires: how each field is encoded.
    """

    row_id_type: torch.dtype
    count_type: torch.dtype | None
    dim: int
    fields: tuple[str, ...]
    wires: tuple[Wire, ...]

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of an item of each section: row ids, touches (0 if they do not travel), fields."""
        counts = 0 if self.count_type is None else self.count_type.itemsize
        return (self.row_id_type.itemsize, counts, *(row_bytes(wire, self.dim) for wire in self.wires))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, filling not counted."""
        return sum(self.item_bytes)

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of `num_rows` rows."""
        return sum(_padded(num_rows * item_bytes) for item_bytes in self.item_bytes)


class Formats:
    """The formats of the tables of a message, in its order, as the ops take them."""

    def __init__(self, formats: Sequence[Format]) -> None:
        """Takes at least one format."""
        self.of_tables = tuple(formats)
        self.numbers = [number for form in formats for number in (*form.item_bytes[:2], form.dim)]
        self.num_fields = [len(form.fields) for form in formats]
        self.wires = [WIRE_CODES[wire] for form in formats for wire in form.wires]
        most = max(len(form.item_bytes) for form in formats)
        items = [[*form.item_bytes, *[0] * (most - len(form.item_bytes))] for form in formats]
        self._item_bytes = torch.tensor(items).T.contiguous()  # [sections, T]

    def some(self, positions: Sequence[int]) -> "Formats":
        """Returns those of some tables."""
        return self if len(positions) == len(self.of_tables) else Formats([self.of_tables[position] for position in positions])

    def num_bytes(self, counts: torch.Tensor) -> torch.Tensor:
        """Returns `[M, T]` int64, bytes that each table takes in each message of `counts` `[M, T]` rows."""
        return _padded(counts.unsqueeze(0) * self._item_bytes.unsqueeze(1)).sum(dim=0)


class Layout(NamedTuple):
    """Where the tables of one or several messages lie.

    Attributes:
        counts: `[M, T]` int64, rows.
        begins: `[M, T]` int64, first byte of each table in its buffer.
        sizes: bytes of each message.
    """

    counts: torch.Tensor
    begins: torch.Tensor
    sizes: list[int]

    @classmethod
    def joined(cls, formats: Formats, counts: torch.Tensor) -> "Layout":
        """Messages that lie one after the other in one buffer."""
        num_bytes = formats.num_bytes(counts)
        ends = num_bytes.flatten().cumsum(0).view_as(num_bytes)
        return cls(counts, ends - num_bytes, num_bytes.sum(dim=1).tolist())

    @classmethod
    def apart(cls, formats: Formats, counts: torch.Tensor) -> "Layout":
        """Messages in buffers of their own."""
        num_bytes = formats.num_bytes(counts)
        return cls(counts, num_bytes.cumsum(1) - num_bytes, num_bytes.sum(dim=1).tolist())

    def some(self, positions: Sequence[int]) -> "Layout":
        """Returns the layout of some tables, whose sizes are those of the whole messages."""
        if len(positions) == self.counts.shape[1]:
            return self
        return Layout(self.counts[:, positions].contiguous(), self.begins[:, positions].contiguous(), self.sizes)


class Applied(NamedTuple):
    """What applying told.

    Attributes:
        num_rows_read: merged rows that had to be read from a lower tier.
        distance: sum of absolute differences between this replica's weights and the merged ones, on a sample of the rows it touched.
        way: the same between its weights and those of the round before.
    """

    num_rows_read: int
    distance: float
    way: float


def _padded(num_bytes: Number) -> Number:
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
