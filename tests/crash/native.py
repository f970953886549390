"""Builds the torch-free C++ targets of `kernels/` with CMake, once per run and kind of build."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 900
NEEDS = "apt-get install g++ cmake ninja-build libgtest-dev"


def build(target: str, sanitizer: str = "") -> Path:
    """Builds `target` and returns the program; skips the test, saying why, where a tool is missing.

    Args:
        target: A CMake target of `kernels/CMakeLists.txt`.
        sanitizer: "address", "thread" or "" for a plain optimised build.

    Raises:
        AssertionError: The sources do not compile.
    """
    for tool in ("g++", "cmake", "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: {NEEDS}")
    folder = ROOT / "build" / f"kernels-{sanitizer or 'plain'}"
    folder.mkdir(parents=True, exist_ok=True)
    _run(["cmake", "-S", str(ROOT / "kernels"), "-B", str(folder), "-G", "Ninja", f"-DKSTEP_SANITIZE={sanitizer}"])
    listing = _run(["ninja", "-C", str(folder), "-t", "targets", "all"])
    if f"\n{target}: " not in f"\n{listing}":
        pytest.skip(f"target {target} is not there, probably for want of GoogleTest: {NEEDS}")
    _run(["ninja", "-C", str(folder), target])
    return folder / target


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=_environment(), check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _environment() -> dict[str, str]:
    """Two compilers at a time: the machine is small and shared."""
    return {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
