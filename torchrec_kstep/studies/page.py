"""A study as a Markdown table and as a page of plots. Pure functions."""

import html
from collections.abc import Mapping, Sequence

from torchrec_kstep.report.assets import SCRIPT, STYLE
from torchrec_kstep.report.chart import Series, chart_file, line_chart
from torchrec_kstep.studies.results import Summary

Summaries = Mapping[tuple[str, str], Summary]
FEW_STEPS = 500  # below it a cell is marked: it is starved of steps, whatever its rule


def table(summaries: Summaries, axis: str, points: Sequence[str]) -> str:
    """Returns a Markdown table: a row per curve, a column per point; `AUC / LogLoss (minutes)`, `*` for few steps."""
    curves = list(dict.fromkeys(curve for curve, _ in summaries))
    lines = [f"| {axis} | " + " | ".join(points) + " |", "|--" * (len(points) + 1) + "|"]
    for curve in curves:
        found = [summaries.get((curve, point)) for point in points]
        lines.append(f"| {curve} | " + " | ".join(_cell(one) if one else "-" for one in found) + " |")
    seeds = sorted({len(one.results) for one in summaries.values()})
    span = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "0"
    lines.append("")
    lines.append(f"Test AUC / LogLoss (minutes in the training loop), mean over {span} seeds; * fewer than {FEW_STEPS} optimizer steps.")
    return "\n".join(lines) + "\n"


def _cell(one: Summary) -> str:
    spread = f" ± {one.auc_spread:.4f}" if len(one.results) > 1 else ""
    return f"{one.auc:.4f}{spread} / {one.logloss:.4f} ({one.minutes:.1f}){'*' if one.num_steps < FEW_STEPS else ''}"


def auc_chart(title: str, summaries: Summaries, axis: str, points: Sequence[str]) -> str:
    """Returns an SVG file: test AUC over the points that were run, a curve per model and variant."""
    shown = [point for point in points if any(point == one for _, one in summaries)]
    return chart_file(f"{title}: test AUC", _series(summaries, shown, "auc"), axis, x_names=shown)


def _series(summaries: Summaries, points: Sequence[str], value: str) -> list[Series]:
    curves = list(dict.fromkeys(curve for curve, _ in summaries))
    found = {
        curve: [
            (float(index), getattr(summaries[curve, point], value)) for index, point in enumerate(points) if (curve, point) in summaries
        ]
        for curve in curves
    }
    return [Series(curve, colour, found[curve]) for colour, curve in enumerate(curves)]


def page(title: str, summaries: Summaries, axis: str, points: Sequence[str]) -> str:
    """Returns a page with AUC, LogLoss and minutes over the axis, a curve per model and variant; it loads nothing from anywhere."""
    curves = list(dict.fromkeys(curve for curve, _ in summaries))
    charts = [
        line_chart("Test AUC", _series(summaries, points, "auc"), axis, digits=5, x_names=points),
        line_chart("Test LogLoss, nats", _series(summaries, points, "logloss"), axis, digits=5, x_names=points),
        line_chart("Minutes in the training loop", _series(summaries, points, "minutes"), axis, from_zero=True, x_names=points),
    ]
    legend = "".join(
        f'<p><i class="swatch" style="background:var(--series-{index % 6})"></i>{html.escape(curve)}</p>'
        for index, curve in enumerate(curves)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style></head>\n'
        f'<body><main><h1>{html.escape(title)}</h1>{legend}<div class="charts">{"".join(charts)}</div>'
        f"<pre>{html.escape(table(summaries, axis, points))}</pre></main><script>{SCRIPT}</script></body></html>\n"
    )
