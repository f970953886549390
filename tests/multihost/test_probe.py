"""A probe over links of known rate. Needs network namespaces (root on Linux); skips elsewhere. No training happens here."""

from pathlib import Path

import pytest

from benchmarks.hosts import hosts
from torchrec_kstep.topology import load_topology
from torchrec_kstep.units import KIB


@pytest.mark.slow
def test_a_shaped_link_is_described_by_its_rate_and_its_burst(tmp_path: Path) -> None:
    """100 Mbit/s through a bucket of 256 KiB; the planner would else take small exchanges for slow ones.

    Both directions at once reach half of it: what acknowledges one waits behind the data of the other.
    """
    file = tmp_path / "machine.yaml"
    with hosts(2, 1, "100mbit") as cluster:
        command = ["-m", "torchrec_kstep.probe", "--out", str(file), "--seconds", "8", "--memory", "64MiB"]
        cluster.run(command, deadline_s=100)
    (nic,) = load_topology(file).hosts[0].nics
    assert 5e6 < nic.bandwidth_bytes_per_s < 14e6
    assert nic.burst_bytes == pytest.approx(256 * KIB, rel=0.7)
