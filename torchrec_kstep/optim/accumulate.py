"""Gradient accumulation that TorchRec's train pipelines do not notice."""

from collections.abc import Callable, Mapping
from typing import Any

from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from torchrec_kstep.errors import CheckpointError


class AccumulatingOptimizer(OptimizerWrapper):  # type: ignore[misc]  # torchrec has no type information
    """Steps once per `num_micro_batches` calls of `step`; in between, gradients add up.

    A pipeline calls `zero_grad`, forward, backward and `step` for each micro-batch. Here the first `zero_grad` and the
    last `step` of a global batch act, the others do nothing. The phase inside a global batch is not part of the state:
    saving or loading in the middle is refused, because the gradients so far would be lost.
    """

    def __init__(self, optimizer: KeyedOptimizer, num_micro_batches: int) -> None:
        """Wraps `optimizer`, whose gradients must still be there after a backward (so no fused tables)."""
        super().__init__(optimizer)
        self._num_micro_batches = num_micro_batches
        self._phase = 0

    @property
    def is_between_batches(self) -> bool:
        """Whether no global batch is under way."""
        return self._phase == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients if a global batch begins."""
        if self.is_between_batches:
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Counts a micro-batch; steps if it was the last one of its global batch."""
        self._phase = (self._phase + 1) % self._num_micro_batches
        if self.is_between_batches:
            self._optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state.

        Raises:
            CheckpointError: a global batch is under way.
        """
        self._refuse_in_the_middle("saved")
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the wrapped optimizer's state.

        Raises:
            CheckpointError: a global batch is under way.
        """
        self._refuse_in_the_middle("loaded")
        super().load_state_dict(state_dict)

    def _refuse_in_the_middle(self, verb: str) -> None:
        """Raises unless no global batch is under way."""
        if not self.is_between_batches:
            raise CheckpointError(
                f"optimizer state cannot be {verb} after micro-batch {self._phase} of {self._num_micro_batches}: "
                "finish the global batch first"
            )
