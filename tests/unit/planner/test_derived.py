"""TorchRec's topology, derived: its numbers are those of the description. Layer: unit."""

import logging

import pytest

from torchrec_kstep.planner.derived import torchrec_topology
from torchrec_kstep.topology import find_topology, load_topology


def test_devices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = torchrec_topology(load_topology(find_topology("dgx_h100")), 8)
    assert not caplog.records, "TorchRec warns that a topology made by hand will fail"
    assert (found.world_size, found.local_world_size, found.compute_device) == (16, 8, "cuda")
    assert found.devices[0].storage.hbm == 79 << 30
    assert found.hbm_mem_bw == pytest.approx(1.6e9)
    assert found.hbm_to_ddr_mem_bw == pytest.approx(55e6)
    assert found.intra_host_bw == pytest.approx(450e6)
    assert found.inter_host_bw == pytest.approx(50e6)


def test_cores() -> None:
    found = torchrec_topology(load_topology(find_topology("two_socket_cpu")), 2)
    assert (found.world_size, found.local_world_size, found.compute_device) == (8, 2, "cpu")
    assert found.devices[0].storage.ddr == 256 << 30
    assert found.devices[0].storage.ssd == 3500 << 30
    assert found.inter_host_bw == pytest.approx(12.5e9 / 2 / 2 / 1000), "the core is oversubscribed twice, the card shared by two ranks"
