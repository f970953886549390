"""The ops of `merge` in plain PyTorch, with the same names and arguments: what the compiled ops must compute, bit for bit.

`group` is a `ReferenceGroup` here. The formulas are in `docs/numerics.md`. Powers are float64 and rounded once; everything else
is float32 with each operation rounded on its own, sums in the order of the replicas.
"""

from collections.abc import Mapping, Sequence

import torch

from torchrec_kstep.errors import DataError
from torchrec_kstep.ops.batch import Contributions, Merged, MergeForm, MergePolicy, Wire
from torchrec_kstep.ops.reference import ReferenceGroup, ReferenceRound, inverse_bias
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec

_WORD = 0xFFFFFFFF
_SIGN, _MAGNITUDE, _INFINITY, _MAX_FINITE, _NAN = 0x80000000, 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 0x7FC00000
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_SMALLEST_SCALED = 2.0**-120  # below it 127 / max overflows


def collect(group: ReferenceGroup, table: int, rows: torch.Tensor, form: MergeForm = "renew", tracker: int = 0) -> Contributions:
    """See `merge.collect`."""
    state = group.trackers[table][tracker]
    if not state.tracked or not bool(state.round.is_touched[rows].all()):
        raise DataError(f"table {table}: not all rows are touched rows with a base")
    fields = group.fields[table]
    counts = fields[state.counter][rows, 0]
    values = {
        name: _contribution(name, fields[name][rows], state.round.bases[name][rows], counts, form, group.optimizer)
        if rows.numel()
        else torch.empty(0, fields[name].shape[1])
        for name in state.tracked
    }
    return Contributions(counts, values)


def reduce(
    rows: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    values: Sequence[Mapping[str, torch.Tensor]],
    form: MergeForm,
    policy: MergePolicy,
    num_steps: int,
    num_replicas: int,
) -> Merged:
    """See `merge.reduce`."""
    union = torch.unique(torch.cat(list(rows)))
    places = [torch.searchsorted(union, part) for part in rows]
    num_senders = torch.zeros(union.numel(), dtype=torch.float64)
    total = torch.zeros(union.numel(), dtype=torch.float64)
    absent = torch.ones(union.numel(), dtype=torch.float64)  # share of the steps in which no sender touched the row
    for place, count in zip(places, counts, strict=True):
        num_senders[place] += 1
        total[place] += count.to(torch.float64)
        absent[place] *= 1.0 - (count.to(torch.float64) / num_steps).clamp(max=1.0)
    if policy == "union":
        u_real = torch.where(num_senders == 1, total, num_steps * (1.0 - absent))
        weight = u_real / total
    else:
        divisor = num_senders if policy == "touched" else torch.full_like(total, num_replicas)
        u_real, weight = total / divisor, 1.0 / divisor
    merged = {}
    for name, first in values[0].items():
        is_mean = form == "renew" and name != "weight"
        acc = torch.zeros(union.numel(), first.shape[1])
        for place, count, part in zip(places, counts, values, strict=True):
            share = (count.to(torch.float64) / total[place]).to(torch.float32)[:, None] if is_mean else torch.ones(1)
            acc[place] += share * part[name]
        merged[name] = acc if is_mean else weight.to(torch.float32)[:, None] * acc
    return Merged(union, u_real.to(torch.float32), merged)


