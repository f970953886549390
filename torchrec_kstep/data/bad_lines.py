"""The budget of malformed lines: what is over it fails the preparation, what is within it is counted and reported."""

from pathlib import Path

from torchrec_kstep.errors import DataError

NUM_KEPT = 20  # messages kept for the report; all are counted


class BadLines:
    """Counts malformed lines against `data.max_bad_lines`. Not thread-safe: blocks are consumed in order by one thread."""

    def __init__(self, max_bad_lines: int) -> None:
        """Allows so many lines to be left out."""
        self.num_bad_lines = 0
        self.messages: list[str] = []
        self._max_bad_lines = max_bad_lines

    def add(self, path: Path, line: int, reason: str) -> None:
        """Counts a malformed line.

        Args:
            path: file of the line.
            line: its number, counted from 1.
            reason: what is wrong with it: expected and found.

        Raises:
            DataError: the budget is used up.
        """
        self.num_bad_lines += 1
        message = f"{path}:{line}: {reason}"
        if len(self.messages) < NUM_KEPT:
            self.messages.append(message)
        if self.num_bad_lines > self._max_bad_lines:
            raise DataError(
                f"{message}; this is malformed line {self.num_bad_lines} and data.max_bad_lines={self._max_bad_lines}. "
                "Repair the file, or allow so many lines to be left out with data.max_bad_lines=<number>"
            )
