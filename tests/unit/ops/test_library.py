"""Layer 1: how the compiled library is found, and that nothing loads it by accident."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_kstep.errors import KernelNotBuiltError
from torchrec_kstep.ops import _library


def test_a_missing_library_names_the_folder_and_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(KernelNotBuiltError) as caught:
        _library.find_library(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "pip install" in str(caught.value)


def test_two_libraries_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("_kernels.a.so", "_kernels.b.so"):
        (tmp_path / name).touch()
    with pytest.raises(KernelNotBuiltError, match=r"_kernels\.a\.so, _kernels\.b\.so"):
        _library.find_library(tmp_path)


def test_a_library_of_another_build_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_kernels.so").write_bytes(b"not a shared library")
    monkeypatch.setattr(_library, "find_library", lambda: tmp_path / "_kernels.so")
    with pytest.raises(KernelNotBuiltError, match="another torch"):
        _library.load.__wrapped__()


@pytest.mark.parametrize("module", ["torchrec_kstep", "torchrec_kstep.optim_spec"])
def test_importing_stays_light(module: str) -> None:
    """The package and the optimizer specs load neither torch nor the compiled library."""
    code = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_ops_does_not_load_the_library() -> None:
    code = (
        "import torch, torchrec_kstep.ops.row_group, torchrec_kstep.ops.reference; "
        "assert not hasattr(torch.ops.kstep, 'dedup'), 'the library was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
