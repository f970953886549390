"""What a merge round tells of itself."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class RoundReport:
    """One round of one rank.

    Attributes:
        round_index: number of the round.
        num_local_steps: steps since the last round; the largest of the replicas.
        num_replicas: replicas that merged.
        num_own_rows: rows that this replica touched, by table.
        num_union_rows: rows that any replica touched, by table.
        sent_bytes: handed to other replicas, by phase.
        received_bytes: got from other replicas, by phase.
        duration_s: seconds by phase; phases that exchange include the wait for other replicas.
        num_buckets: parts into which the round was cut.
        num_rows_read: merged rows that had to be read from SSD to be applied.
        base_bytes: DRAM that the bases of touched rows took.
        num_steps_late: steps between collecting and correcting; 0 where training waited.
        drift: how far apart replicas had gone: distance of this replica's weights from the merged ones, over the way they went
            since the last round, on a sample of its rows; 0 where nothing was touched.
    """

    round_index: int
    num_local_steps: int
    num_replicas: int
    num_own_rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_union_rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sent_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    received_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    duration_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_buckets: int = 0
    num_rows_read: int = 0
    base_bytes: int = 0
    num_steps_late: int = 0
    _drift_distance: float = 0.0
    _drift_way: float = 0.0

    @property
    def total_sent_bytes(self) -> int:
        """Bytes handed to other replicas."""
        return sum(self.sent_bytes.values())

    @property
    def total_received_bytes(self) -> int:
        """Bytes got from other replicas."""
        return sum(self.received_bytes.values())

    @property
    def total_duration_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.duration_s.values())

    @property
    def drift(self) -> float:
        """See the class."""
        return self._drift_distance / self._drift_way if self._drift_way > 0 else 0.0

    def add_drift(self, distance: float, way: float) -> None:
        """Adds sampled rows: sums of absolute differences to the merged rows, and to the rows at the last round."""
        self._drift_distance += distance
        self._drift_way += way

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time of its body to a phase."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.duration_s[phase] += perf_counter() - begin
