"""Errors of the row store, with the store they come from."""

import contextlib
from collections.abc import Iterator, Sequence

from torchrec_kstep.errors import ConfigError, DataError, StorageError
from torchrec_kstep.ops._errors import kernel_errors


@contextlib.contextmanager
def store_errors(paths: Sequence[str]) -> Iterator[None]:
    """Turns failures of the compiled store into `StorageError` or, for wrong arguments, `ConfigError`; both name a path."""
    try:
        with kernel_errors():
            yield
    except StorageError as error:
        raise type(error)(_with_path(str(error), paths)) from error
    except DataError as error:
        raise ConfigError(_with_path(str(error), paths)) from error


def _with_path(message: str, paths: Sequence[str]) -> str:
    return message if any(path in message for path in paths) else f"row store at {paths[0]}: {message}"
