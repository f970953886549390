"""Bytes of merge messages: the rows of one table for one receiver, as sections of equal items, each filled up to 8 bytes.

    up (sender to owner):    row ids | touches, where the policy needs them | each field's change, encoded
    down (owner to all):     row ids | union touches, where moments need them | each field's merged change, encoded

How many rows each table has goes ahead, in a header of one int32 per table, so that both sides know all sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_kstep.merge.layout import MOMENTS
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops import merge as ops

ALIGNMENT = 8


@dataclass(frozen=True)
class Section:
    """One kind of item of a message.

    Attributes:
        name: of a field, or what the items are.
        item_bytes: bytes of the item of one row.
    """

    name: str
    item_bytes: int

    def padded_bytes(self, num_rows: int) -> int:
        """Bytes of the section with its filling."""
        return -(-num_rows * self.item_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Format:
    """What a message says of each row of one table; the same on all replicas.

    Attributes:
        row_id_type: int32 or int64.
        count_type: how touches travel (up), or their union (down); None: they do not.
        fields: encoded fields and the bytes of a row of each.
    """

    row_id_type: torch.dtype
    count_type: torch.dtype | None
    fields: tuple[Section, ...]

    @property
    def sections(self) -> tuple[Section, ...]:
        """Sections in the order of the message."""
        counts = () if self.count_type is None else (Section("touches", self.count_type.itemsize),)
        return (Section("rows", self.row_id_type.itemsize), *counts, *self.fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, filling not counted."""
        return sum(section.item_bytes for section in self.sections)

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of a message of `num_rows` rows."""
        return sum(section.padded_bytes(num_rows) for section in self.sections)

    def pack(self, rows: torch.Tensor, counts: torch.Tensor | None, fields: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the pieces `[bytes]` uint8 of a message, to be laid one after the other.

        Args:
            rows: `[n]` int64.
            counts: `[n]`, given exactly where the format has them.
            fields: `[n, bytes of a row]` uint8 each.
        """
        items = [rows.to(self.row_id_type)]
        if self.count_type is not None:
            assert counts is not None
            items.append(counts.to(self.count_type))
        pieces: list[torch.Tensor] = []
        for section, values in zip(self.sections, [*items, *fields], strict=True):
            data = values.contiguous().view(torch.uint8).flatten()
            filling = section.padded_bytes(rows.numel()) - data.numel()
            pieces += [data, torch.zeros(filling, dtype=torch.uint8)] if filling else [data]
        return pieces

    def unpack(self, message: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """Returns rows `[n]` as they travelled, counts `[n]` likewise, and the fields `[n, bytes of a row]` uint8, views of `message`."""
        parts: list[torch.Tensor] = []
        begin = 0
        for section in self.sections:
            parts.append(message[begin : begin + num_rows * section.item_bytes])
            begin += section.padded_bytes(num_rows)
        assert begin == message.numel(), f"a message of {message.numel()} bytes, expected {begin}"
        first_field = len(parts) - len(self.fields)
        encoded = [part.view(num_rows, form.item_bytes) for part, form in zip(parts[first_field:], self.fields, strict=True)]
        rows = _typed(parts[0], self.row_id_type)
        counts = None if self.count_type is None else _typed(parts[1], self.count_type)
        return rows, counts, encoded


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reads bytes as `dtype`; copies where they do not begin at a multiple of its size."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def formats(
    spec: MergeSpec, fields: Sequence[str], dim: int, row_id_type: torch.dtype, has_row_step: bool, num_steps: int
) -> tuple[Format, Format]:
    """Returns what travels up and down of each row whose `fields`, `dim` columns each, are merged after `num_steps` steps.

    Touches travel only where something is computed from them: union weights, renewed moments, a row's own step.
    """
    has_moments = any(field in MOMENTS for field in fields)
    needs_touches = has_moments and (spec.moments == "renew" or has_row_step)
    sections = tuple(Section(field, ops.row_bytes(ops.field_wire(field, spec.wire), dim)) for field in fields)
    up_counts = count_type(num_steps) if needs_touches or spec.row_merge == "union" else None
    down_counts = torch.float32 if needs_touches else None
    return Format(row_id_type, up_counts, sections), Format(row_id_type, down_counts, sections)


def sent_bytes(up: Format, down: Format, num_own_rows: float, num_union_rows: float, num_replicas: int) -> float:
    """Returns the bytes that a replica sends in a round, on average over replicas; headers and filling not counted.

    Of its own rows it owns one in N, the others go up; of the union it owns one in N, and tells each of the N - 1 others.
    """
    return (num_replicas - 1) / num_replicas * (num_own_rows * up.row_bytes + num_union_rows * down.row_bytes)


def count_type(num_steps: int) -> torch.dtype:
    """Narrowest type that holds touches of up to `num_steps` steps."""
    if num_steps < 1 << 8:
        return torch.uint8
    return torch.int16 if num_steps < 1 << 15 else torch.int32


def pack_header(counts: Sequence[int]) -> torch.Tensor:
    """Returns rows per table as `[4 T]` uint8."""
    return torch.tensor(counts, dtype=torch.int32).view(torch.uint8)


def unpack_header(header: torch.Tensor) -> list[int]:
    """The inverse of `pack_header`."""
    counts: list[int] = _typed(header, torch.int32).tolist()
    return counts


def split_tables(message: torch.Tensor, formats: Sequence[Format], counts: Sequence[int]) -> list[torch.Tensor]:
    """Cuts a message about several tables into one per table."""
    return list(torch.split(message, [form.num_bytes(count) for form, count in zip(formats, counts, strict=True)]))
