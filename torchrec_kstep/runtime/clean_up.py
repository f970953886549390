"""Cleaning up behind a failure without hiding it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def cleaned_up(clean_up: Callable[[], None]) -> Iterator[None]:
    """Calls `clean_up` behind the block, however that ends.

    What goes wrong in `clean_up`, also a signal that arrives meanwhile, is raised only where the block itself went well; else it
    becomes a note of the block's own exception, which stays the cause.
    """
    try:
        yield
    except BaseException as first:
        try:
            clean_up()
        except BaseException as second:
            first.add_note(f"cleaning up after this failed as well: {type(second).__name__}: {second}")
        raise
    clean_up()
