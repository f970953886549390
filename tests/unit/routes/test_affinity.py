"""Binding to cores and memory: against a made-up sysfs, and this process's own threads. Layer: unit."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.routes.affinity import cores_for, prefer_memory_of, ranges
from torchrec_kstep.routes.environment import nccl_variables
from torchrec_kstep.routes.values import Cores, RankRoutes


def route(cores: Cores = "node", part: tuple[int, int] = (0, 1), cpus: tuple[int, ...] = (), numa: str = "numa1") -> RankRoutes:
    return RankRoutes(0, 0, 0, numa, cores, part, cpus)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two NUMA nodes of four cores with two threads each: threads n and n + 8 are one core."""
    for node in range(2):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{4 * node}-{4 * node + 3},{8 + 4 * node}-{8 + 4 * node + 3}\n")
    for core in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    return tmp_path


def test_a_rank_gets_the_cores_of_its_node(system: Path) -> None:
    assert cores_for(route(), range(16), system) == ((4, 5, 6, 7, 12, 13, 14, 15), "")


def test_own_parts_keep_both_threads_of_a_core(system: Path) -> None:
    assert cores_for(route("own", (0, 2)), range(16), system)[0] == (4, 5, 12, 13)
    assert cores_for(route("own", (1, 2)), range(16), system)[0] == (6, 7, 14, 15)


def test_parts_of_their_own_cover_a_node_without_overlap(system: Path) -> None:
    parts = [cores_for(route("own", (part, 3)), range(16), system)[0] for part in range(3)]
    assert sorted(core for part in parts for core in part) == [4, 5, 6, 7, 12, 13, 14, 15]


def test_what_a_container_forbids_is_left_out_and_said(system: Path) -> None:
    assert cores_for(route(), [3, 4, 5], system) == ((4, 5), "")
    assert cores_for(route(), [0, 1], system) == ((), "not bound to numa1: none of its cores 4-7,12-15 is among 0-1")
    assert cores_for(route("own", (0, 4)), [4, 5], system) == ((4, 5), "all ranks of numa1 share 2 cores: too few for 4 parts")
    assert cores_for(route(numa="numa7"), range(16), system)[1] == "not bound to numa7: this machine has no NUMA node of that name"


def test_cores_asked_for_by_number_must_be_there(system: Path) -> None:
    assert cores_for(route(cpus=(2, 9)), range(16), system) == ((2, 9), "")
    with pytest.raises(ConfigError, match=r"core 9, which this process may not use: it has 0-3"):
        cores_for(route(cpus=(2, 9)), range(4), system)


def test_any_core_binds_nothing(system: Path) -> None:
    assert cores_for(route("any"), range(16), system) == ((), "")


def test_every_thread_is_bound_those_of_libraries_too() -> None:
    """`sched_setaffinity` for the process reaches its first thread alone; libraries start others at import."""
    code = """
import os, threading
ready, leave = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (ready.set(), leave.wait()))
thread.start(); ready.wait()
from torchrec_kstep.routes.affinity import bind_cores
core = max(os.sched_getaffinity(0))
assert bind_cores([core]) == ""
assert all(os.sched_getaffinity(int(one)) == {core} for one in os.listdir("/proc/self/task"))
assert len(os.listdir("/proc/self/task")) > 1
leave.set()
assert "4096" in bind_cores([4096])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_memory_of_one_node_needs_no_policy(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    assert prefer_memory_of("numa0", tmp_path) == (False, "")


def test_a_node_that_is_not_there_is_said(system: Path) -> None:
    assert prefer_memory_of("numa7", system) == (False, "memory is not bound: this machine has no NUMA node numa7")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the system call's number is known for these only")
def test_the_policy_is_set_or_the_refusal_is_said(system: Path) -> None:
    """In a process of its own, because it holds for the thread. Node 0 is there on every machine."""
    code = f"""
from pathlib import Path
from torchrec_kstep.routes.affinity import prefer_memory_of
is_set, why = prefer_memory_of("numa0", Path({str(system)!r}))
policy = next(line for line in Path("/proc/self/numa_maps").read_text().splitlines()) if Path("/proc/self/numa_maps").exists() else ""
assert is_set != bool(why), why
assert not is_set or not policy or "prefer" in policy, policy
assert is_set or "set_mempolicy" in why, why
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_nccl_is_told_interface_and_adapter(tmp_path: Path) -> None:
    (tmp_path / "class/net/ib0/device/infiniband/mlx5_3").mkdir(parents=True)
    over = RankRoutes(0, 0, 0, "numa0", "any", (0, 1), interface="ib0")
    assert nccl_variables(over, tmp_path) == {"NCCL_SOCKET_IFNAME": "=ib0", "NCCL_IB_HCA": "=mlx5_3"}
    assert nccl_variables(over, tmp_path / "none") == {"NCCL_SOCKET_IFNAME": "=ib0"}


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8")])
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
