"""The ops of `kernels` in plain PyTorch, with the same names and arguments: what the compiled ops must compute.

Written for clarity: every table is dense. `group` is a `ReferenceGroup` here. All results have the same bits as the
compiled ones, with one condition: the sums below must be taken in the order written, which on the CPU they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from torchrec_kstep.errors import DataError
from torchrec_kstep.ops.batch import IGNORED_POSITION, Dedup, InitKind, OutOfRange, Pooling, RowGradients, TableSpec
from torchrec_kstep.ops.row_clip import cow_clip_factors
from torchrec_kstep.optim_spec import LAST_STEP, AdamSpec, CowClip, OptimizerSpec, RowwiseAdagradSpec, SgdSpec, touches_field

_LANES = 16  # partial sums of a row: column j goes to lane j % 16
_WORD = 0xFFFFFFFF
_LEAST = {"weight": 2.0**-63, "m": 2.0**-126, "v": 2.0**-126}  # below it a value that decays becomes 0


@dataclass
class ReferenceGroup:
    """State of a row group: every field of every row, dense.

    Attributes:
        tables: as `RowGroup.tables`.
        optimizer: as `RowGroup.optimizer`.
        fields: per table, field name to `[num_rows, width]`.
        lr: learning rate of the next updates.
        step: their step, from 1.
        rates: learning rate by step, for rows that replay missed steps; `set_step` notes them.
        is_deferred: keep summed gradients in `pending` instead of updating.
        pending: in the order of the backwards.
        trackers: per table, what `RowGroup.track` and its companions keep, one per counter of touches.
        is_tracking: count updates in them.
    """

    tables: Sequence[TableSpec]
    optimizer: OptimizerSpec
    fields: list[dict[str, torch.Tensor]] = field(default_factory=list)
    lr: float = 0.0
    step: int = 0
    rates: dict[int, float] = field(default_factory=dict)
    is_deferred: bool = False
    pending: list[RowGradients] = field(default_factory=list)
    trackers: list[list["ReferenceTracker"]] = field(default_factory=list)
    is_tracking: bool = True

    def __post_init__(self) -> None:
        """Gives every row its initial values."""
        dtypes = {"f32": torch.float32, "i32": torch.int32}
        for table in self.tables:
            fields = {
                spec.name: torch.zeros(table.num_rows, spec.width, dtype=dtypes[spec.dtype])
                for spec in self.optimizer.record_fields(table.dim)
            }
            rows = torch.arange(table.num_rows)
            fields["weight"] = initial_values(
                rows, table.seed, table.table_id, table.first_column, table.dim, table.init, table.init_a, table.init_b
            )
            self.fields.append(fields)
            num_trackers = 0 if self.optimizer.touches == "none" else self.optimizer.num_trackers
            self.trackers.append([ReferenceTracker(fields, touches_field(tracker)) for tracker in range(num_trackers)])

    def set_step(self, lr: float, step: int) -> None:
        """See `RowGroup.set_step`; here every step must be set."""
        self.lr, self.step, self.rates[step] = lr, step, lr

    def present_fields(self, table: int) -> dict[str, torch.Tensor]:
        """Returns all rows of a table as they are at the end of the last step."""
        if not self.optimizer.replays_l2:
            return self.fields[table]
        fields = {name: values.clone() for name, values in self.fields[table].items()}
        _replay(self, fields, mark=self.step - 1)
        return fields

    def track(self, tracker: int, fields: Sequence[str], tables: Sequence[int] | None = None) -> None:
        """See `RowGroup.track`."""
        for table in range(len(self.tables)) if tables is None else tables:
            self.trackers[table][tracker].tracked = tuple(fields)

    def tracked_fields(self, table: int, tracker: int = 0) -> tuple[str, ...]:
        """See `RowGroup.tracked_fields`."""
        return self.trackers[table][tracker].tracked

    def touched_rows(self, table: int, tracker: int = 0) -> torch.Tensor:
        """See `RowGroup.touched_rows`."""
        return self.trackers[table][tracker].round.rows()

    def clear_touched(self, table: int, tracker: int = 0) -> None:
        """See `RowGroup.clear_touched`."""
        self.trackers[table][tracker].clear()

    def detach_touched(self, table: int, tracker: int = 0) -> None:
        """See `RowGroup.detach_touched`."""
        self.trackers[table][tracker].detach()


class RowValues(Protocol):
    """Values by row, as a tensor `[num_rows, width]` has them."""

    def __getitem__(self, rows: torch.Tensor, /) -> torch.Tensor: ...  # noqa: D105 - as of a tensor

    def __setitem__(self, rows: torch.Tensor, values: torch.Tensor, /) -> None: ...  # noqa: D105 - as of a tensor


@dataclass
class ReferenceRound:
    """The rows touched in one round.

    Attributes:
        is_touched: `[num_rows]` bool.
        counts: `[num_rows]` int32: updates; of the running round they are in the record instead.
        bases: field name to `[num_rows, width]`; the rows of `is_touched` have meaning.
    """

    is_touched: torch.Tensor
    counts: torch.Tensor
    bases: dict[str, "RowValues"] = field(default_factory=dict)

    def rows(self) -> torch.Tensor:
        """Ascending."""
        return self.is_touched.nonzero()[:, 0]


class ReferenceTracker:
    """What a tracker keeps of one table; see `RowGroup.track`."""

    def __init__(self, fields: dict[str, torch.Tensor], counter: str) -> None:
        """Watches `fields`, the whole table; `counter` names the record field with its count of updates."""
        self.fields = fields
        self.counter = counter
        self.tracked: tuple[str, ...] = ()
        self.round = self._new_round()
        self.detached: ReferenceRound | None = None

    def _new_round(self) -> ReferenceRound:
        num_rows = self.fields["weight"].shape[0]
        return ReferenceRound(torch.zeros(num_rows, dtype=torch.bool), torch.zeros(num_rows, dtype=torch.int32))

    def note(self, rows: torch.Tensor) -> None:
        """Counts an update of `rows` that is about to happen."""
        first = rows[self.fields[self.counter][rows, 0] == 0]
        for name in self.tracked:
            if name not in self.round.bases:
                self.round.bases[name] = self._new_base(name)
            self.round.bases[name][first] = self.fields[name][first]
        self.round.is_touched[first] = True
        self.fields[self.counter][rows] += 1

    def _new_base(self, name: str) -> "RowValues":
        return torch.zeros_like(self.fields[name])

    def clear(self) -> None:
        """Ends the detached round if there is one, else the running one."""
        if self.detached is not None:
            self.detached = None
            return
        self.fields[self.counter][self.round.is_touched] = 0
        self.round = self._new_round()

    def detach(self) -> None:
        """Sets the running round apart and begins the next."""
        self.round.counts = self.fields[self.counter][:, 0].clone()
        self.fields[self.counter][self.round.is_touched] = 0
        self.detached, self.round = self.round, self._new_round()


def dedup(
    ids: torch.Tensor, offsets: torch.Tensor, table_of_feature: Sequence[int], num_rows: Sequence[int], out_of_range: OutOfRange
) -> Dedup:
    """See `kernels.dedup`."""
    ids = ids.to(torch.int64)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    features = _bag_of_position(offsets) // max(batch_size, 1)
    tables = torch.tensor(list(table_of_feature))[features]
    limits = torch.tensor(list(num_rows))[tables]
    is_bad = (ids < 0) | (ids >= limits)
    if out_of_range == "error" and bool(is_bad.any()):
        first = int(is_bad.nonzero()[0])
        raise DataError(f"dedup: id {int(ids[first])} at position {first} is outside [0, {int(limits[first])})")
    if out_of_range == "clamp":
        ids = torch.minimum(ids.clamp(min=0), limits - 1)
    is_valid = ~is_bad if out_of_range == "ignore" else torch.ones_like(is_bad)
    unique_rows, positions, counts, bounds = [], [], [], [0]
    inverse = torch.full_like(ids, IGNORED_POSITION, dtype=torch.int32)
    for table in range(len(num_rows)):
        mine = ((tables == table) & is_valid).nonzero()[:, 0]
        rows, index, count = torch.unique(ids[mine], return_inverse=True, return_counts=True)
        inverse[mine] = (index + bounds[-1]).to(torch.int32)
        positions.append(mine[torch.sort(index, stable=True).indices])
        unique_rows.append(rows)
        counts.append(count)
        bounds.append(bounds[-1] + rows.numel())
    return Dedup(
        unique_rows=torch.cat(unique_rows),
        table_offsets=torch.tensor(bounds),
        row_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(counts).cumsum(0)]).to(torch.int32),
        positions=torch.cat(positions).to(torch.int32),
        inverse=inverse,
        num_bad=torch.bincount(tables[is_bad], minlength=len(num_rows)),
    )


def pooled_lookup(
    group: ReferenceGroup,
    anchor: torch.Tensor,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
    pooling: Pooling,
) -> torch.Tensor:
    """See `kernels.pooled_lookup`; differentiable in `weights`, the rows' update is `pooled_backward`."""
    del anchor, table_dims
    bags, sizes = _bags(offsets, batch)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    columns = []
    for feature, table in enumerate(table_of_feature):
        positions = _valid_positions(offsets, batch, feature, batch_size)
        rows = group.present_fields(table)["weight"][_row_ids(batch, positions)]
        terms = rows if weights is None else weights[positions, None] * rows
        pooled = torch.zeros(batch_size, rows.shape[1]).index_add(0, bags[positions] - feature * batch_size, terms)
        if pooling == "mean":
            pooled = pooled * _inverse_size(sizes[feature * batch_size : (feature + 1) * batch_size])[:, None]
        columns.append(pooled)
    return torch.cat(columns, dim=1)


