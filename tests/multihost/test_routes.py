"""Routes in reality: what interfaces and drives count follows what was planned. No time is asserted; bench_routes shows it.

Slow: each test trains on hosts in network namespaces, or on two drives of which one is bounded.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench_routes import Size, drive_topology, link_topology, run_over_drives, run_over_links
from benchmarks.hosts import hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE = Size(num_tables=2, num_rows=5_000, dim=16, batch=128, num_steps=12)
TRAIN = ["-m", "torchrec_kstep.train", *SIZE.overrides(1.05), "kstep=default", "kstep.k=2"]


def test_merge_lanes_leave_the_slow_link_although_the_hosts_met_over_it(tmp_path: Path) -> None:
    topology = link_topology(("1gbit", "100mbit"), tmp_path / "machines.yaml")
    ours = run_over_links(SIZE, ("1gbit", "100mbit"), "eth1", tmp_path, [f"planner.topology={topology}"])
    assert ours.sent_bytes["eth1"] < 0.02 * ours.sent_bytes["eth0"]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "merge lane over eth0; replica over lo" in facts["routes"]
    assert "GLOO_SOCKET_IFNAME=eth0 (was eth1)" in facts["routes"]


def test_two_equal_links_carry_one_merge_lane_each(tmp_path: Path) -> None:
    topology = link_topology(("100mbit", "100mbit"), tmp_path / "machines.yaml")
    ours = run_over_links(SIZE, ("100mbit", "100mbit"), "eth0", tmp_path, [f"planner.topology={topology}"])
    total = sum(ours.sent_bytes.values())
    assert all(0.35 < sent / total < 0.65 for sent in ours.sent_bytes.values())


def test_the_same_losses_over_any_route(tmp_path: Path) -> None:
    """Routes move bytes, never a result."""
    losses = []
    for name, extra in (("blind", ["routes=off"]), ("routed", [])):
        folder = tmp_path / name
        folder.mkdir()
        topology = link_topology(("1gbit", "100mbit"), folder / "machines.yaml")
        run_over_links(SIZE, ("1gbit", "100mbit"), "eth1", folder, [f"planner.topology={topology}", *extra])
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if line["event"] == "train"])
    assert losses[0] == losses[1]


def test_an_interface_that_is_not_there_is_an_error_where_it_was_asked_for(tmp_path: Path) -> None:
    with hosts(2, 1) as cluster:
        result = cluster.run([*TRAIN, "routes.interfaces=[ib7]", f"run_dir={tmp_path / 'run'}"], cwd=tmp_path, check=False, deadline_s=200)
    assert all(code not in (0, None) for code in result.exit_codes)
    assert "routes.interfaces: host " in "".join(result.stderr)
    assert "has no interface 'ib7' with an IPv4 address; it has lo (127.0.0.1), eth0 (10.77.0." in "".join(result.stderr)


def test_an_interface_that_only_the_topology_names_is_given_up_with_a_warning(tmp_path: Path) -> None:
    topology = link_topology(("1gbit", "100mbit"), tmp_path / "machines.yaml")
    topology.write_text(topology.read_text().replace("eth0", "ib0"))
    with hosts(2, 1) as cluster:
        run = [*TRAIN, "metrics.progress=lines", f"planner.topology={topology}", f"run_dir={tmp_path / 'run'}"]
        result = cluster.run(run, cwd=tmp_path, deadline_s=200)
    assert "warning: interfaces stay as they were: host " in result.stdout[0]
    assert "test AUC" in result.stdout[0]


def test_rows_go_where_drives_are_fast(tmp_path: Path) -> None:
    """Three to one as planned, and half and half by a run that knows nothing of the drives."""
    size = replace(SIZE, num_rows=20_000, dim=32, batch=512, num_steps=24, limits=("30MB/s", "10MB/s"))
    for name, routes, expected in (("routed", [], 0.75), ("blind", ["routes=off"], 0.5)):
        folder = tmp_path / name
        folder.mkdir()
        run = run_over_drives(size, folder, [f"planner.topology={drive_topology(size, folder)}", *routes])
        assert run.written_bytes[0] / sum(run.written_bytes) == pytest.approx(expected, abs=0.12)
        assert run.read_bytes[0] / sum(run.read_bytes) == pytest.approx(expected, abs=0.12)
    facts = json.loads((tmp_path / "routed" / "run" / "run.json").read_text())
    assert "rows 75% on " in facts["routes"]
