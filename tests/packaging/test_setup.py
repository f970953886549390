"""`requirements/install.sh`: does only what changed, works from a path with spaces, and says in one line what is wrong.

A stand-in for `.venv/bin/python` records what it is asked to do, so nothing is installed; the tests at the end use a real one.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("requirements", "setup.py", "setup.cfg", "pyproject.toml")
STAND_IN = """#!/bin/sh
folder="$(dirname "$0")/../.."
case "$*" in
  -c*) echo 3.11 ;;
  -V) echo Python 3.11.7 ;;
  *) echo "$*" >> "$folder/calls.txt"; cat "$folder/output.txt"; exit "$(cat "$folder/status.txt")" ;;
esac
"""


class Checkout:
    """A copy of what set-up reads, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kernels" / "ops").mkdir(parents=True)
        (folder / "torchrec_kstep").mkdir()
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        shutil.copy(ROOT / "torchrec_kstep" / "_version.py", folder / "torchrec_kstep")
        (folder / "kernels" / "ops" / "ops.cpp").write_text("// a kernel\n")
        self.answer("", 0)

    def add_stand_in_venv(self) -> None:
        (self.folder / ".venv" / "bin").mkdir(parents=True)
        python = self.folder / ".venv" / "bin" / "python"
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def answer(self, output: str, status: int) -> None:
        """What every following call of the stand-in prints and returns."""
        (self.folder / "output.txt").write_text(output)
        (self.folder / "status.txt").write_text(str(status))

    def set_up(self, kind: str = "runtime", **environ: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "requirements/install.sh", kind]
        env = {**os.environ, **environ}
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=100, check=False)

    def calls(self) -> list[str]:
        """What the stand-in was asked to do since the last look."""
        path = self.folder / "calls.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.removeprefix("-m pip install --disable-pip-version-check --no-input ") for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a folder with spaces")


PACKAGE = "--no-deps --no-build-isolation --editable ."
KERNELS = "setup.py --quiet build_ext --inplace"
CPU = "--no-deps -r requirements/cpu.txt"
DEV = "--no-deps -r requirements/dev.txt"


def test_torch_comes_first_and_a_second_run_does_nothing(checkout: Checkout) -> None:
    checkout.add_stand_in_venv()
    first = checkout.set_up()
    assert first.returncode == 0, first.stderr
    assert checkout.calls() == ["torch==2.13.0", CPU, KERNELS, PACKAGE]
    second = checkout.set_up()
    assert (second.returncode, second.stdout, second.stderr, checkout.calls()) == (0, "", "", [])
    assert checkout.set_up("dev").returncode == 0
    assert checkout.calls() == [DEV]


def append(name: str) -> Callable[[Checkout], None]:
    def change(checkout: Checkout) -> None:
        with (checkout.folder / name).open("a") as file:
            file.write("\n")

    return change


def add_header(checkout: Checkout) -> None:
    (checkout.folder / "kernels" / "ops" / "new header.h").write_text("// new\n")


def move(checkout: Checkout) -> None:
    moved = checkout.folder.with_name("moved elsewhere")
    checkout.folder.rename(moved)
    checkout.folder = moved


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (append("requirements/cpu.txt"), [CPU]),
        (append("setup.cfg"), [PACKAGE]),
        (append("setup.py"), [KERNELS, PACKAGE]),
        (append("kernels/ops/ops.cpp"), [KERNELS]),
        (add_header, [KERNELS]),
        (append("README.md"), []),
        (move, [KERNELS, PACKAGE]),  # an editable install and compiled objects hold the folder's path
    ],
    ids=["cpu lock", "metadata", "build", "kernel source", "kernel header", "readme", "moved checkout"],
)
def test_only_what_changed_is_done_again(checkout: Checkout, change: Callable[[Checkout], None], expected: list[str]) -> None:
    checkout.add_stand_in_venv()
    assert checkout.set_up().returncode == 0
    checkout.calls()
    change(checkout)
    assert checkout.set_up().returncode == 0
    assert checkout.calls() == expected


def test_a_stage_that_failed_is_done_again(checkout: Checkout) -> None:
    checkout.add_stand_in_venv()
    checkout.answer("ERROR: odd\n", 1)
    assert checkout.set_up().returncode == 1
    checkout.answer("", 0)
    checkout.calls()
    assert checkout.set_up().returncode == 0
    assert checkout.calls()[0] == "torch==2.13.0"


def one_line_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: No matching distribution found\n", "no network"),
        (
            "ERROR: No x (from versions: none)\nERROR: No matching distribution found for x\n",
            "no network",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0\n", "No matching distribution found for torch==2.13.0"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "the disk is full"),
        ("x\n  kernels/ops/ops.cpp:7:3: error: 'kstp' was not declared\nmore\n", "kernels/ops/ops.cpp:7:3: error: 'kstp' was not declared"),
        ("  torchrec_kstep: no C++ compiler 'g++' found\n", "torchrec_kstep: no C++ compiler 'g++' found"),
        ("something unforeseen\n", "see the end of .venv/setup.log"),
    ],
)
def test_a_failure_is_told_in_one_line_with_its_cause(checkout: Checkout, output: str, expected: str) -> None:
    checkout.add_stand_in_venv()
    checkout.answer(output, 1)
    line = one_line_of(checkout.set_up())
    assert expected in line
    assert ".venv/setup.log" in line
    assert output in (checkout.folder / ".venv" / "setup.log").read_text()


def test_a_missing_compiler_is_told_before_anything_is_installed(checkout: Checkout) -> None:
    line = one_line_of(checkout.set_up(CXX="no-such-compiler"))
    assert "no-such-compiler" in line
    assert "apt-get install g++" in line
    assert not (checkout.folder / ".venv").exists()


def test_a_missing_python_is_told(checkout: Checkout) -> None:
    assert "make PYTHON=" in one_line_of(checkout.set_up(PYTHON="no-such-python"))


@pytest.mark.parametrize("version", ["3.10", "3.12", "2.7"])
def test_another_python_is_told(checkout: Checkout, tmp_path: Path, version: str) -> None:
    python = tmp_path / "other python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    line = one_line_of(checkout.set_up(PYTHON=str(python)))
    assert f"is {version}" in line
    assert "3.11" in line


def test_a_venv_that_does_not_run_is_told_and_kept(checkout: Checkout) -> None:
    checkout.add_stand_in_venv()
    python = checkout.folder / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    assert "rm -rf .venv" in one_line_of(checkout.set_up())
    assert python.exists()


@pytest.mark.timeout(200)
def test_without_network_a_real_pip_ends_in_one_line(checkout: Checkout) -> None:
    nowhere = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_RETRIES": "1",
        "PIP_FIND_LINKS": "",
        "PIP_NO_CACHE_DIR": "1",
    }
    assert "no network" in one_line_of(checkout.set_up(PYTHON=sys.executable, **nowhere))


def test_building_without_a_compiler_is_told_in_one_line() -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--dry-run"]
    if not list((ROOT / "kernels").glob("*/*.cpp")):
        pytest.skip("nothing to compile in this checkout")
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert "no C++ compiler 'no-such-compiler' found" in one_line_of(result)