def pooled_backward(
    group: ReferenceGroup,
    grad: torch.Tensor,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
    pooling: Pooling,
    needs_weight_grad: bool,
) -> torch.Tensor:
    """See `kernels.pooled_backward`."""
    bags, sizes = _bags(offsets, batch)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    scale = _inverse_size(sizes)[bags] if pooling == "mean" else torch.ones(bags.numel())
    weight_grad = torch.zeros(bags.numel() if needs_weight_grad else 0)
    grads = [torch.zeros(int(n), dim) for n, dim in zip(batch.table_offsets.diff(), table_dims, strict=True)]
    column = 0
    for feature, table in enumerate(table_of_feature):
        positions = _valid_positions(offsets, batch, feature, batch_size)
        mine = grad[:, column : column + table_dims[table]][bags[positions] - feature * batch_size]
        column += table_dims[table]
        if needs_weight_grad:
            rows = group.present_fields(table)["weight"][_row_ids(batch, positions)]
            weight_grad[positions] = _lane_sum(mine * rows) * scale[positions]
        factor = scale[positions] if weights is None else weights[positions] * scale[positions]
        index = batch.inverse[positions].to(torch.int64) - int(batch.table_offsets[table])
        grads[table].index_add_(0, index, factor[:, None] * mine)
    _use_gradient(group, batch, grads)
    return weight_grad