def apply(group: ReferenceGroup, table: int, merged: Merged, form: MergeForm = "renew", tracker: int = 0, step: int | None = None) -> int:
    """See `merge.apply`; a table in memory reads no rows from anywhere."""
    state = group.trackers[table][tracker]
    fields, rows = group.fields[table], merged.rows.to(torch.int64)
    running, detached = state.round, state.detached
    moved = running.is_touched[rows]
    counts_now = fields[state.counter][rows, 0]
    # Where the row stood when the round was collected, and the base of that round.
    round_start = running if detached is None else detached
    touched = round_start.is_touched[rows]
    counts = torch.where(touched, counts_now if detached is None else detached.counts[rows], 0)
    merged_v = None
    for name in state.tracked:
        present = fields[name][rows]
        collected = present if detached is None else _where(moved, running, name, rows, present)
        base = _where(touched, round_start, name, rows, collected)
        target = _merged_value(name, base, merged.values[name], merged.u_real, form, group.optimizer)
        if detached is not None:
            decay = 1.0 if name == "weight" else _powers(_beta(group.optimizer, name), counts_now.tolist())[0][:, None]
            corrected = present + decay * (target - collected)
            corrected = _not_negative(corrected) if name == "v" else corrected
            fields[name][rows] = torch.where(moved[:, None], corrected, target)
            if moved.any():
                running.bases[name][rows[moved]] = target[moved]
        else:
            fields[name][rows] = target
        merged_v = target if name == "v" else merged_v
    for name in step_fields(group.optimizer, state.tracked):
        steps = torch.round(merged.u_real).clamp(min=1).to(torch.int32)
        fields[name][rows, 0] += steps - counts
    if merged_v is not None and isinstance(group.optimizer, AdamSpec) and group.optimizer.frozen:
        steps_of_v = [max(group.step, 1) if step is None else step] * rows.numel()
        if group.optimizer.bias_correction == "row":
            later = torch.zeros_like(counts_now) if detached is None else counts_now
            steps_of_v = (fields["step_v" if group.optimizer.step_per_moment else "step"][rows, 0] - later).tolist()
        corrected = merged_v * inverse_bias(group.optimizer.betas[1], steps_of_v)
        before = fields["v_hat"][rows]
        fields["v_hat"][rows] = torch.where(before > corrected, before, corrected) if group.optimizer.amsgrad else corrected
    if detached is None:
        fields[state.counter][rows] = 0
    return 0


def encode(values: torch.Tensor, wire: Wire, rows: torch.Tensor, salt: int) -> torch.Tensor:
    """See `merge.encode`."""
    dim = values.shape[1]
    if wire == "fp32":
        return _as_bytes(values, 4 * dim)
    words = _noise(rows.to(torch.int64), dim, salt)
    if wire == "bf16":
        bits = values.contiguous().view(torch.int32).to(torch.int64) & _WORD
        magnitude = bits & _MAGNITUDE
        rounded = torch.where(magnitude < _INFINITY, (magnitude + (words >> 16)).clamp(max=_MAX_FINITE), magnitude)
        rounded = torch.where(magnitude > _INFINITY, _NAN, rounded)
        return _as_bytes((((bits & _SIGN) | rounded) >> 16).to(torch.uint16), 2 * dim)
    scale, inverse = _int8_scales(values)
    unit = (words >> 8).to(torch.float32) * 2.0**-24
    scaled = torch.floor(values * inverse[:, None] + unit).clamp(-127.0, 127.0)
    scaled = torch.where((inverse == 0.0)[:, None], torch.zeros(1), scaled).to(torch.int8)
    return torch.cat([_as_bytes(scale, 4), _as_bytes(scaled, dim)], dim=1)


