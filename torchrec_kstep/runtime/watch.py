"""A thread that keeps a rank from outliving its job: it beats, looks for a failure elsewhere, and hears signals.

The main thread may sit in a collective or in a long computation, where neither an exception nor a Python signal handler
reaches it. This thread gives it a grace period to end by itself and then ends the process.
"""

import os
import select
import signal
import sys
import threading
from types import FrameType

from torch._C._distributed_c10d import Store

from torchrec_kstep.runtime import failure
from torchrec_kstep.runtime.failure import Failure, Stopped

POLL_S = 0.5  # also the time between heartbeats
GRACE_S = 5.0  # for the main thread to end by itself


class Watch:
    """Watches over one rank from `start` to `stop`."""

    def __init__(self, store: Store, rank: int) -> None:
        """`store` must be a connection of this thread's own: a store's waiting call holds its connection."""
        self._store = store
        self._rank = rank
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kstep-watch", daemon=True)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self.first_failure: Failure | None = None  # of another rank; known here even when the store has gone with it
        self._old_handlers: dict[int, object] = {}
        self._old_wakeup_fd = -1

    def start(self) -> None:
        """Installs the signal handlers (from the main thread only) and starts watching."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._old_handlers[signum] = signal.signal(signum, _raise_stopped)
            self._old_wakeup_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._thread.start()

    def let_finish(self) -> None:
        """From now on a signal raises nothing here: this rank is ending already, and the grace period bounds how long."""
        for signum in () if self._stopping.is_set() else self._old_handlers:
            signal.signal(signum, _leave_to_the_thread)

    def stop(self) -> None:
        """Stops watching and gives the signals back. Safe to call twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            for signum, handler in self._old_handlers.items():
                signal.signal(signum, handler)  # type: ignore[arg-type]  # what signal.signal returned before
        os.write(self._wake_write, b"\0")
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        num_beats = 0
        while not self._stopping.is_set():
            if signum := self._wait_for_signal(POLL_S):
                self._end_after_grace(f"stopped by {signal.Signals(signum).name}", 128 + signum)
                return
            num_beats += 1
            try:
                self._store.set(failure.heartbeat_key(self._rank), str(num_beats))
                first = failure.recorded(self._store)
                if first is not None and first.reported_by != self._rank:
                    self.first_failure = first
                    self._store.set(failure.seen_key(self._rank), "1")
            except RuntimeError:  # the store's errors: its process, rank 0 or the launcher, is gone
                self._end_after_grace("stopped: lost the job's store, because the process that holds it ended", failure.EXIT_FAILURE)
                return
            if self.first_failure is not None:
                self._end_after_grace(f"stopped, because rank {self.first_failure.rank} failed first", failure.EXIT_FAILURE)
                return

    def _wait_for_signal(self, timeout_s: float) -> int:
        readable, _, _ = select.select([self._wake_read], [], [], timeout_s)
        return next((byte for byte in os.read(self._wake_read, 64) if byte), 0) if readable else 0

    def _end_after_grace(self, reason: str, code: int) -> None:
        """Returns if the main thread stops the watch in time; else says why and ends the process."""
        if self._stopping.wait(GRACE_S):
            return
        print(f"rank {self._rank} {reason}", file=sys.stderr, flush=True)
        os._exit(code)


def _raise_stopped(signum: int, _frame: FrameType | None) -> None:
    raise Stopped(signum)


def _leave_to_the_thread(_signum: int, _frame: FrameType | None) -> None:
    """Python writes the signal to the wake-up descriptor as well."""
