"""Errors of the compiled library as errors of this package."""

import contextlib
import re
from collections.abc import Iterator

from torchrec_kstep.errors import CorruptionError, DataError, KStepError, StorageError, StorageIOError, TierFullError

# The kind at the end of a message of the C++ core.
_STATUS_KIND = re.compile(r"\((corruption|i/o error|no space|full|busy|not found)\)")
_STATUS_ERRORS: dict[str, type[KStepError]] = {
    "corruption": CorruptionError,
    "i/o error": StorageIOError,
    "no space": TierFullError,
    "full": TierFullError,
}


@contextlib.contextmanager
def kernel_errors() -> Iterator[None]:
    """Turns the errors of the compiled library into those of this package."""
    try:
        yield
    except KStepError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from error
    except RuntimeError as error:
        found = _STATUS_KIND.search(str(error))
        if found is None:
            raise
        raise _STATUS_ERRORS.get(found.group(1), StorageError)(str(error)) from error
