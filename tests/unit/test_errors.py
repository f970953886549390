"""The error tree: one root, built-in kinds where callers expect them, and no class without a docstring."""

import inspect

import pytest

from torchrec_kstep import errors

CLASSES = [member for _, member in inspect.getmembers(errors, inspect.isclass) if member.__module__ == errors.__name__]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_is_caught_by_the_root(error: type[Exception]) -> None:
    assert issubclass(error, errors.KStepError)
    assert error.__doc__
    with pytest.raises(errors.KStepError, match="table 'user', row 7"):
        raise error("table 'user', row 7")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.KernelNotBuiltError, ImportError),
        (errors.StorageIOError, OSError),
    ],
)
def test_errors_are_also_the_builtin_kind_that_callers_catch(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


@pytest.mark.parametrize("error", [errors.CorruptionError, errors.TierFullError, errors.StorageIOError])
def test_storage_errors_have_one_parent(error: type[Exception]) -> None:
    assert issubclass(error, errors.StorageError)
