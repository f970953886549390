"""The ops of `messages` in plain PyTorch, with the same names and arguments, composed of those of `reference_merge`.

`group` is a `ReferenceGroup` here.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from torchrec_kstep.ops import reference_merge
from torchrec_kstep.ops.batch import Contributions, Merged, MergeForm, MergePolicy
from torchrec_kstep.ops.message_layout import Applied, Format, Formats, Layout
from torchrec_kstep.ops.reference import ReferenceGroup

_DRIFT_EVERY = 16
# Constants of splitmix64 as signed numbers: int64 multiplies modulo 2^64.
_GOLDEN, _SPREAD = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)
_UNSIGNED_SHIFT = (1 << 35) - 1  # what a shift by 29 of an unsigned number leaves


def empty(num_bytes: int) -> torch.Tensor:
    """See `messages.empty`."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def owner_counts(rows: Sequence[torch.Tensor], first_keys: Sequence[int], num_replicas: int) -> torch.Tensor:
    """See `messages.owner_counts`."""
    counts = torch.zeros(num_replicas, len(rows), dtype=torch.int64)
    for piece, (ids, first_key) in enumerate(zip(rows, first_keys, strict=True)):
        counts[:, piece] = torch.bincount(owners(ids, first_key, num_replicas), minlength=num_replicas)
    return counts


def owners(rows: torch.Tensor, first_key: int, num_replicas: int) -> torch.Tensor:
    """Returns `[n]` int64, which replica sums up each row."""
    mixed = (rows + first_key) * _GOLDEN
    mixed = (mixed ^ ((mixed >> 29) & _UNSIGNED_SHIFT)) * _SPREAD
    return ((mixed >> 32) & 0xFFFFFFFF) % num_replicas


def pack(
    group: ReferenceGroup,
    tables: Sequence[int],
    rows: Sequence[torch.Tensor],
    formats: Formats,
    salts: Sequence[int],
    first_keys: Sequence[int],
    max_count: int,
    layout: Layout,
    message: torch.Tensor,
    form: MergeForm = "renew",
    tracker: int = 0,
) -> int:
    """See `messages.pack`."""
    found = [reference_merge.collect(group, table, own, form, tracker) for table, own in zip(tables, rows, strict=True)]
    return pack_contributions(rows, found, formats, salts, first_keys, max_count, layout, message)


def pack_contributions(
    rows: Sequence[torch.Tensor],
    contributions: Sequence[Contributions],
    formats: Formats,
    salts: Sequence[int],
    first_keys: Sequence[int],
    max_count: int,
    layout: Layout,
    message: torch.Tensor,
) -> int:
    """See `messages.pack_contributions`."""
    next_salt = iter(salts)
    first_bad = -1
    for position, (own, part, form) in enumerate(zip(rows, contributions, formats.of_tables, strict=True)):
        own_salts = list(islice(next_salt, len(form.fields)))
        if first_bad < 0 and not all(bool(torch.isfinite(part.values[name]).all()) for name in form.fields):
            first_bad = position
        counts = part.counts.clamp(max=max_count)
        owner = owners(own, first_keys[position], layout.counts.shape[0])
        for receiver in range(layout.counts.shape[0]):
            mine = owner == receiver
            values = [part.values[name][mine] for name in form.fields]
            data = written(form, own[mine], counts[mine], values, own_salts)
            begin = int(layout.begins[receiver, position])
            message[begin : begin + data.numel()] = data
    return first_bad


