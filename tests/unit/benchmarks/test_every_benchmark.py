"""Every benchmark runs at its quick size and writes the agreed format, so that none rots between measurements."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))
ROW_KEYS = {"case", "metric", "unit", "value", "peer", "peer_value", "ratio"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_quick_run_writes_the_agreed_format(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(path.read_text())
    assert set(written) >= {"benchmark", "environment", "rows"}
    assert written["rows"]
    for row in written["rows"]:
        assert set(row) >= ROW_KEYS
        assert all("=" in part for part in row["case"].split())
        assert (row["peer"] is None) == (row["peer_value"] is None)
