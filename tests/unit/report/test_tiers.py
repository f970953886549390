"""Curves of tables on SSD: differences of counters, also across a restart, and charts only where there are such tables. Layer: unit."""

from typing import Any

import pytest

from torchrec_kstep.report import Run, render
from torchrec_kstep.report.tiers import MAX_TABLES, busiest_tables, cleaner_share, hit_rate, per_step, stall_share, write_amplification
from torchrec_kstep.units import MIB


def tiers(step: int, factor: float, **more: float) -> dict[str, Any]:
    """A record whose counters are `factor` times those of one interval."""
    counted = {
        "hits_rows": 30,
        "misses_rows": 10,
        "first_touches_rows": 20,
        "hits_rows.user": 9,
        "misses_rows.user": 1,
        "first_touches_rows.user": 0,
        "stall_s": 0.5,
        "stall_s.user": 0.25,
        "read_bytes": 100 * MIB,
        "read_bytes.user": 80 * MIB,
        "read_bytes.item": 20 * MIB,
        "written_bytes": 40 * MIB,
        "device_written_bytes": 50 * MIB,
        "cleaner_written_bytes": 10 * MIB,
    }
    return {"event": "tiers", "step": step} | {name: factor * value for name, value in counted.items()} | more


def run_of(*records: dict[str, Any]) -> Run:
    timed = [
        {"event": "train", "step": record["step"], "data_wait_s": 0.5, "forward_backward_s": 1.0, "optimizer_s": 0.5} for record in records
    ]
    return Run("run", [record for pair in zip(timed, records, strict=True) for record in pair], {})


def test_curves_are_of_the_steps_between_two_records() -> None:
    run = run_of(tiers(50, 1), tiers(100, 2))
    assert hit_rate(run) == [(50, 0.5), (100, 0.5)]
    assert hit_rate(run, "user") == [(50, 0.9), (100, 0.9)]
    assert stall_share(run) == [(50, 0.25), (100, 0.25)]
    assert stall_share(run, "user") == [(50, 0.125), (100, 0.125)]
    assert per_step(run, "read_bytes") == [(50, 2.0), (100, 2.0)]
    assert write_amplification(run) == [(50, 1.25), (100, 1.25)]
    assert cleaner_share(run) == [(50, 0.2), (100, 0.2)]


def test_a_restart_starts_counters_anew() -> None:
    """Otherwise rates after a resume would be negative."""
    run = run_of(tiers(50, 4), tiers(100, 1))
    assert hit_rate(run) == [(50, 0.5), (100, 0.5)]
    assert per_step(run, "read_bytes")[-1] == (100, 2.0)


@pytest.mark.parametrize("curve", [hit_rate, write_amplification, cleaner_share])
def test_where_nothing_happened_there_is_no_point(curve: Any) -> None:
    assert [step for step, _ in curve(run_of(tiers(50, 1), tiers(100, 1)))] == [50]


def test_the_busiest_tables_have_curves() -> None:
    assert busiest_tables(run_of(tiers(50, 1))) == ["user", "item"]
    many = {f"read_bytes.t{index}": float(index) for index in range(20)}
    assert len(busiest_tables(run_of(tiers(50, 1, **many)))) == MAX_TABLES
    page = render([run_of(tiers(50, 1))])
    for expected in ("Tables on SSD", "Cache hit rate", "all tables", "&quot;user&quot;", "Write amplification", "the cleaner"):
        assert expected in page


def test_runs_are_compared_and_runs_in_dram_have_no_such_section() -> None:
    dram = Run("dram", [{"event": "tiers", "step": 50, "materialised_rows": 5.0}], {})
    assert "Tables on SSD" not in render([dram])
    assert "Tables on SSD" in render([dram, run_of(tiers(50, 1))])