def sequence_lookup(
    group: ReferenceGroup,
    anchor: torch.Tensor,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
) -> torch.Tensor:
    """See `kernels.sequence_lookup`."""
    del anchor
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    parts = []
    for feature, table in enumerate(table_of_feature):
        begin, end = int(offsets[feature * batch_size]), int(offsets[(feature + 1) * batch_size])
        out = torch.zeros(end - begin, table_dims[table])
        positions = _valid_positions(offsets, batch, feature, batch_size)
        out[positions - begin] = group.present_fields(table)["weight"][_row_ids(batch, positions)]
        parts.append(out.flatten())
    return torch.cat(parts)


def sequence_backward(
    group: ReferenceGroup,
    grad: torch.Tensor,
    offsets: torch.Tensor,
    batch: Dedup,
    table_of_feature: Sequence[int],
    table_dims: Sequence[int],
) -> None:
    """See `kernels.sequence_backward`."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    grads = [torch.zeros(int(n), dim) for n, dim in zip(batch.table_offsets.diff(), table_dims, strict=True)]
    at = 0
    for feature, table in enumerate(table_of_feature):
        begin, end = int(offsets[feature * batch_size]), int(offsets[(feature + 1) * batch_size])
        mine = grad[at : at + (end - begin) * table_dims[table]].view(end - begin, table_dims[table])
        at += mine.numel()
        positions = _valid_positions(offsets, batch, feature, batch_size)
        index = batch.inverse[positions].to(torch.int64) - int(batch.table_offsets[table])
        grads[table].index_add_(0, index, mine[positions - begin])
    _use_gradient(group, batch, grads)


def merge_row_gradients(parts: Sequence[RowGradients], table_dims: Sequence[int]) -> RowGradients:
    """See `kernels.merge_row_gradients`."""
    dims = tuple(table_dims)
    views = [part.per_table(dims) for part in parts]
    all_rows, all_counts, all_grads, bounds = [], [], [], [0]
    for table, dim in enumerate(dims):
        rows = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *(view[table][0] for view in views)]))
        counts, grads = torch.zeros(rows.numel(), dtype=torch.int32), torch.zeros(rows.numel(), dim)
        for part, view in zip(parts, views, strict=True):
            index = torch.searchsorted(rows, view[table][0])
            counts[index] += part.counts[int(part.table_offsets[table]) : int(part.table_offsets[table + 1])]
            grads[index] += view[table][1]
        all_rows.append(rows)
        all_counts.append(counts)
        all_grads.append(grads.flatten())
        bounds.append(bounds[-1] + rows.numel())
    return RowGradients(torch.cat(all_rows), torch.tensor(bounds), torch.cat(all_counts), torch.cat(all_grads))


def apply_row_gradients(group: ReferenceGroup, gradients: RowGradients, scales: torch.Tensor | None = None) -> None:
    """See `kernels.apply_row_gradients`; the formulas are those of `torchrec_kstep.optim_spec`."""
    dims = tuple(table.dim for table in group.tables)
    for table, (rows, grads) in enumerate(gradients.per_table(dims)):
        mine = slice(int(gradients.table_offsets[table]), int(gradients.table_offsets[table + 1]))
        counts = gradients.counts[mine]
        if "base" in group.fields[table]:
            first = rows[group.fields[table]["touches"][rows, 0] == 0]
            group.fields[table]["base"][first] = group.fields[table]["weight"][first]
        for tracker in group.trackers[table] if group.is_tracking else ():
            tracker.note(rows)
        fields = {name: values[rows] for name, values in group.fields[table].items()}
        if group.optimizer.replays_l2:
            _replay(group, fields, mark=group.step)
        _update_fields(group, fields, grads, counts, None if scales is None else scales[mine])
        for name, values in fields.items():
            group.fields[table][name][rows] = values


def row_norms(group: ReferenceGroup, gradients: RowGradients) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.row_norms`."""
    grad_squares, weight_squares = [], []
    for table, (rows, grads) in enumerate(gradients.per_table(tuple(table.dim for table in group.tables))):
        weight = group.present_fields(table)["weight"][rows]
        grads = grads + _f32(group.optimizer.l2) * weight if group.optimizer.l2 != 0 else grads
        grad_squares.append(_lane_sum(grads * grads))
        weight_squares.append(_lane_sum(weight * weight))
    return torch.cat(grad_squares), torch.cat(weight_squares)


