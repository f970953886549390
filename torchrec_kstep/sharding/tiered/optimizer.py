"""The optimizer of the tables of one kernel, as TorchRec sees it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchrec_kstep.ops.batch import RowGradients
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.sharding.tiered.shards import TableShard, sharded_field
from torchrec_kstep.torchrec_seam.optim import FusedOptimizer

STEP_COUNT = "num_steps"


class TieredOptimizer(FusedOptimizer):  # type: ignore[misc]  # torchrec has no type information
    """Gives rows their learning rate and step, and in deferred mode their update.

    Fused: rows are updated inside backward, with the rate and step that the last `zero_grad` or `step` handed over, so set
    a group's `lr` before `zero_grad`. Deferred: backward only adds up gradients, over any number of backwards, and `step`
    updates each row once; `zero_grad` forgets what has been added up. Either way the step counts calls of `step`, from 1.

    State, by table: every record field of the update rule as a sharded tensor, and the number of steps done (`num_steps`,
    scalar int64, the same on all ranks).
    """

    def __init__(
        self,
        group: RowGroup,
        shards: Sequence[TableShard],
        optimizer: OptimizerSpec,
        is_deferred: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        """Takes over the update of `group`.

        Args:
            group: the rows.
            shards: its tables.
            optimizer: the update rule; its `lr` is the start value.
            is_deferred: update in `step` instead of inside backward.
            process_group: the ranks that share the tables.
        """
        self._group = group
        self._is_deferred = is_deferred
        self._num_steps = torch.zeros((), dtype=torch.int64)
        self._summed: RowGradients | None = None
        self._factors: torch.Tensor | None = None
        by_table: dict[str, list[TableShard]] = {}
        for shard in shards:
            by_table.setdefault(shard.table, []).append(shard)
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        for table, own in by_table.items():
            weight = sharded_field(own, "weight", process_group)
            # Touches are of the running interval, and the last step of a row that is shown is that of the group: neither is saved.
            fields = [field.name for field in optimizer.state_fields(dim=1)]
            params[f"{table}.weight"] = weight
            state[weight] = {f"{table}.{field}": sharded_field(own, field, process_group) for field in fields}
            state[weight][f"{table}.{STEP_COUNT}"] = self._num_steps
        super().__init__(params, state, [{"params": list(params.values()), "lr": optimizer.lr}])
        group.set_deferred(is_deferred)
        self.hand_over()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets pending gradients and hands the learning rate over."""
        del set_to_none
        self._summed = self._factors = None
        if self._group.num_pending:
            self._group.take_pending()
        self.hand_over()

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Ends a step: applies pending gradients (deferred), counts, and hands the rate over."""
        assert closure is None, "rows have no closure to evaluate"
        self.hand_over()
        if (summed := self.summed_gradients()) is not None:
            self._group.apply(summed, self._factors)
        self._summed = self._factors = None
        self._num_steps += 1
        self.hand_over()

    def squared_gradient_norm(self) -> torch.Tensor:
        """Returns the sum of the squares of the gradients that wait for `step`: scalar float64. Not collective."""
        summed = self.summed_gradients()
        if summed is None:
            return torch.zeros((), dtype=torch.float64)
        norm: torch.Tensor = torch.linalg.vector_norm(summed.grads, dtype=torch.float64)
        return norm.square()

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients that wait for `step`."""
        if (summed := self.summed_gradients()) is not None:
            summed.grads.mul_(factor)

    def take_over(self, gradients: RowGradients) -> None:
        """Has `step` use these gradients, e.g. the mean over replicas, in place of those that wait. Not collective."""
        self._summed = gradients

    def scale_rows(self, factors: torch.Tensor) -> None:
        """Has `step` multiply the gradient of each waiting row, its L2 included, in place of the optimizer's clip: `[U]` float32."""
        self._factors = factors

    def summed_gradients(self) -> RowGradients | None:
        """Returns the gradients that wait for `step`, or None; takes them over from the rows, where a backward would add to them."""
        if self._group.num_pending:
            assert self._summed is None, "a backward between looking at the gradients of a step and taking it"
            self._summed = self._group.take_pending()
        return self._summed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads record fields and the number of steps."""
        super().load_state_dict(state_dict)
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Hands the loaded number of steps to the rows; TorchRec calls it after loading several optimizers as one."""
        self._group.rebase(int(self._num_steps))
        self.hand_over()

    def hand_over(self, step: int | None = None) -> None:
        """Sets rate and step of the updates that follow; `step` (from 1) in place of the next one."""
        self._group.set_step(float(self.param_groups[0]["lr"]), int(self._num_steps) + 1 if step is None else step)

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return int(self._num_steps)

    @property
    def is_deferred(self) -> bool:
        """Whether rows are updated in `step` by choice of the sharder."""
        return self._is_deferred
