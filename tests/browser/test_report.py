"""The run report in a real browser, headless and without a network: it draws, follows light and dark, and loads nothing.

Needs Chromium on PATH (Debian: apt-get install chromium); skips elsewhere. Set KSTEP_SCREENSHOTS to a folder to look at them.
"""

import math
import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from torchrec_kstep.report import Run, render

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH, HEIGHT = 1280, 1400


def example_run(name: str, gain: float) -> Run:
    """A run with curves of known shape."""
    events: list[dict[str, object]] = [
        {
            "event": "train",
            "step": step,
            "loss": 0.5 + 0.2 * math.exp(-step / 200 * gain),
            "rows_per_s": 10_000 * gain + 500 * math.sin(step),
            "data_wait_s": 0.1,
            "forward_backward_s": 1.0,
            "optimizer_s": 0.3,
            "evaluation_s": 0.2,
        }
        for step in range(10, 1000, 10)
    ]
    events += [
        {"event": "validation", "step": step, "auc": 0.7 + 0.08 * gain * step / 1000, "logloss": 0.6} for step in range(100, 1000, 100)
    ]
    events.append({"event": "test", "step": 990, "auc": 0.78, "logloss": 0.55, "normalized_entropy": 0.8, "calibration": 1.0})
    facts = {
        "attempts": [{"started": "2026-01-01T00:00:00+00:00", "from_step": 0}],
        "ranks": {"ranks": 4, "hosts": 2, "ranks per host": 2},
        "data": {"name": "movielens_1m", "train rows": 800_000},
        "plan": "table  sharding\nuser   row_wise",
        "versions": {"torch": "2.13.0"},
        "hardware": {"cores": "2"},
        "config": {"model": {"name": "deepfm"}, "data": {"name": "movielens_1m"}, "optim": {"lr": 1e-3 * gain}},
    }
    return Run(name, events, facts)


def screenshot(page: str, folder: Path, name: str, dark: bool = False) -> list[bytes]:
    """Opens a page with every host name resolving to nothing, and returns the picture's rows as RGB bytes."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    (folder / f"{name}.html").write_text(page, encoding="utf-8")
    picture = folder / f"{name}.png"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", f"--screenshot={picture}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run([*command, (folder / f"{name}.html").as_uri()], capture_output=True, timeout=100, check=True)
    if target := os.environ.get("KSTEP_SCREENSHOTS"):
        shutil.copy(picture, target)
    return read_png(picture.read_bytes())


def read_png(content: bytes) -> list[bytes]:
    """Decodes an 8-bit RGB or RGBA picture as Chromium writes it, without interlacing."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", content[16:29])
    assert (depth, interlace) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    packed, at = b"", 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        if content[at + 4 : at + 8] == b"IDAT":
            packed += content[at + 8 : at + 8 + size]
        at += size + 12
    raw, stride = zlib.decompress(packed), width * channels
    rows, above = [], bytearray(stride)
    for index in range(height):
        line = raw[index * (stride + 1) : (index + 1) * (stride + 1)]
        above = unfiltered(line[0], bytearray(line[1:]), above, channels)
        rows.append(bytes(value for x in range(0, stride, channels) for value in above[x : x + 3]) if channels == 4 else bytes(above))
    return rows


def unfiltered(kind: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    """Undoes one of PNG's row filters (PNG specification, section 9)."""
    for x in range(len(line)):
        left = line[x - channels] if x >= channels else 0
        corner = above[x - channels] if x >= channels else 0
        if kind == 1:
            line[x] = (line[x] + left) & 255
        elif kind == 2:
            line[x] = (line[x] + above[x]) & 255
        elif kind == 3:
            line[x] = (line[x] + (left + above[x]) // 2) & 255
        elif kind == 4:
            estimate = left + above[x] - corner
            nearest = min((left, above[x], corner), key=lambda value: abs(estimate - value))
            line[x] = (line[x] + nearest) & 255
    return line


def count(rows: list[bytes], colour: tuple[int, int, int], tolerance: int = 6) -> int:
    """Pixels of about one colour."""
    wanted = bytes(colour)
    return sum(
        all(abs(row[x + channel] - wanted[channel]) <= tolerance for channel in range(3)) for row in rows for x in range(0, len(row), 3)
    )


@pytest.mark.timeout(240)
def test_one_run_is_drawn_light_and_dark(tmp_path: Path) -> None:
    page = render([example_run("run", 1.0)])
    light = screenshot(page, tmp_path, "one_light")
    dark = screenshot(page, tmp_path, "one_dark", dark=True)
    assert (len(light[0]) // 3, len(light)) == (WIDTH, HEIGHT)
    assert light[5][:3] == bytes((0xFC, 0xFC, 0xFB))  # paper
    assert dark[5][:3] == bytes((0x16, 0x18, 0x1A))
    assert count(light, (0x25, 0x63, 0xB0)) > 2000  # curves of the first series
    assert count(dark, (0x6E, 0xA8, 0xF0)) > 2000
    assert count(light, (0xD9, 0x73, 0x1A)) > 10_000  # the bar's segment of forward and backward


@pytest.mark.timeout(240)
def test_compared_runs_have_colours_of_their_own(tmp_path: Path) -> None:
    rows = screenshot(render([example_run("first", 1.0), example_run("second", 1.5)]), tmp_path, "two")
    curves = rows[250:900]
    assert count(curves, (0x25, 0x63, 0xB0)) > 1500
    assert count(curves, (0xD9, 0x73, 0x1A)) > 1500
