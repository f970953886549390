"""What every data set offers to the training loop, and the stream of batches it hands out."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

from torchrec_kstep.data.background import work_ahead
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.types import Batch, FeatureSchema, Split


@dataclass(frozen=True)
class BatchStream:
    """One rank's micro-batches of one epoch, from `start_step` on. Iterating again starts again at `start_step`.

    Attributes:
        num_steps: steps of the whole epoch, those before `start_step` included.
        start_step: the first step that is yielded.
        micro_batches: micro-batches per step; `(num_steps - start_step) * micro_batches` batches come.
        prefetch_batches: batches made ahead by a background thread; 0 = none, batches are made when asked for.
        make_batches: starts a fresh pass.
    """

    num_steps: int
    start_step: int
    micro_batches: int
    prefetch_batches: int
    make_batches: Callable[[], Generator[Batch, None, None]]

    def __post_init__(self) -> None:
        """Refuses to start behind the end."""
        if not 0 <= self.start_step <= self.num_steps:
            raise ConfigError(
                f"cannot start at step {self.start_step}: the epoch has {self.num_steps} steps; was the data or the batch size changed?"
            )

    def __len__(self) -> int:
        """Number of micro-batches that one pass yields."""
        return (self.num_steps - self.start_step) * self.micro_batches

    def __iter__(self) -> Generator[Batch, None, None]:
        """Starts a pass; dropping the iterator ends its background threads."""
        batches = self.make_batches()
        if self.prefetch_batches:
            batches = work_ahead(batches, self.prefetch_batches, "kstep-batches")
        return batches


class Dataset(Protocol):
    """Rows in three splits. Implementations hold no position: a stream is made from (split, order, start_step) alone."""

    @property
    def schema(self) -> FeatureSchema:
        """Names of the columns and rows of the tables."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the rows and their encoding; a checkpoint of another fingerprint's run cannot be resumed."""
        ...

    def num_rows(self, split: Split) -> int:
        """Rows of a split, over all ranks."""
        ...

    def batches(self, split: Split, order: BatchOrder, start_step: int = 0) -> BatchStream:
        """Makes the stream of the order's rank. Not collective: ranks may call it at different times."""
        ...
