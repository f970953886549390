"""Ops of a merge round over the rows of one table: collect, encode, decode, reduce, apply.

A replica that touched rows since the last round sends, to each row's owner, what changed (`collect`, `encode`). The owner
makes one change per row of it (`decode`, `reduce`, `encode`) and sends that to every replica, itself included, which `apply` it.
No op communicates. Formulas, rounding and the reasons for both: `docs/numerics.md`. The same in plain PyTorch:
`torchrec_kstep.ops.reference_merge`.

All tensors are on the CPU and contiguous. Results do not depend on the number of threads. Calls on one group are serialised,
and the interpreter lock is released while a kernel runs.
"""

from collections.abc import Mapping, Sequence

import torch

from torchrec_kstep.ops import _library, reference_merge
from torchrec_kstep.ops._errors import kernel_errors
from torchrec_kstep.ops.batch import FORM_CODES, POLICY_CODES, WIRE_CODES, Contributions, Merged, MergeForm, MergePolicy, Wire
from torchrec_kstep.ops.plain_rows import PlainRows
from torchrec_kstep.ops.row_group import RowGroup

_MASK = 2**64 - 1
_SCALE_BYTES = 4


def collect(group: RowGroup, table: int, rows: torch.Tensor, form: MergeForm = "renew", tracker: int = 0) -> Contributions:
    """Returns what this replica contributes for rows that it touched since the last round.

    Weights: x - base. Moments, with c the row's count, b the moment's decay and s its value:
    "renew": the new information in the average, `(s - b^c base) / (1 - b^c)`, never negative for v; "delta": s - base.

    Args:
        group: its `track` must have been called for this table and tracker.
        table: position of the table in the group.
        rows: `[n]` int64, strictly ascending, each one of `group.touched_rows(table, tracker)`; any slice of it.
        form: of the moments.
        tracker: which counter of touches and which bases.

    Raises:
        DataError: a row is not touched, or the tracker keeps no bases.
    """
    if isinstance(group, PlainRows):
        return reference_merge.collect(group.state, table, rows, form, tracker)
    fields = group.tracked_fields(table, tracker)
    with kernel_errors():
        counts, values = torch.ops.kstep.merge_collect(
            group.handle, table, tracker, rows, FORM_CODES[form], len(fields), group.tables[table].dim
        )
    return Contributions(counts, dict(zip(fields, values.unbind(0), strict=True)))


def reduce(
    rows: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    values: Sequence[Mapping[str, torch.Tensor]],
    form: MergeForm,
    policy: MergePolicy,
    num_steps: int,
    num_replicas: int,
) -> Merged:
    """Makes one change per row of the contributions of all replicas. Pure; done by the owner of the rows.

    With S the replicas that touched a row, c_i their counts, C the sum of them and k = `num_steps`:

        policy    change of the weights: a * sum over S of D_i    touches u of the merged row
        union     a = u / C                                       k (1 - prod over S of (1 - min(c_i / k, 1))); C if one replica
        touched   a = 1 / |S|                                     C / |S|
        mean      a = 1 / num_replicas                            C / num_replicas

    Moments: "delta" as the weights; "renew" `sum of (c_i / C) w_i`, which `apply` enters with u. Sums run in the order of the
    lists, so their bits repeat.

    Args:
        rows: per replica `[n_i]` int64 or int32 (all alike), strictly ascending; empty where it touched none.
        counts: per replica `[n_i]` int32.
        values: per replica the values of `Contributions`; the same fields, each `[n_i, dim]` float32.
        form: as in `collect`.
        policy: how steps of several replicas add up.
        num_steps: k, the steps since the round before, at least 1.
        num_replicas: N, also those that touched nothing.
    """
    _library.load()
    fields = list(values[0])
    flat = [part[name] for part in values for name in fields]
    averaged = [form == "renew" and name != "weight" for name in fields]
    with kernel_errors():
        union, u_real, merged = torch.ops.kstep.merge_reduce(
            list(rows), list(counts), flat, averaged, POLICY_CODES[policy], num_steps, num_replicas
        )
    return Merged(union, u_real, dict(zip(fields, merged.unbind(0), strict=True)))


