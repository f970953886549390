"""Works ahead of a consumer in background threads, within a bound. Nothing here knows what the items are."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_JOIN_DEADLINE_S = 30.0  # the thread ends after the item in hand; only a medium that hangs takes longer, and it cannot be waited for


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _Failure:
    error: Exception


def work_ahead(items: Generator[T, None, None], depth: int, name: str) -> Generator[T, None, None]:
    """Yields `items`, up to `depth` of which are made ahead of time by a background thread.

    An exception of the producer is raised in the consumer after the items before it. The thread ends, and `items` is closed,
    when the items are exhausted and also when the returned iterator is closed or dropped half-way.

    Args:
        items: consumed in the background thread only.
        depth: items held ready, at least 1; one more may be in the making.
        name: name of the thread, for debuggers.
    """
    ready: queue.Queue[_Item[T] | _Failure | None] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    thread = threading.Thread(target=_produce, args=(items, ready, stop), name=name, daemon=True)
    thread.start()
    try:
        while (message := ready.get()) is not None:
            if isinstance(message, _Failure):
                raise message.error
            yield message.value
    finally:
        stop.set()
        with contextlib.suppress(queue.Empty):
            while True:  # makes room, so that a producer blocked on a full queue comes to look at `stop`
                ready.get_nowait()
        thread.join(_JOIN_DEADLINE_S)


def _produce(items: Generator[T, None, None], ready: "queue.Queue[_Item[T] | _Failure | None]", stop: threading.Event) -> None:
    last: _Failure | None = None
    try:
        for item in items:
            ready.put(_Item(item))
            if stop.is_set():
                break
    except Exception as error:
        last = _Failure(error)
    items.close()
    if not stop.is_set():
        ready.put(last)


def map_ahead(function: Callable[[T], R], items: Iterable[T], num_threads: int, num_ahead: int | None = None) -> Generator[R, None, None]:
    """Yields `function(item)` for every item, in order, computed by threads that run ahead of the caller.

    Worth it only where `function` spends its time outside the interpreter lock, as numpy and Arrow do on large arrays.
    `items` is consumed in the caller's thread. An exception is raised in place of the result that it prevented.

    Args:
        function: is called in several threads at a time.
        items: its arguments.
        num_threads: threads of the pool.
        num_ahead: items that are taken before the result of the first one is waited for; None = `num_threads`.
    """
    num_ahead = num_threads if num_ahead is None else num_ahead
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kstep-map") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > num_ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
