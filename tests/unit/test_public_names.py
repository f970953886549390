"""The names of the package itself: all of them can be imported, and importing none of them loads no tensor library."""

import subprocess
import sys

import pytest

import torchrec_kstep


@pytest.mark.parametrize("name", torchrec_kstep.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(torchrec_kstep, name) is not None
    assert name in dir(torchrec_kstep)


def test_other_names_do_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KStepAdamm'"):
        torchrec_kstep.KStepAdamm  # noqa: B018 - the access is the test


def test_importing_the_package_is_light() -> None:
    code = "import sys, torchrec_kstep; print([name for name in ('torch', 'torchrec', 'pyarrow', 'hydra') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "[]\n"