def reduce(
    messages: Sequence[torch.Tensor],
    counts: torch.Tensor,
    up: Formats,
    down: Formats,
    salts: Sequence[int],
    form: MergeForm,
    policy: MergePolicy,
    num_steps: int,
    num_replicas: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `messages.reduce`."""
    begins = Layout.apart(up, counts).begins
    next_salt = iter(salts)
    parts, num_rows = [torch.empty(0, dtype=torch.uint8)], []
    for position, (own, result) in enumerate(zip(up.of_tables, down.of_tables, strict=True)):
        sent = [
            read(own, message[begin:], count)
            for message, begin, count in zip(messages, begins[:, position].tolist(), counts[:, position].tolist(), strict=True)
        ]
        touches = [torch.ones(rows.numel(), dtype=torch.int32) if found is None else found.to(torch.int32) for rows, found, _ in sent]
        values = [dict(zip(own.fields, found, strict=True)) for _, _, found in sent]
        merged = reference_merge.reduce([rows for rows, _, _ in sent], touches, values, form, policy, num_steps, num_replicas)
        own_salts = list(islice(next_salt, len(own.fields)))
        parts.append(written(result, merged.rows, merged.u_real, [merged.values[name] for name in own.fields], own_salts))
        num_rows.append(merged.rows.numel())
    return torch.cat(parts), torch.tensor(num_rows)


def apply(
    group: ReferenceGroup,
    tables: Sequence[int],
    messages: Sequence[torch.Tensor],
    formats: Formats,
    layout: Layout,
    form: MergeForm = "renew",
    tracker: int = 0,
    step: int | None = None,
) -> Applied:
    """See `messages.apply`."""
    distance = way = 0.0
    for position, (table, own) in enumerate(zip(tables, formats.of_tables, strict=True)):
        for message, begin, count in zip(messages, layout.begins[:, position].tolist(), layout.counts[:, position].tolist(), strict=True):
            rows, union, values = read(own, message[begin:], count)
            touches = torch.ones(rows.numel()) if union is None else union
            merged = Merged(rows, touches, dict(zip(own.fields, values, strict=True)))
            far, went = _drift(group, table, merged, tracker)
            distance, way = distance + far, way + went
            reference_merge.apply(group, table, merged, form, tracker, step)
    return Applied(0, distance, way)


def written(form: Format, rows: torch.Tensor, counts: torch.Tensor, values: Sequence[torch.Tensor], salts: Sequence[int]) -> torch.Tensor:
    """Returns the bytes of one table in a message: rows `[n]`, counts `[n]`, and a value `[n, dim]` per field."""
    items = [rows.to(form.row_id_type)] + ([] if form.count_type is None else [counts.to(form.count_type)])
    for value, wire, salt in zip(values, form.wires, salts, strict=True):
        items.append(reference_merge.encode(value.contiguous(), wire, rows.to(torch.int64), salt))
    sections = [torch.frombuffer(bytearray(item.contiguous().numpy().tobytes()), dtype=torch.uint8) for item in items if item.numel()]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(torch.nn.functional.pad(part, (0, -part.numel() % 8)) for part in sections)])


def read(form: Format, data: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """The inverse of `written`, from the beginning of `data`: rows, counts as they travelled or None, and decoded values."""
    sections = _sections(form, data, num_rows)
    rows = next(sections).view(form.row_id_type)
    counts = next(sections)
    values = [
        reference_merge.decode(section.view(num_rows, -1) if num_rows else section.view(0, size), wire, form.dim)
        for section, wire, size in zip(sections, form.wires, form.item_bytes[2:], strict=True)
    ]
    return rows, None if form.count_type is None else counts.view(form.count_type), values


def _sections(form: Format, data: torch.Tensor, num_rows: int) -> Iterator[torch.Tensor]:
    begin = 0
    for item_bytes in form.item_bytes:
        yield data[begin : begin + num_rows * item_bytes].clone()
        begin += -(-num_rows * item_bytes // 8) * 8


def _drift(group: ReferenceGroup, table: int, merged: Merged, tracker: int) -> tuple[float, float]:
    """Distance and way of the weights of every few rows of a piece that this replica touched."""
    state = group.trackers[table][tracker]
    start = state.round if state.detached is None else state.detached
    if "weight" not in merged.values:
        return 0.0, 0.0
    rows, change = merged.rows[::_DRIFT_EVERY].long(), merged.values["weight"][::_DRIFT_EVERY]
    touched = start.is_touched[rows]
    if not bool(touched.any()):
        return 0.0, 0.0
    rows, change = rows[touched], change[touched]
    held = group.fields[table]["weight"][rows]
    if state.detached is not None and "weight" in state.round.bases:
        held = torch.where(state.round.is_touched[rows][:, None], state.round.bases["weight"][rows], held)
    own = held - start.bases["weight"][rows]
    return float((change - own).abs().double().sum()), float(own.abs().double().sum())
