"""Goal: other releases of TorchRec offer what the seam relies on, and train to the same numbers. Layer: unit, slow, needs a network.

Only the pinned release is supported; this says which step to another one would be a small one. A release's Python sources
run on the pinned torch and FBGEMM, without its metadata, so that the check of versions sees the pinned ones.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.checkout import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RELEASES = ("1.5.0", "1.7.0", "1.9.0")  # 1.6 was never published

SIGNATURES = """
from torchrec_kstep.torchrec_seam.contract import NEEDED, missing
print("\\n".join(filter(None, map(missing, NEEDED))))
"""

# Steps, outputs and state against an unsharded collection with a reference optimizer, as in test_tiered_equality.
EQUALITY = """
from tests.multiprocess.tiered_cases import MEAN, SUM, Case, check_cases
from tests.multiprocess.tiny import one_rank_group
with one_rank_group() as world:
    check_cases(world, [
        Case(("tw0", "rw", "cw")),
        Case(("rw", "tw0", "rw"), (MEAN, SUM, SUM), stock={"b": "fused"}),
        Case(("rw", "tw0", "cw"), deferred=True, micro_batches=3),
    ])
"""

TRAINING = """
import sys
from torchrec_kstep.train import main
sys.exit(main([
    "data=synthetic", "data.synthetic.num_rows_per_table=[500,500,500]", "data.synthetic.num_eval_rows=2000", "model=dlrm",
    "train.max_steps=30", "train.batch_size=128", "tiers=dram_ssd", "tiers.dram_bytes=64KiB", "tiers.segment_bytes=64KiB",
    "metrics.progress=none", f"run_dir={sys.argv[1]}",
]))
"""


@pytest.fixture(scope="module")
def pinned_result(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(TRAINING, None, str(tmp_path_factory.mktemp("pinned") / "run"))


@pytest.fixture(params=RELEASES)
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The Python files of a release."""
    folder = tmp_path / "sources"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"torchrec=={request.param}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer within 120 s")
    if done.returncode:
        pytest.skip(f"torchrec {request.param} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    [wheel] = folder.glob("torchrec-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    [metadata] = folder.glob("torchrec-*.dist-info")
    shutil.rmtree(metadata)
    return folder


def run(code: str, sources: Path | None, *arguments: str) -> str:
    """Runs code in a process of its own that imports TorchRec from `sources`, None for the pinned one; returns its output."""
    paths = [str(ROOT)] if sources is None else [str(sources), str(ROOT)]
    told = "" if sources is None else f"import torchrec; assert torchrec.__file__.startswith({str(sources)!r}), torchrec.__file__\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", told + code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_another_release_has_what_is_needed_and_trains_to_the_same_numbers(sources: Path, pinned_result: str, tmp_path: Path) -> None:
    assert run(SIGNATURES, sources).strip() == ""
    run(EQUALITY, sources)
    assert run(TRAINING, sources, str(tmp_path / "run")).splitlines()[-1] == pinned_result.splitlines()[-1]
