"""Finds and loads the compiled library, on first use. The only place that does."""

import functools
from pathlib import Path

import torch

from torchrec_kstep.errors import KernelNotBuiltError

LIBRARY_FOLDER = Path(__file__).resolve().parent.parent
LIBRARY_PATTERN = "_kernels*.so"
BUILD_COMMAND = "pip install --no-build-isolation -e . (in the checkout; `make install` does it too)"


def find_library(folder: Path = LIBRARY_FOLDER) -> Path:
    """Returns the compiled library in `folder`.

    Raises:
        KernelNotBuiltError: there is none, or more than one.
    """
    found = sorted(folder.glob(LIBRARY_PATTERN))
    if len(found) == 1:
        return found[0]
    problem = "no compiled library" if not found else f"{len(found)} compiled libraries ({', '.join(path.name for path in found)})"
    raise KernelNotBuiltError(f"{problem} {LIBRARY_PATTERN} in {folder}; expected one. Build it with: {BUILD_COMMAND}")


@functools.cache
def load() -> None:
    """Loads the library and registers fake kernels and gradients; does nothing from the second call on.

    Raises:
        KernelNotBuiltError: the library is absent or was built for another torch.
    """
    path = find_library()
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # torch annotates nothing here
    except OSError as error:
        raise KernelNotBuiltError(
            f"{path} cannot be loaded into torch {torch.__version__} ({error}); it was probably built for another torch. "
            f"Build it again with: {BUILD_COMMAND}"
        ) from error
    from torchrec_kstep.ops import autograd, fake

    fake.register()
    autograd.register()
