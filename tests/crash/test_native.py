"""Runs the C++ tests of the torch-free core: plainly in the fast lane, under the sanitizers in the slow one.

What breaks otherwise: formats, recovery, cache and prefetch are tested in C++ only, against a medium that loses, tears,
refuses and damages bytes.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.crash.native import ROOT, build

SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}


# The thread sanitizer slows everything tenfold and only tests with several threads can tell it anything.
THREADED = (
    *("Throttled", "RowStorePaths", "Tiered", "Io", "OnADrive", "Schedules", "ThreadPool", "TableGroup", "SnapshotRows"),
    *("Dedup", "Replay", "TouchTracker", "MergeMessage", "Wire", "FileCloser", "RemovedFiles"),
)
TESTS_OF = {"address": "*", "thread": ":".join(f"*{name}*" for name in THREADED)}


def _run_tests(program: Path, timeout_s: float, tests: str = "*") -> None:
    done = subprocess.run(
        [str(program), "--gtest_brief=1", "--gtest_shuffle", f"--gtest_filter={tests}"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **SANITIZER_OPTIONS},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


def test_every_core_test_with_threads_runs_under_the_thread_sanitizer() -> None:
    tests = {
        f"{suite}.{name}": name + body
        for source in (ROOT / "kernels" / "tests").glob("*_test.cpp")
        for suite, name, body in re.findall(r"^TEST(?:_P|_F)?\((\w+), (\w+)\) \{\n(.*?)^\}", source.read_text(), re.M | re.S)
    }
    assert len(tests) > 60, "they are written in another way now"
    left_out = [name for name, text in tests.items() if re.search("thread", text, re.I) and not any(part in name for part in THREADED)]
    assert not left_out


@pytest.mark.timeout(1200)
def test_core_tests_pass() -> None:
    _run_tests(build("kstep_core_tests"), timeout_s=240)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_core_tests_are_clean_under_sanitizers(sanitizer: str) -> None:
    _run_tests(build("kstep_core_tests", sanitizer), timeout_s=1500, tests=TESTS_OF[sanitizer])
