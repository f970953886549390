"""Shared by all tests: where real data lies, how hypothesis searches, and an environment free of torchrun's variables."""

import os
from pathlib import Path

import hypothesis
import pytest

from tests.spawn import spawn_ranks  # noqa: F401 - a fixture for all tests

ROOT = Path(__file__).resolve().parent.parent
REAL_DATA = Path(os.environ.get("KSTEP_TEST_DATA", ROOT.parent / "shared" / "data"))
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# No deadline: the first example of many tests imports torch. In CI the examples are the same in every run, so that a
# failure there is a failure everywhere; on a desk they differ, so that the search goes on.
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets (`ml1m/`, `frappe/`, ...); skips where they are not at hand."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no real data at {REAL_DATA}: put it next to the checkout or set KSTEP_TEST_DATA")
    return REAL_DATA


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start as a world of one, also when they are run inside a job."""
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
