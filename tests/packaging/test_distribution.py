"""What a user gets: the sdist holds all sources, the wheel all configuration, and the CPU path runs from it elsewhere.

The fast test looks at the sdist. The slow one builds the wheel from that sdist, installs the locked CPU set into an empty
venv outside the checkout, and trains there; it needs the package index.
"""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.checkout import ROOT, copy_checkout

TINY_RUN = ["data.limit=2000", "train.epochs=1", "model.embedding_dim=8", "optim.lr=2e-3"]


def run(command: list[str], cwd: Path, timeout_s: float, **environ: str) -> str:
    """Runs a command; on failure the test shows all that it printed."""
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the checkout, so that neither build products nor work in progress are in the way."""
    return copy_checkout(tmp_path_factory.mktemp("clean copy"))


def files(copy: Path, *patterns: str) -> set[str]:
    """Files of the copy that match a glob, as they are named inside an archive."""
    return {path.relative_to(copy).as_posix() for pattern in patterns for path in copy.glob(pattern)}


@pytest.fixture(scope="module")
def sdist(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist that a release would upload."""
    dist = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(dist), str(copy)], copy, 100)
    (archive,) = dist.glob("*.tar.gz")
    return archive


def test_the_sdist_holds_everything_that_a_build_needs(copy: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    built_from = ("torchrec_kstep/**/*.py", "conf/**/*.yaml", "kernels/**/*.cpp", "kernels/**/*.h", "requirements/*")
    assert sorted(files(copy, *built_from) - names) == []
    assert {"LICENSE", "README.md", "setup.py", "setup.cfg", "pyproject.toml", "torchrec_kstep/py.typed"} <= names


def test_the_version_has_a_place_in_the_changelog() -> None:
    from torchrec_kstep import __version__

    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## (Unreleased|{re.escape(__version__)}\b)", changelog, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_wheel_trains_in_an_empty_venv_outside_the_checkout(copy: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("torchrec_kstep-*")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)], tmp_path, 600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert {f"torchrec_kstep/_{name}" for name in files(copy, "conf/**/*.yaml")} <= inside
    assert files(copy, "torchrec_kstep/**/*.py") <= inside
    assert not [name for name in inside if name.startswith(("tests", "benchmarks", "conf", "kernels"))]
    if files(copy, "kernels/**/*.cpp"):
        assert [name for name in inside if re.fullmatch(r"torchrec_kstep/_kernels\..*\.so", name)]

    venv = tmp_path / "an empty venv"
    run([sys.executable, "-m", "venv", str(venv)], tmp_path, 100)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input"]
    run([*pip, "torch==2.13.0"], tmp_path, 900)
    run([*pip, "--no-deps", "-r", str(source / "requirements" / "cpu.txt"), str(wheel)], tmp_path, 600)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = str(venv / "bin" / "python")
    where = run([python, "-c", "import torchrec_kstep; print(torchrec_kstep.__file__)"], elsewhere, 60)
    assert str(venv) in where
    printed = run([python, "-m", "torchrec_kstep.train", *TINY_RUN, "run_dir=run one"], elsewhere, 300)
    assert re.fullmatch(r"test AUC 0\.\d+", printed.splitlines()[-1])
    assert (elsewhere / "run one").is_dir()
    assert (elsewhere / "prepared").is_dir()
