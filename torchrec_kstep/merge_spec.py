"""How replicas merge what they trained alone: value types, beside those of optimizers.

Only values, their checks and what is known of their mixtures live here; the mathematics is in `docs/kstep.md` and
`docs/numerics.md`, the rounds in `torchrec_kstep.merge`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim_spec import BiasCorrection
from torchrec_kstep.units import MIB, parse_bytes

RowMerge = Literal["mean", "union", "touched"]
MomentMerge = Literal["renew", "delta"]
RowStates = Literal["all", "weights", "auto"]
Wire = Literal["fp32", "bf16", "int8"]
RecipeName = Literal["default", "paper"]

MIN_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class MergeSpec:
    """One way to merge. The start values are the recipe `default`, with everything sent in fp32.

    Attributes:
        k: steps from one round to the next; counts calls of `optimizer.step()`.
        row_merge: weight of the replicas' changes of a row. "union": the row moves as far as the steps in which at least one
            replica touched it, so rare rows move by the sum and hot ones by the mean; "mean": by the mean over all replicas,
            which slows rare rows down (the published rule); "touched": by the mean over those that touched it.
        moments: "renew" merges what each replica's moments have newly seen, weighted by its touches; "delta" merges the changes
            of moments as those of weights, under "mean" hence their plain mean.
        row_states: what is sent of a row beside its weights. "all": its moments; "weights": nothing, moments stay local; "auto":
            all for tables of which replicas touch a good part in one round, nothing for long-tailed ones; the first round, which
            tells, sends all.
        auto_share: that part: rows touched by a replica in the first round, on average over replicas, over rows of the shard.
        m_period_rounds: first moments are merged every so many rounds.
        v_period_rounds: second moments (and with them a row's own step) are merged every so many rounds.
        wire: how values travel. "bf16" and "int8" (one fp32 scale per row) are rounded up or down at random, so that they are
            right on average; second moments travel in bf16 at least.
        overlap_steps: steps that training goes on while a round is on its way, whose result then corrects rows that many steps
            late; 0: training waits. Below `k`.
        bucket_bytes: memory of a round's buffers, however many rows were touched; text with a unit, or bytes.
        timeout_s: longest wait for another replica within a round.
        seed: of the random rounding.
    """

    k: int = 20
    row_merge: RowMerge = "union"
    moments: MomentMerge = "renew"
    row_states: RowStates = "all"
    auto_share: float = 0.25
    m_period_rounds: int = 1
    v_period_rounds: int = 1
    wire: Wire = "fp32"
    overlap_steps: int = 0
    bucket_bytes: str | int = 64 * MIB
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Turns sizes into bytes and collects every fault of the values."""
        faults: list[str] = []
        if isinstance(self.bucket_bytes, str):
            try:
                object.__setattr__(self, "bucket_bytes", parse_bytes(self.bucket_bytes))
            except ConfigError as error:
                faults.append(f"bucket_bytes: {error}")
        faults += self._faults()
        if faults:
            raise ConfigError("MergeSpec: " + "; ".join(faults))

    @classmethod
    def of_recipe(cls, name: RecipeName, **others: Any) -> Self:
        """Returns the spec of a recipe; `others` are further attributes and win over the recipe's.

        Raises:
            ConfigError: there is no such recipe, or a value is wrong.
        """
        if name not in RECIPES:
            raise ConfigError(f"recipe is {name!r}, expected one of {', '.join(RECIPES)}")
        recipe = RECIPES[name]
        return cls(**{"row_merge": recipe.row_merge, "moments": recipe.moments, **others})

    @property
    def num_bucket_bytes(self) -> int:
        """`bucket_bytes` as a number."""
        assert isinstance(self.bucket_bytes, int)
        return self.bucket_bytes

    @property
    def num_trackers(self) -> int:
        """Sets of touched rows that rows must keep apart: one per period; the optimizer's spec needs as many."""
        periods = {1} if self.row_states == "weights" else {1, self.m_period_rounds, self.v_period_rounds}
        return len(periods)

    def _faults(self) -> list[str]:
        faults = []
        for name, values in (("row_merge", RowMerge), ("moments", MomentMerge), ("row_states", RowStates), ("wire", Wire)):
            if getattr(self, name) not in get_args(values):
                faults.append(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(get_args(values))}")
        for name in ("k", "m_period_rounds", "v_period_rounds"):
            if getattr(self, name) < 1:
                faults.append(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 0 <= self.auto_share <= 1:
            faults.append(f"auto_share is {self.auto_share}, expected a part between 0 and 1")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            faults.append(f"timeout_s is {self.timeout_s}, expected seconds above 0")
        if not 0 <= self.overlap_steps < max(self.k, 1):
            faults.append(f"overlap_steps is {self.overlap_steps}, expected 0 to k - 1 = {self.k - 1}: a round ends before the next begins")
        if isinstance(self.bucket_bytes, int) and self.bucket_bytes < MIN_BUCKET_BYTES:
            faults.append(f"bucket_bytes is {self.bucket_bytes}, expected at least {MIN_BUCKET_BYTES}")
        if self.seed < 0:
            faults.append(f"seed is {self.seed}, expected 0 or more")
        return faults


@dataclass(frozen=True)
class Recipe:
    """What belongs together, under one name.

    Attributes:
        row_merge: of `MergeSpec`.
        moments: of `MergeSpec`.
        bias_correction: of `AdamSpec`.
        lr_power: the learning rate of synchronous training is to be multiplied by `num_replicas ** lr_power`.
        summary: one line for people.
    """

    row_merge: RowMerge
    moments: MomentMerge
    bias_correction: BiasCorrection
    lr_power: float
    summary: str = field(compare=False)

    def lr_factor(self, num_replicas: int) -> float:
        """Returns the factor on the learning rate of synchronous training."""
        return float(num_replicas**self.lr_power)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "default": Recipe("union", "renew", "row", 0.0, "union of touches, row-wise bias correction, moments renewed"),
        "paper": Recipe("mean", "delta", "global", 0.5, "plain mean of weights and moments, global bias correction"),
    }
)


