"""What a snapshot keeps, beside its rows, of a run in which absent rows replay their L2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrec_kstep.errors import ConfigError, CorruptionError
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec, replay_rule, replaying_spec


@dataclass(frozen=True)
class ReplayState:
    """How far training had come, and by what its rows are brought there.

    Attributes:
        optimizer: the rule of an update.
        last_step: the step that was done last; 0 before the first.
        rates: learning rates until then, as `RowGroup.rates` returns them.
    """

    optimizer: OptimizerSpec
    last_step: int
    rates: tuple[tuple[int, float, int], ...]

    @classmethod
    def of(cls, group: RowGroup, next_step: int) -> "ReplayState | None":
        """Returns the state of a group whose next update is that of `next_step`; None where absent rows stand still."""
        if group.optimizer is None or not group.optimizer.replays_l2:
            return None
        return cls(group.optimizer, next_step - 1, tuple(group.rates()))

    def as_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        return {"rule": replay_rule(self.optimizer), "last_step": self.last_step, "rates": [list(run) for run in self.rates]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> "ReplayState":
        """Reads it; `where` names the snapshot.

        Raises:
            CorruptionError: a value is missing or of another kind.
        """
        try:
            rates = tuple((int(clock), float(rate), int(shift)) for clock, rate, shift in values["rates"])
            return cls(replaying_spec(values["rule"]), int(values["last_step"]), rates)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{where}: what it says about L2 of absent rows cannot be read: {error}") from error

    def hand_over(self, group: RowGroup) -> None:
        """Lets a group whose rows are those of the snapshot go on, or be read, from there."""
        if self.rates:
            group.restore_rates(self.rates)
            group.set_step(self.rates[-1][1], self.last_step + 1)