def read_rows(group: ReferenceGroup, table: int, rows: torch.Tensor, field: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.read_rows`."""
    values = group.present_fields(table)[field][rows]
    if values.shape[1] != width or values.dtype != dtype:
        raise DataError(f"field {field!r} is {values.dtype}[{values.shape[1]}], not {dtype}[{width}]")
    return values


def write_rows(group: ReferenceGroup, table: int, rows: torch.Tensor, field: str, values: torch.Tensor) -> None:
    """See `kernels.write_rows`: the rows are brought up to date first."""
    if group.optimizer.replays_l2:
        for name, present in group.present_fields(table).items():
            group.fields[table][name][rows] = present[rows]
    group.fields[table][field][rows] = values


def prefetch_rows(group: ReferenceGroup, unique_rows: torch.Tensor, table_offsets: torch.Tensor) -> None:
    """See `kernels.prefetch_rows`: a hint without effect on any result."""
    del group, unique_rows, table_offsets


def initial_values(
    rows: torch.Tensor, seed: int, table_id: int, first_column: int, dim: int, kind: InitKind, a: float, b: float
) -> torch.Tensor:
    """See `kernels.initial_values`; Philox4x32-10 with key = seed and counter = (table_id, row low, row high, column // 4)."""
    if kind == "zero":
        return torch.zeros(rows.numel(), dim)
    blocks = torch.arange(first_column // 4, (first_column + dim - 1) // 4 + 1)
    words = torch.stack(_philox(rows, seed, table_id, blocks), dim=-1)  # [n, blocks, 4]
    if kind == "uniform":
        unit = (words >> 8).to(torch.float32) * 2.0**-24
        values = torch.tensor(a, dtype=torch.float32) + unit * torch.tensor(b - a, dtype=torch.float32)
    else:
        values = torch.stack([part for pair in (0, 2) for part in _box_muller(words[..., pair], words[..., pair + 1], a, b)], dim=-1)
    skip = first_column % 4
    return values.flatten(1)[:, skip : skip + dim].contiguous()


# ---- bags --------------------------------------------------------------------------------------------------------------


def _bag_of_position(offsets: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())


def _bags(offsets: torch.Tensor, batch: Dedup) -> tuple[torch.Tensor, torch.Tensor]:
    """Bag of each position `[N]`, and valid ids of each bag `[F * B]`."""
    bags = _bag_of_position(offsets)
    return bags, torch.bincount(bags[batch.inverse >= 0], minlength=offsets.numel() - 1)


def _inverse_size(sizes: torch.Tensor) -> torch.Tensor:
    return 1.0 / sizes.clamp(min=1).to(torch.float32)


def _valid_positions(offsets: torch.Tensor, batch: Dedup, feature: int, batch_size: int) -> torch.Tensor:
    positions = torch.arange(int(offsets[feature * batch_size]), int(offsets[(feature + 1) * batch_size]))
    return positions[batch.inverse[positions] >= 0]


def _row_ids(batch: Dedup, positions: torch.Tensor) -> torch.Tensor:
    return batch.unique_rows[batch.inverse[positions].to(torch.int64)]


def _use_gradient(group: ReferenceGroup, batch: Dedup, grads: list[torch.Tensor]) -> None:
    flat = torch.cat([grad.flatten() for grad in grads])
    gradients = RowGradients(batch.unique_rows, batch.table_offsets, batch.row_offsets.diff(), flat)
    if group.is_deferred:
        group.pending.append(gradients)
    else:
        apply_row_gradients(group, gradients)


# ---- optimizers --------------------------------------------------------------------------------------------------------


def _update_fields(
    group: ReferenceGroup, fields: dict[str, torch.Tensor], grad: torch.Tensor, counts: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """Updates the fields of some rows in place; `grad` is `[n, dim]`."""
    spec = group.optimizer
    if spec.l2 != 0:
        grad = grad + _f32(spec.l2) * fields["weight"]
    if scales is not None:
        grad = scales[:, None] * grad
    elif spec.clip is not None:
        grad = _clip_rows(spec.clip, fields["weight"], grad, counts)
    _move(spec, fields, grad, group.lr, group.step)


def _replay(group: ReferenceGroup, fields: dict[str, torch.Tensor], mark: int) -> None:
    """Makes the updates that rows missed, one step after the other: the gradient is that of L2, and nothing is clipped."""
    spec, last = group.optimizer, fields[LAST_STEP][:, 0].clone()
    begin = int(last.min()) + 1 if last.numel() else group.step
    for step in range(begin, group.step):
        missed = last < step
        if spec.l2_replay_max_steps:
            missed &= step - last <= spec.l2_replay_max_steps
        rows = {name: values[missed] for name, values in fields.items()}
        _move(spec, rows, _f32(spec.l2) * rows["weight"], group.rates[step], step)
        for name, values in rows.items():
            fields[name][missed] = torch.where(values.abs() < _LEAST[name], 0.0, values) if name in _LEAST else values
    fields[LAST_STEP] = fields[LAST_STEP].clamp(min=mark)


def _move(spec: OptimizerSpec, fields: dict[str, torch.Tensor], grad: torch.Tensor, lr: float, step: int) -> None:
    """Updates the fields of some rows in place by their gradient, as it is to be used."""
    if isinstance(spec, AdamSpec):
        _adam(spec, fields, grad, lr, step)
    elif isinstance(spec, RowwiseAdagradSpec):
        fields["sum"] += (_lane_sum(grad * grad) / _f32(grad.shape[1]))[:, None]
        fields["weight"] -= (_f32(lr) / (_sqrt(fields["sum"]) + _f32(spec.eps))) * grad
    else:
        assert isinstance(spec, SgdSpec), f"no rule for {spec}"
        fields["weight"] -= _f32(lr) * grad


def _adam(spec: AdamSpec, fields: dict[str, torch.Tensor], grad: torch.Tensor, lr: float, step: int) -> None:
    beta1, beta2 = spec.betas
    steps = steps_of_v = [step] * grad.shape[0]
    if spec.bias_correction == "row":
        for name in ("step", "step_v")[: 2 if spec.step_per_moment else 1]:
            fields[name] += 1
        steps = steps_of_v = fields["step"][:, 0].tolist()
    if spec.step_per_moment:
        steps_of_v = fields["step_v"][:, 0].tolist()
    bias1, bias2 = inverse_bias(beta1, steps), inverse_bias(beta2, steps_of_v)
    fields["m"] = _f32(beta1) * fields["m"] + _f32(1.0 - beta1) * grad
    fields["v"] = _f32(beta2) * fields["v"] + (_f32(1.0 - beta2) * grad) * grad
    corrected = fields["v"] * bias2
    if spec.frozen:
        corrected = torch.where(corrected > fields["v_hat"], corrected, fields["v_hat"])
    fields["weight"] -= (_f32(lr) * bias1 * fields["m"]) / (_sqrt(corrected) + _f32(spec.eps))


def inverse_bias(beta: float, steps: Sequence[int]) -> torch.Tensor:
    """1 / (1 - beta^step) for each row, `[n, 1]`."""
    return torch.tensor([1.0 / (1.0 - beta**step) for step in steps], dtype=torch.float32)[:, None]


def _clip_rows(clip: CowClip, weight: torch.Tensor, grad: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    weight_norms, grad_norms = _sqrt(_lane_sum(weight * weight)), _sqrt(_lane_sum(grad * grad))
    return cow_clip_factors(clip, grad.shape[1], grad_norms, weight_norms, counts)[:, None] * grad


def _f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root. `torch.sqrt` on the CPU may be off by one unit in the last place."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def _lane_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums each row of `[n, dim]` in 16 lanes, then halves the lanes: the order of the compiled kernels."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % _LANES))
    lanes = torch.zeros(values.shape[0], _LANES)
    for column in range(0, padded.shape[1], _LANES):
        lanes = lanes + padded[:, column : column + _LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


# ---- initial values ----------------------------------------------------------------------------------------------------


def _multiply_words(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a * b for 32-bit unsigned words held in int64."""
    low = a * (b & 0xFFFF)  # below 2**48
    high = a * (b >> 16) + (low >> 16)  # below 2**49
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _philox(rows: torch.Tensor, seed: int, table_id: int, blocks: torch.Tensor) -> list[torch.Tensor]:
    """Four words, each `[n, blocks]` int64."""
    shape = (rows.numel(), blocks.numel())
    c0 = torch.full(shape, table_id & _WORD, dtype=torch.int64)
    c1 = (rows & _WORD)[:, None].expand(shape)
    c2 = ((rows >> 32) & _WORD)[:, None].expand(shape)
    c3 = blocks[None, :].expand(shape)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        high0, low0 = _multiply_words(c0, 0xD2511F53)
        high1, low1 = _multiply_words(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def _box_muller(first: torch.Tensor, second: torch.Tensor, mean: float, deviation: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two normal float32 values from two words, in float64 with the polynomials of `initial_values.cpp`."""
    radius = _sqrt(-2.0 * _natural_log((first.to(torch.float64) + 1.0) * 2.0**-32))
    cosine, sine = _cos_sin(second.to(torch.float64) * 2.0**-32)
    return tuple((mean + deviation * (radius * part)).to(torch.float32) for part in (cosine, sine))  # type: ignore[return-value]  # two parts


def _natural_log(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)  # in [0.5, 1)
    is_small = mantissa * 2.0 <= 1.4142135623730951
    mantissa = torch.where(is_small, mantissa * 2.0, mantissa)
    exponent = torch.where(is_small, exponent - 1, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = torch.full_like(s, 1.0 / 17.0)
    for odd in range(15, 0, -2):
        series = series * (s * s) + 1.0 / odd
    return exponent.to(torch.float64) * 0.6931471805599453 + 2.0 * s * series


def _cos_sin(turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quarter = (turns * 4.0 + 0.5).to(torch.int64)
    angle = (turns - quarter.to(torch.float64) * 0.25) * 6.283185307179586
    square = angle * angle
    s, c = torch.ones_like(angle), torch.ones_like(angle)
    for k in range(14, 0, -2):
        s = 1.0 - s * square / (k * (k + 1))
        c = 1.0 - c * square / (k * (k - 1))
    s = s * angle
    quarter = quarter % 4
    cosine = torch.where(quarter == 0, c, torch.where(quarter == 1, -s, torch.where(quarter == 2, -c, s)))
    sine = torch.where(quarter == 0, s, torch.where(quarter == 1, c, torch.where(quarter == 2, -s, -c)))
    return cosine, sine