def mixture_warnings(spec: MergeSpec, bias_correction: BiasCorrection | None, num_replicas: int) -> list[str]:
    """Returns why a mixture of policies is expected to cost accuracy or traffic; empty where nothing is known against it.

    The figures are mean changes of test AUC against synchronous training at the best learning rate of each, k=20, 4 replicas
    (DeepFM on MovieLens-1M and Frappe).

    Args:
        spec: the way to merge.
        bias_correction: that of the tables' Adam; None for other optimizers.
        num_replicas: with one replica nothing is merged, so nothing is warned of.
    """
    if num_replicas < 2:
        return []
    found = []
    if bias_correction == "row" and spec.row_merge == "mean":
        found.append(
            "row_merge=mean with row-wise bias correction: a row that one replica touched moves by 1/N of its way, and no learning "
            "rate repairs both rare and hot rows (-0.003 to -0.008 AUC); use bias_correction=global (recipe `paper`) or row_merge=union"
        )
    if bias_correction == "global" and spec.row_merge == "union":
        found.append(
            "row_merge=union with global bias correction: rare rows already take steps 3 to 6 times as long, and all of them are added "
            "up (-0.001 to -0.004 AUC); use bias_correction=row (recipe `default`) or row_merge=mean"
        )
    if spec.row_merge == "touched":
        found.append(
            "row_merge=touched: a row that several replicas touched now and then moves by the mean instead of the sum of its steps "
            "(-0.002 to -0.007 AUC); use row_merge=union"
        )
    if spec.row_merge == "mean" and spec.moments == "renew":
        found.append(
            "moments=renew with row_merge=mean: moments would move as under `union` and weights by 1/N of that; use moments=delta, "
            "which under `mean` is the plain mean"
        )
    if spec.row_merge == "union" and spec.moments == "delta" and spec.row_states != "weights":
        found.append(
            "moments=delta with row_merge=union: changes of averages are added up like steps, which blew up at k=100 and lost 0.002 AUC "
            "on Frappe at k=20; use moments=renew"
        )
    if spec.row_states != "weights" and spec.m_period_rounds < spec.v_period_rounds:
        found.append(
            f"m_period_rounds={spec.m_period_rounds} below v_period_rounds={spec.v_period_rounds}: a replica that has hardly touched a row "
            "gets the first moment of the others and keeps its own second one, which is small, so the row's next steps are far too long "
            "(3 and 6 on Frappe: AUC -0.05, LogLoss 4 instead of 0.2); use v_period_rounds <= m_period_rounds"
        )
    if spec.row_states != "weights" and 1 < spec.k <= 2 and spec.m_period_rounds == spec.v_period_rounds == 1 and spec.wire == "fp32":
        found.append(
            f"k={spec.k} with moments sent in fp32 every round moves more bytes than synchronous training; use k >= 5, row_states=auto, "
            "or a narrower wire"
        )
    return found
