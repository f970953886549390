"""Optimizers of embedding rows as value types: what a row's record holds and how the kernels update it.

Only values and their checks live here; the formulas are in `kernels/compute/optimizer.h` and, in PyTorch, in
`torchrec_kstep.ops.reference`. g is the gradient of a row summed over the batch; each update touches the rows of the
batch only ("lazy": the moments of absent rows stand still), unless absent rows replay their L2.

    SGD       w -= lr * g
    Adam      m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    Adagrad   s += mean(g^2);  w -= lr / (sqrt(s) + eps) * g                         (row-wise: one s per row)

Deviations: Adam as in Kingma & Ba, Algorithm 1 (eps outside the corrected root, as `torch.optim.Adam`; `SparseAdam` adds
eps to the uncorrected root). L2 is lazy by default: an absent row does not decay. With `l2_absent_rows="replay"` a row makes
up, when it is next read or updated, for the updates that `torch.optim.Adam(weight_decay=l2)` over the whole table would have made.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from torchrec_kstep.errors import ConfigError

BiasCorrection = Literal["global", "row"]
TouchTracking = Literal["none", "count", "base"]
AbsentRows = Literal["skip", "replay"]
FieldType = Literal["f32", "i32"]

MAX_TRACKERS = 3
LAST_STEP = "last_step"


@dataclass(frozen=True)
class RecordField:
    """One named part of a row's record.

    Attributes:
        name: "weight" is always the first field of a record.
        dtype: element type.
        width: number of elements.
    """

    name: str
    dtype: FieldType
    width: int


@dataclass(frozen=True)
class CowClip:
    """Clips each row's summed gradient before the optimizer sees it (Zheng et al., arXiv 2204.06240, Algorithm 1).

        limit = ratio * count * max(||w||, ratio * sqrt(dim) * zeta);   g *= min(1, limit / ||g||)

    `count` is how often the row occurs in the batch (over all micro-batches or replicas whose gradients are summed). As in
    the authors' code the lower bound carries `ratio` too; `ratio` is 1 in all their runs.

    Attributes:
        ratio: r.
        zeta: lower bound of a weight's size, so that a row of zeros can move; 0 switches it off, and such a row then never moves.
        exempt: names of tables that are not clipped, with `*` and `?`; by default those that the models here call first-order
            ("wide"), which the paper leaves alone too.
    """

    ratio: float = 1.0
    zeta: float = 1e-5
    exempt: tuple[str, ...] = ("wide_*",)

    def __post_init__(self) -> None:
        """Refuses values for which the rule has no meaning."""
        _check_all(_positive("ratio", self.ratio), _not_negative("zeta", self.zeta), where="CowClip")

    def covers(self, table: str) -> bool:
        """Whether the rows of a table are clipped."""
        return not any(fnmatchcase(table, pattern) for pattern in self.exempt)


@dataclass(frozen=True)
class _RowOptimizerSpec:
    """What all row optimizers share.

    Attributes:
        lr: learning rate.
        l2: adds `l2 * w` to the gradient of the rows of the batch, before the clip; 0 switches it off.
        l2_absent_rows: what L2 does to rows that are absent from a batch. "skip": nothing. "replay": they decay too, as if their
            gradient had been zero; a row keeps its last step (int32 field `last_step`) and makes the missed updates, one by one
            and each at its own learning rate, before it is next updated. Lookups show it as it is after them.
        l2_replay_max_steps: with "replay": a row stands still after so many steps of absence, which bounds the work; 0: never.
        clip: row-wise clip, or None.
        touches: what a row remembers for merge rounds: "none", "count" (an int32 field `touches`: updates since it was last
            cleared) or "base" (also the weights before the first of those updates, in a field `base`).
        num_trackers: 1 to 3 such counters, `touches`, `touches_1`, `touches_2`: one per merge period of the states.
    """

    lr: float
    l2: float = 0.0
    clip: CowClip | None = None
    touches: TouchTracking = "none"
    num_trackers: int = field(default=1, kw_only=True)
    l2_absent_rows: AbsentRows = field(default="skip", kw_only=True)
    l2_replay_max_steps: int = field(default=0, kw_only=True)

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Collects every fault of the values."""
        _check_all(*self._faults(), where=type(self).__name__)

    def _faults(self) -> list[str]:
        faults = [_positive("lr", self.lr), _not_negative("l2", self.l2)]
        if self.touches not in ("none", "count", "base"):
            faults.append(f"touches is {self.touches!r}, expected 'none', 'count' or 'base'")
        if not 1 <= self.num_trackers <= MAX_TRACKERS:
            faults.append(f"num_trackers is {self.num_trackers}, expected 1 to {MAX_TRACKERS}")
        if self.num_trackers > 1 and self.touches == "none":
            faults.append(f"num_trackers is {self.num_trackers} while touches is 'none': nothing would be counted")
        if self.l2_absent_rows not in ("skip", "replay"):
            faults.append(f"l2_absent_rows is {self.l2_absent_rows!r}, expected 'skip' or 'replay'")
        if not 0 <= self.l2_replay_max_steps < 1 << 31:
            faults.append(f"l2_replay_max_steps is {self.l2_replay_max_steps}, expected 0 (no bound) to {(1 << 31) - 1}")
        return faults + (self._replay_faults() if self.replays_l2 else [])

    def _replay_faults(self) -> list[str]:
        faults = []
        if self.touches != "none":
            faults.append(
                "l2_absent_rows is 'replay' while touches are counted for merge rounds: replicas would have replayed different steps of a "
                "row, and rounds weigh its moves by touches alone; choose l2_absent_rows='skip' with several replicas"
            )
        if self.clip is not None and self.l2 > self.clip.ratio:
            faults.append(
                f"l2_absent_rows is 'replay' with l2 {self.l2} above the clip's ratio {self.clip.ratio}: the decay of absent rows would "
                "have to be clipped; choose a smaller l2"
            )
        return faults

    @property
    def replays_l2(self) -> bool:
        """Whether absent rows decay."""
        return self.l2_absent_rows == "replay" and self.l2 > 0

    def state_fields(self, dim: int) -> tuple[RecordField, ...]:
        """Fields that the update rule itself keeps beside the weights."""
        raise AssertionError(f"{type(self).__name__} must say which state a row of dim {dim} has")

    def record_fields(self, dim: int) -> tuple[RecordField, ...]:
        """The record of one row of `dim` weights: weights, optimizer state, last step, touch tracking; in payload order."""
        tracking: list[RecordField] = []
        if self.touches != "none":
            tracking += [RecordField(touches_field(tracker), "i32", 1) for tracker in range(self.num_trackers)]
        if self.touches == "base":
            tracking.append(RecordField("base", "f32", dim))
        last_step = [RecordField(LAST_STEP, "i32", 1)] if self.replays_l2 else []
        return (RecordField("weight", "f32", dim), *self.state_fields(dim), *last_step, *tracking)

    def kernel_options(self, tables: Sequence[str] = ()) -> dict[str, float]:
        """Constants of the update rule, by the names that the compiled kernels know. `lr` is not among them: it is set per step.

        Args:
            tables: names of the group's tables, in its order; a shard goes by the name of its whole table.
        """
        options = {"l2": self.l2}
        if self.replays_l2:
            options |= {"replay_l2": 1.0, "max_replay_steps": float(self.l2_replay_max_steps)}
        if self.clip is not None:
            options |= {"clip_ratio": self.clip.ratio, "clip_zeta": self.clip.zeta}
            options |= {f"unclipped:{index}": 1.0 for index, table in enumerate(tables) if not self.clip.covers(table)}
        return options


