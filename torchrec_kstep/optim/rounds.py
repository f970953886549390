"""What rounds cost and did, added up between two reports."""

from collections.abc import Callable

from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.replicas.interface import interface_sent_bytes


class RoundTotals:
    """Sums of this rank since the last `take`."""

    def __init__(self, read_interface: Callable[[], int | None] = interface_sent_bytes) -> None:
        """Starts with no round; `read_interface` returns the bytes that the host's network cards have sent, if it can be told."""
        self._read_interface = read_interface
        self._interface_bytes = read_interface()
        self._sums: dict[str, float] = {}
        self._num_dense_rounds = 0
        self._num_row_rounds = 0
        self._sent_bytes: dict[str, int] = {}  # as their senders count them: since the beginning
        self._first_step = 0

    def add_dense(self, drift: float, seconds: float, num_bytes_sent: int) -> None:
        """Adds a round of dense parameters; `num_bytes_sent` since the beginning."""
        self._num_dense_rounds += 1
        self._add("dense_drift", drift)
        self._add("dense_s", seconds)
        self._add("dense_sent_bytes", self._new_bytes("dense", num_bytes_sent))

    def add_rows(self, report: RoundReport) -> None:
        """Adds a round of rows."""
        self._num_row_rounds += 1
        self._add("rows_drift", report.drift)
        self._add("rows_sent_bytes", report.total_sent_bytes)
        self._add("rows_received_bytes", report.total_received_bytes)
        self._add("own_rows", sum(report.num_own_rows.values()))
        self._add("union_rows", sum(report.num_union_rows.values()))
        self._add("read_rows", report.num_rows_read)
        self._add("base_bytes", report.base_bytes)
        self._add("buckets", report.num_buckets)
        self._add("rows_s", report.total_duration_s)
        for phase, seconds in report.duration_s.items():
            self._add(f"rows_{phase.replace(' ', '_')}_s", seconds)

    def add_gradients(self, num_bytes_sent: int) -> None:
        """Adds a synchronous step; `num_bytes_sent` since the beginning."""
        self._add("gradient_sent_bytes", self._new_bytes("gradients", num_bytes_sent))

    def take(self, step: int) -> dict[str, float]:
        """Returns means per round and bytes per step; empty if nothing was exchanged. Starts anew.

        `sent_bytes_per_step` counts what this rank handed to collectives between replicas; `interface_sent_bytes_per_step` what the
        network cards of its host sent, all its ranks and other programs included.
        """
        sums, num_dense, num_rows = self._sums, self._num_dense_rounds, self._num_row_rounds
        if not sums:
            return {}  # the steps count in the next report
        num_steps = max(step - self._first_step, 1)
        self._sums, self._num_dense_rounds, self._num_row_rounds, self._first_step = {}, 0, 0, step
        gradient_bytes = sums.pop("gradient_sent_bytes", 0.0)
        sent_bytes = gradient_bytes + sums.get("rows_sent_bytes", 0.0) + sums.get("dense_sent_bytes", 0.0)
        values = {"rounds": float(num_dense), "sent_bytes_per_step": sent_bytes / num_steps}
        before, self._interface_bytes = self._interface_bytes, self._read_interface()
        if before is not None and self._interface_bytes is not None:
            values["interface_sent_bytes_per_step"] = (self._interface_bytes - before) / num_steps
        return values | {name: total / max(num_dense if name.startswith("dense") else num_rows, 1) for name, total in sums.items()}

    def _new_bytes(self, sender: str, num_bytes_sent: int) -> int:
        new = num_bytes_sent - self._sent_bytes.get(sender, 0)
        self._sent_bytes[sender] = num_bytes_sent
        return new

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value