def apply(group: RowGroup, table: int, merged: Merged, form: MergeForm = "renew", tracker: int = 0, step: int | None = None) -> int:
    """Writes merged rows; returns how many of them had to be read from a lower tier.

    base is what the row held before this replica's first update of the round, or its present value if it made none:
    `x = base + change`; moments: "renew" `s = b^u base + (1 - b^u) change`, "delta" `s = base + change`, never negative for v;
    the row-wise step counter, with the tracker that has v (with `step_per_moment` each with its moment):
    `step - c + max(1, u rounded)`. Frozen Adam: v_hat becomes `v / (1 - b2^t)` of the merged v, with `amsgrad` the larger of
    that and v_hat. If all replicas held the same bits after the round before, they do again. Counters of the rows become 0.
    Call `group.clear_touched` once all rows of the round are applied; an update in between is refused.

    After `group.detach_touched` the round applied is the detached one, and rows may have moved since: a row that did is shifted
    by (merged - what it held at the detach), its moments by that times b to the number of updates since, which is exact for
    an average; its base in the running round becomes the merged value, the same bits on every replica. A row that did not
    move takes the merged value itself.

    Args:
        group: as in `collect`; every replica applies every merged row, touched or not.
        table: as in `collect`.
        merged: of this table, in any number of pieces whose rows are disjoint; decoded from the same bytes on all replicas.
        form: as in `collect` and `reduce`.
        tracker: as in `collect`.
        step: t of v_hat under global bias correction: the optimizer's step at the collect, the same on all replicas; None for
            the step that was set last.
    """
    if isinstance(group, PlainRows):
        return reference_merge.apply(group.state, table, merged, form, tracker, step)
    values = [merged.values[name] for name in group.tracked_fields(table, tracker)]
    arguments = (group.handle, table, tracker, merged.rows, merged.u_real, values, FORM_CODES[form], step or 0)
    with kernel_errors():
        return int(torch.ops.kstep.merge_apply(*arguments))


def encode(values: torch.Tensor, wire: Wire, rows: torch.Tensor, salt: int) -> torch.Tensor:
    """Packs `[n, dim]` float32 for the wire: `[n, row_bytes]` uint8; see `row_bytes`.

    fp32 is exact and shares the memory of `values`. bf16 and int8 round up or down at random, with the probabilities that
    make the expectation the value itself; int8 has one scale per row, the largest absolute value / 127. Never use int8 for v:
    a v rounded to 0 under a non-zero m makes the next step explode (`field_wire`). A row with a NaN or an infinity decodes to
    a row that has one too.

    Args:
        values: `[n, dim]` float32.
        wire: format.
        rows: `[n]` int64 or int32, the rows; with `salt` and the column they determine the noise.
        salt: any 64 bits: `noise_salt` of what else the noise shall depend on. The same salt twice gives the same bytes.
    """
    if wire == "fp32":
        return values.view(torch.uint8) if values.numel() else values.new_empty(values.shape[0], 4 * values.shape[1], dtype=torch.uint8)
    _library.load()
    with kernel_errors():
        result: torch.Tensor = torch.ops.kstep.wire_encode(values, WIRE_CODES[wire], rows, signed_salt(salt))
    return result


def decode(encoded: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """Unpacks `[n, row_bytes]` uint8 of `encode` to `[n, dim]` float32; fp32 shares memory where its address allows."""
    if wire == "fp32":
        if not encoded.numel():
            return encoded.new_empty(encoded.shape[0], dim, dtype=torch.float32)
        return (encoded if encoded.storage_offset() % 4 == 0 else encoded.clone()).view(torch.float32)
    _library.load()
    with kernel_errors():
        result: torch.Tensor = torch.ops.kstep.wire_decode(encoded, WIRE_CODES[wire], dim)
    return result


def row_bytes(wire: Wire, dim: int) -> int:
    """Bytes of one encoded row of `dim` values."""
    return {"fp32": 4 * dim, "bf16": 2 * dim, "int8": _SCALE_BYTES + dim}[wire]


def field_wire(field: str, wire: Wire) -> Wire:
    """The wire format of a field where the round's is `wire`: v is never sent as int8."""
    return "bf16" if field == "v" and wire == "int8" else wire


def noise_salt(*parts: int) -> int:
    """Mixes numbers (seed, round, table, field, leg) into one salt; every order and value gives another one."""
    salt = 0
    for part in parts:
        salt = _mix64(salt ^ _mix64((part + 0x9E3779B97F4A7C15) & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
    return salt


def _mix64(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def signed_salt(salt: int) -> int:
    """The same 64 bits as the signed number that an op takes."""
    salt &= _MASK
    return salt - 2**64 if salt >= 2**63 else salt