@dataclass(frozen=True)
class SgdSpec(_RowOptimizerSpec):
    """Plain gradient descent; a row has no state."""

    kind: ClassVar[str] = "sgd"

    def state_fields(self, dim: int) -> tuple[RecordField, ...]:  # noqa: ARG002 - one signature for all optimizers
        """No state."""
        return ()


@dataclass(frozen=True)
class AdamSpec(_RowOptimizerSpec):
    """Lazy Adam.

    Attributes:
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the bias-corrected root.
        bias_correction: which t corrects the bias: "global", the number of optimizer steps (as FBGEMM's default and
            `SparseAdam`), or "row", how often this row was updated (int32 field `step`). Both count from 1.
        step_per_moment: with "row": v counts its updates in a field of its own, `step_v`. For moments that are merged in different
            rounds: a counter must move together with its moment.
        frozen: the denominator is `max(v_hat, v / (1 - b2^t))`; only merge rounds change the field `v_hat`, to the corrected v that
            they merged, so that between rounds all replicas divide by about the same. Before its first round a row has v_hat 0.
        amsgrad: with `frozen`: v_hat becomes the larger of its value and the merged one.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: BiasCorrection = "global"
    step_per_moment: bool = False
    frozen: bool = False
    amsgrad: bool = False

    kind: ClassVar[str] = "adam"

    def _faults(self) -> list[str]:
        faults = [*super()._faults(), _positive("eps", self.eps)]
        faults += [f"beta {beta} is outside [0, 1)" for beta in self.betas if not 0 <= beta < 1]
        if self.bias_correction not in ("global", "row"):
            faults.append(f"bias_correction is {self.bias_correction!r}, expected 'global' or 'row'")
        if self.step_per_moment and self.bias_correction != "row":
            faults.append("step_per_moment needs bias_correction 'row': the global step is one for all")
        if self.amsgrad and not self.frozen:
            faults.append("amsgrad needs frozen: it says how merge rounds change v_hat")
        if self.frozen and self.replays_l2:
            faults.append("frozen with l2_absent_rows 'replay': v_hat is for merge rounds, in which replayed rows cannot take part")
        return faults

    def state_fields(self, dim: int) -> tuple[RecordField, ...]:
        """Moments `m` and `v`; `v_hat` if frozen; the row's `step` and `step_v` for row-wise bias correction."""
        fields = [RecordField("m", "f32", dim), RecordField("v", "f32", dim)]
        if self.frozen:
            fields.append(RecordField("v_hat", "f32", dim))
        if self.bias_correction == "row":
            fields.append(RecordField("step", "i32", 1))
        if self.step_per_moment:
            fields.append(RecordField("step_v", "i32", 1))
        return tuple(fields)

    def kernel_options(self, tables: Sequence[str] = ()) -> dict[str, float]:
        """As the base class, with Adam's constants."""
        return super().kernel_options(tables) | {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "row_bias": float(self.bias_correction == "row"),
            "step_per_moment": float(self.step_per_moment),
            "frozen": float(self.frozen),
            "amsgrad": float(self.amsgrad),
        }


