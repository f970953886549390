"""Ops on whole merge messages, many tables at a time: pack what was touched for its owners, sum up what came, apply it.

Values are those of `torchrec_kstep.ops.merge`, bit for bit; rows are read, encoded and laid where they are sent from in one pass,
and likewise on the other side. Layouts are those of `message_layout`. The same in plain PyTorch:
`torchrec_kstep.ops.reference_messages`. Threads as in `torchrec_kstep.ops.merge`.
"""

from collections.abc import Sequence

import torch

from torchrec_kstep.ops import _library, reference_merge, reference_messages
from torchrec_kstep.ops._errors import kernel_errors
from torchrec_kstep.ops.batch import FORM_CODES, POLICY_CODES, Contributions, MergeForm, MergePolicy
from torchrec_kstep.ops.merge import signed_salt
from torchrec_kstep.ops.message_layout import Applied, Formats, Layout
from torchrec_kstep.ops.plain_rows import PlainRows
from torchrec_kstep.ops.row_group import RowGroup

_MOMENT_FIELDS = ("m", "v")


def empty(num_bytes: int) -> torch.Tensor:
    """Returns `[num_bytes]` uint8, uninitialised, in recycled memory."""
    _library.load()
    made: torch.Tensor = torch.ops.kstep.empty_message(num_bytes)
    return made


def owner_counts(rows: Sequence[torch.Tensor], first_keys: Sequence[int], num_replicas: int) -> torch.Tensor:
    """Returns `[N, P]` int64, how many rows of each piece each replica owns.

    The owner of a row is a hash of its key modulo N, so that no pattern of ids loads one replica more than others.

    Args:
        rows: P pieces of `[n]` int64.
        first_keys: per piece, the key of row 0 of its table; the key of a row is `first_key + row`.
        num_replicas: N.
    """
    _library.load()
    with kernel_errors():
        counts: torch.Tensor = torch.ops.kstep.merge_owner_counts(list(rows), list(first_keys), num_replicas)
    return counts


def pack(
    group: RowGroup,
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
    """Packs what touched rows contribute (`merge.collect`) for their owners.

    Args:
        group: as in `merge.collect`.
        tables: T positions in the group.
        rows: per table, ascending touched rows.
        formats: of the tables; their fields are those that the tracker keeps.
        salts: per table and field, of the noise (`merge.noise_salt`).
        first_keys: as in `owner_counts`.
        max_count: touches beyond it travel as it.
        layout: of N messages, the rows of each receiver as `owner_counts` tells.
        message: the buffer that is filled at the places that `layout` says, and there only.
        form: as in `merge.collect`.
        tracker: as in `merge.collect`.

    Returns:
        The first table with a value that is not finite, or -1.

    Raises:
        DataError: a row is not touched, or `layout` is not that of the rows.
    """
    if isinstance(group, PlainRows):
        found = [reference_merge.collect(group.state, table, own, form, tracker) for table, own in zip(tables, rows, strict=True)]
        return pack_contributions(rows, found, formats, salts, first_keys, max_count, layout, message)
    numbers = (formats.numbers, formats.num_fields, formats.wires, [signed_salt(salt) for salt in salts], list(first_keys), max_count)
    arguments = (group.handle, tracker, FORM_CODES[form], list(tables), list(rows), *numbers, layout.counts, layout.begins, message)
    with kernel_errors():
        return int(torch.ops.kstep.merge_pack(*arguments))


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
    """`pack` of contributions that were collected before; arguments and result as there."""
    counts = [part.counts for part in contributions]
    values = [part.values[name] for part, form in zip(contributions, formats.of_tables, strict=True) for name in form.fields]
    numbers = (formats.numbers, formats.num_fields, formats.wires, [signed_salt(salt) for salt in salts], list(first_keys), max_count)
    with kernel_errors():
        return int(torch.ops.kstep.merge_pack_contributions(list(rows), counts, values, *numbers, layout.counts, layout.begins, message))


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
    """Sums up what all replicas sent of the rows that this one owns (`merge.reduce`).

    Args:
        messages: by sender.
        counts: `[senders, T]` int64, rows of each table in each message.
        up: formats of the messages.
        down: formats of the result: the same fields.
        salts: as in `pack`.
        form: as in `merge.reduce`.
        policy: as in `merge.reduce`.
        num_steps: as in `merge.reduce`.
        num_replicas: as in `merge.reduce`.

    Returns:
        The message to all replicas, and `[T]` int64, its rows of each table.
    """
    _library.load()
    averaged = [form == "renew" and name in _MOMENT_FIELDS for table in up.of_tables for name in table.fields]
    union_bytes = [table.item_bytes[1] for table in down.of_tables]
    numbers = (up.numbers, up.num_fields, up.wires, union_bytes, averaged, [signed_salt(salt) for salt in salts])
    arguments = (list(messages), counts, *numbers, POLICY_CODES[policy], num_steps, num_replicas)
    with kernel_errors():
        message, merged_counts = torch.ops.kstep.merge_reduce_messages(*arguments)
    return message, merged_counts


def apply(
    group: RowGroup,
    tables: Sequence[int],
    messages: Sequence[torch.Tensor],
    formats: Formats,
    layout: Layout,
    form: MergeForm = "renew",
    tracker: int = 0,
    step: int | None = None,
) -> Applied:
    """Writes merged rows of some tables of a group, as `merge.apply` does.

    Args:
        group: as in `merge.apply`.
        tables: T positions in the group.
        messages: by owner.
        formats: of these tables.
        layout: of these tables in the messages.
        form: as in `merge.apply`.
        tracker: as in `merge.apply`.
        step: as in `merge.apply`.
    """
    if isinstance(group, PlainRows):
        return reference_messages.apply(group.state, tables, messages, formats, layout, form, tracker, step)
    numbers = (formats.numbers, formats.num_fields, formats.wires)
    arguments = (group.handle, tracker, FORM_CODES[form], step or 0, list(tables), list(messages), layout.counts, layout.begins, *numbers)
    with kernel_errors():
        return Applied(*torch.ops.kstep.merge_apply_messages(*arguments))
