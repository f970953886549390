"""Charts with bars, and charts as files of their own. Layer: unit."""

import re
from xml.etree import ElementTree

from torchrec_kstep.report.assets import COLOURS, STYLE
from torchrec_kstep.report.chart import NUM_COLOURS, Series, chart_file, line_chart


def test_bars_span_their_half_widths_and_fit_into_the_chart() -> None:
    text = line_chart("title", [Series("a", 2, [(0.0, 1.0), (1.0, 2.0)], [0.5, 3.0])])
    bars = re.findall(r'<line x1="([\d.]+)" x2="\1" y1="([\d.]+)" y2="([\d.]+)" style="stroke:var\(--series-2\)"/>', text)
    assert len(bars) == 2
    heights = [float(bottom) - float(top) for _, bottom, top in bars]
    assert abs(heights[1] / heights[0] - 6) < 0.01
    assert all(float(top) >= 0 and float(bottom) <= 260 for _, bottom, top in bars)


def test_a_chart_file_is_a_document_with_title_and_legend() -> None:
    text = chart_file("A < B", [Series("one", 0, [(0.0, 1.0)]), Series("two", 7, [(0.0, 2.0)], [0.1])], "k", x_names=["1"])
    root = ElementTree.fromstring(text)
    assert {"A < B", "one", "two", "k"} <= {part.strip() for part in root.itertext()}
    assert f"--series-1:{COLOURS[1]}" in text
    assert "data-curves" not in text


def test_files_have_the_colours_of_the_light_page() -> None:
    light = STYLE[: STYLE.index("@media")]
    assert [light.split(f"--series-{index}: ")[1][:7] for index in range(NUM_COLOURS)] == list(COLOURS)
