"""The report's charts of merge rounds."""

from torchrec_kstep.report.page import render
from torchrec_kstep.report.replicas import has_rounds, round_charts
from torchrec_kstep.report.run import Run

ROUND = {
    "event": "replicas",
    "step": 20,
    "sent_bytes_per_step": 1234.0,
    "own_rows": 40.0,
    "union_rows": 61.0,
    "dense_drift": 0.25,
    "rows_drift": 0.5,
    "dense_s": 0.125,
    "rows_s": 0.375,
    "rows_up_header_s": 0.125,
    "rows_apply_s": 0.25,
    "rows_sent_bytes": 700.0,
    "dense_sent_bytes": 99.0,
    "interface_sent_bytes_per_step": 1300.0,
    "read_rows": 3.0,
}


def test_a_run_with_rounds_has_a_section_and_another_has_none() -> None:
    merged, alone = Run("merged", [ROUND], {}), Run("alone", [], {})
    assert has_rounds(merged)
    assert not has_rounds(alone)
    assert "Merge rounds" in render([merged])
    assert "Merge rounds" in render([merged, alone])
    assert "Merge rounds" not in render([alone])


def test_charts_draw_what_was_recorded() -> None:
    charts = round_charts([Run("merged", [ROUND, {**ROUND, "step": 40}], {})])
    assert not [chart for chart in charts if "nothing recorded" in chart]
    rows = next(chart for chart in charts if "Rows per round" in chart)
    assert "touched here" in rows
    assert "merged" in rows
    phases = next(chart for chart in charts if "by phase" in chart)
    assert "up header" in phases
    assert "apply" in phases
    assert "at the interface" in next(chart for chart in charts if "bytes/step" in chart)
    assert "dense" in next(chart for chart in charts if "Sent per round" in chart)