@dataclass(frozen=True)
class RowwiseAdagradSpec(_RowOptimizerSpec):
    """Adagrad with one accumulator per row, FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Attributes:
        eps: added to the root.
    """

    eps: float = 1e-8

    kind: ClassVar[str] = "rowwise_adagrad"

    def _faults(self) -> list[str]:
        return [*super()._faults(), _positive("eps", self.eps)]

    def state_fields(self, dim: int) -> tuple[RecordField, ...]:  # noqa: ARG002 - one signature for all optimizers
        """The accumulator `sum`."""
        return (RecordField("sum", "f32", 1),)

    def kernel_options(self, tables: Sequence[str] = ()) -> dict[str, float]:
        """As the base class, with eps."""
        return super().kernel_options(tables) | {"eps": self.eps}


def touches_field(tracker: int) -> str:
    """Name of the record field in which a tracker counts updates."""
    return "touches" if tracker == 0 else f"touches_{tracker}"


OptimizerSpec = AdamSpec | SgdSpec | RowwiseAdagradSpec


def replay_rule(spec: OptimizerSpec) -> dict[str, Any]:
    """What must be known to bring rows up to date, as JSON has it; `replaying_spec` reads it."""
    return {"kind": spec.kind, **asdict(replace(spec, clip=None))}


def replaying_spec(rule: Mapping[str, Any]) -> OptimizerSpec:
    """Makes an optimizer that brings rows up to date by a rule of `replay_rule`.

    Raises:
        ConfigError: the rule is malformed.
    """
    values: dict[str, Any] = {key: tuple(value) if key == "betas" else value for key, value in rule.items() if key != "kind"}
    kinds: dict[str, type[AdamSpec] | type[SgdSpec] | type[RowwiseAdagradSpec]] = {
        "adam": AdamSpec,
        "sgd": SgdSpec,
        "rowwise_adagrad": RowwiseAdagradSpec,
    }
    try:
        return kinds[rule["kind"]](**values)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"this is no rule by which rows replay their L2: {dict(rule)}") from error


def _positive(name: str, value: float) -> str:
    return "" if math.isfinite(value) and value > 0 else f"{name} is {value}, expected a number above 0"


def _not_negative(name: str, value: float) -> str:
    return "" if math.isfinite(value) and value >= 0 else f"{name} is {value}, expected a number not below 0"


def _check_all(*faults: str, where: str) -> None:
    found = [fault for fault in faults if fault]
    if found:
        raise ConfigError(f"{where}: " + "; ".join(found))