def decode(encoded: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """See `merge.decode`."""
    num_rows = encoded.shape[0]
    if wire == "fp32":
        return _from_bytes(encoded, torch.float32).view(num_rows, dim)
    if wire == "bf16":
        return _from_bytes(encoded, torch.bfloat16).view(num_rows, dim).to(torch.float32)
    scale = _from_bytes(encoded[:, :4], torch.float32).view(num_rows, 1)
    return _from_bytes(encoded[:, 4:], torch.int8).view(num_rows, dim).to(torch.float32) * scale


def step_fields(optimizer: OptimizerSpec, tracked: Sequence[str]) -> tuple[str, ...]:
    """Counters of row-wise bias correction that move with the tracked fields.

    One counter for both moments moves with v, whose correction lasts longer; with `step_per_moment` each moves with its moment.
    """
    if not isinstance(optimizer, AdamSpec) or optimizer.bias_correction != "row":
        return ()
    if not optimizer.step_per_moment:
        return ("step",) if "v" in tracked else ()
    return tuple(name for name, moment in (("step", "m"), ("step_v", "v")) if moment in tracked)


# ---- one field ---------------------------------------------------------------------------------------------------------


def _contribution(
    name: str, now: torch.Tensor, base: torch.Tensor, counts: torch.Tensor, form: MergeForm, optimizer: OptimizerSpec
) -> torch.Tensor:
    if name == "weight" or form == "delta":
        return now - base
    decay, inverse_rest = _powers(_beta(optimizer, name), counts.tolist(), invert=True)
    renewed = (now - decay[:, None] * base) * inverse_rest[:, None]
    return _not_negative(renewed) if name == "v" else renewed


def _merged_value(
    name: str, base: torch.Tensor, change: torch.Tensor, u_real: torch.Tensor, form: MergeForm, optimizer: OptimizerSpec
) -> torch.Tensor:
    if name == "weight":
        return base + change
    if form == "delta":
        value = base + change
    else:
        decay, rest = _powers(_beta(optimizer, name), u_real.tolist())
        value = decay[:, None] * base + rest[:, None] * change
    return _not_negative(value) if name == "v" else value


def _where(is_there: torch.Tensor, kept: ReferenceRound, name: str, rows: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """The round's bases of rows that it has, else other values."""
    return torch.where(is_there[:, None], kept.bases[name][rows], otherwise) if name in kept.bases else otherwise


def _beta(optimizer: OptimizerSpec, name: str) -> float:
    assert isinstance(optimizer, AdamSpec), f"{optimizer} has no moments"
    return optimizer.betas[0 if name == "m" else 1]


def _powers(beta: float, exponents: Sequence[float], invert: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """b^c and 1 - b^c, or 1 / (1 - b^c), per row."""
    powers = [beta**exponent for exponent in exponents]
    rests = [1.0 / (1.0 - power) if invert else 1.0 - power for power in powers]
    return torch.tensor(powers, dtype=torch.float32), torch.tensor(rests, dtype=torch.float32)


def _not_negative(values: torch.Tensor) -> torch.Tensor:
    """Zero for what is below zero; a NaN stays one."""
    return torch.where(values < 0, torch.zeros(1), values)


# ---- wire --------------------------------------------------------------------------------------------------------------


def _as_bytes(values: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """The memory of `[n, ...]` values as `[n, row_bytes]`; unlike `view` also where n is 0."""
    flat = bytearray(values.numpy().tobytes())
    return torch.frombuffer(flat, dtype=torch.uint8).view(-1, row_bytes) if flat else torch.empty(0, row_bytes, dtype=torch.uint8)


def _from_bytes(encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Flat values of `dtype` whose memory the bytes are."""
    return torch.frombuffer(bytearray(encoded.numpy().tobytes()), dtype=dtype) if encoded.numel() else torch.empty(0, dtype=dtype)


def _int8_scales(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the size of one unit and its inverse; a row that is not finite has NaN for the one and 0 for the other."""
    largest = values.abs().amax(dim=1) if values.numel() else torch.zeros(values.shape[0])
    is_normal = largest >= _SMALLEST_SCALED
    inverse = torch.where(is_normal, torch.tensor(127.0) / largest, torch.zeros(1))
    scale = torch.where(is_normal, largest / torch.tensor(127.0), torch.zeros(1))
    is_finite = torch.isfinite(values).all(dim=1)
    return torch.where(is_finite, scale, torch.tensor(float("nan"))), torch.where(is_finite, inverse, torch.zeros(1))


def _noise(rows: torch.Tensor, dim: int, salt: int) -> torch.Tensor:
    """32 random bits per row and column, a function of (salt, row, column): `[n, dim]` int64."""
    key = _mix64(_mix64(torch.tensor(_signed(salt))) + (rows + 1) * _GOLDEN)
    low, high = (key & _WORD)[:, None], ((key >> 32) & _WORD)[:, None]
    x = ((torch.arange(1, dim + 1) * 0x9E3779B9)[None, :] + low) & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = x ^ high
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, on int64 that stand for 64 unsigned bits."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
