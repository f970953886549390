"""Charts as SVG text. Pure functions; colours are CSS variables `--series-N` of the page."""

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchrec_kstep.report.assets import COLOURS

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 34
NUM_COLOURS = 6
MAX_POINTS = 600  # per curve; more would be finer than the pixels
_TARGET_TICKS = 5


@dataclass(frozen=True)
class Series:
    """One curve: its name in the legend, its colour 0..5, and its points (x, y) by rising x >= 0.

    `half_widths`, one per point where given, are drawn as bars around the points; such a curve has few points.
    """

    name: str
    colour: int
    points: list[tuple[float, float]]
    half_widths: Sequence[float] = ()

    @property
    def bars(self) -> list[tuple[float, float, float]]:
        """The bars: x, lowest y, highest y."""
        return [(x, y - half, y + half) for (x, y), half in zip(self.points, self.half_widths, strict=bool(self.half_widths))]


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str = "step",
    digits: int = 4,
    from_zero: bool = False,
    x_names: Sequence[str] = (),
) -> str:
    """Draws curves over a common axis; the page's script shows the values under the pointer.

    Args:
        title: what is drawn, with its unit.
        series: curves; those without points are left out.
        x_label: what the x axis counts.
        digits: significant digits of the values shown.
        from_zero: whether the y axis starts at zero.
        x_names: names of x = 0, 1, 2, ..., shown in place of numbers.
    """
    drawn = [one if one.half_widths else replace(one, points=thin(one.points)) for one in series if one.points]
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    if not drawn:
        return f'<figure class="chart">{caption}<p class="nothing">nothing recorded</p></figure>'
    last_x = float(len(x_names) - 1) if len(x_names) > 1 else max(x for one in drawn for x, _ in one.points) or 1.0
    x_ticks = [float(index) for index in range(len(x_names))] or [tick for tick in ticks(0.0, last_x) if tick <= last_x]
    low, high = _range([y for one in drawn for _, y in one.points] + [y for one in drawn for _, *ends in one.bars for y in ends])
    y_ticks = ticks(min(0.0, low) if from_zero else low, high)
    x_scale = _scale(0.0, last_x, LEFT, WIDTH - RIGHT)
    y_scale = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in y_ticks:
        y = y_scale(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        anchor = "end" if x_scale(tick) > WIDTH - RIGHT - 20 else "middle"
        parts.append(f'<text x="{x_scale(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{_x_text(tick, x_names)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">{html.escape(x_label)}</text>')
    for one in drawn:
        path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in one.points)
        colour = f"var(--series-{one.colour % NUM_COLOURS})"
        parts.append(f'<polyline points="{path}" style="stroke:{colour}"/>')
        for x, bottom, top in one.bars:
            place = f'x1="{x_scale(x):.1f}" x2="{x_scale(x):.1f}" y1="{y_scale(bottom):.1f}" y2="{y_scale(top):.1f}"'
            parts.append(f'<line {place} style="stroke:{colour}"/>')
        if len(one.points) <= 40:
            parts += [f'<circle cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3" style="fill:{colour}"/>' for x, y in one.points]
    parts.append(f'<line class="pointer" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg><div class="values"></div>')
    data = {
        "label": x_label,
        "names": list(x_names),
        "x": [0.0, last_x, LEFT, WIDTH - RIGHT],
        "digits": digits,
        "series": [{"name": one.name, "colour": one.colour % NUM_COLOURS, "points": one.points} for one in drawn],
    }
    return f'<figure class="chart" data-curves="{html.escape(json.dumps(data))}">{caption}{"".join(parts)}</figure>'


def chart_file(title: str, series: Sequence[Series], x_label: str, x_names: Sequence[str] = ()) -> str:
    """Draws curves as an SVG file of its own, title and legend included: for documents."""
    figure = line_chart(title, series, x_label, x_names=x_names)
    chart = figure.partition("<svg")[2].partition(">")[2].partition("</svg>")[0]  # nothing, where nothing is recorded
    colours = "".join(f"--series-{index}:{colour};" for index, colour in enumerate(COLOURS))
    style = (
        f"svg{{{colours}font:12px sans-serif}} text{{fill:#5f666d}} .grid{{stroke:#e2e4e6}} .pointer{{visibility:hidden}} "
        "polyline{fill:none;stroke-width:2}"
    )
    legend = "".join(
        f'<rect x="{LEFT}" y="{HEIGHT + 32 + 18 * row}" width="11" height="11" style="fill:var(--series-{one.colour % NUM_COLOURS})"/>'
        f'<text x="{LEFT + 18}" y="{HEIGHT + 42 + 18 * row}">{html.escape(one.name)}</text>'
        for row, one in enumerate(series)
    )
    height = HEIGHT + 36 + 18 * len(series)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"><style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{height}" style="fill:#ffffff"/>'
        f'<text x="{LEFT}" y="16" font-weight="bold">{html.escape(title)}</text>\n'
        f'<g transform="translate(0 20)">{chart}</g>{legend}</svg>\n'
    )


def stacked_bar(parts: Mapping[str, float], total: float) -> str:
    """Draws shares of one total as a bar of coloured segments; `total` sets the full width."""
    segments, x = [], 0.0
    for colour, (name, value) in enumerate(parts.items()):
        width = 100 * value / total if total else 0.0
        label = f"{html.escape(name)}: {value:.3g} s"
        segments.append(
            f'<rect x="{x:.3f}%" y="0" width="{width:.3f}%" height="22" style="fill:var(--series-{colour % NUM_COLOURS})">'
            f"<title>{label}</title></rect>"
        )
        x += width
    return f'<svg class="bar" height="22" width="100%" role="img" aria-label="seconds per phase">{"".join(segments)}</svg>'


def ticks(low: float, high: float) -> list[float]:
    """Returns round numbers, evenly spaced, from at or below `low` to at or above `high`."""
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):  # one value, up to rounding
        margin = abs(low) * 0.05 if abs(low) > 1e-6 else 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / (_TARGET_TICKS - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most about `MAX_POINTS` points, evenly chosen, the last one always among them."""
    stride = max(1, -(-len(points) // MAX_POINTS))
    kept = list(points[::stride])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def number(value: float) -> str:
    """Writes a tick or a table cell: `12k`, `0.775`, `1.5M`."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}"


def _x_text(x: float, names: Sequence[str]) -> str:
    return html.escape(names[int(x)]) if names else number(x)


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)
