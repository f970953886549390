"""Segments of a store and the space they take, as value types, and pictures of them."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec_kstep.units import format_bytes

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64
_CELL, _GAP = 14, 2


@dataclass(frozen=True)
class SpaceUsage:
    """Where the bytes of a store are.

    Attributes:
        live_unit_bytes: read units of current rows.
        unheld_bytes: live segments that no snapshot holds.
        snapshot_bytes: segments that snapshots hold, each once.
        snapshot_only_bytes: those of them that hold no current row any more.
        total_bytes: everything; bounded by the quota.
    """

    live_unit_bytes: int
    unheld_bytes: int
    snapshot_bytes: int
    snapshot_only_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class SegmentInfo:
    """One segment file.

    Attributes:
        segment_id: its number, also in its file's name.
        path: position of its drive among the store's paths.
        payload_bytes: of its rows.
        num_records: versions of rows in it.
        num_live: those that are still the newest.
        num_holders: snapshots that hold it.
        file_bytes: size of the file.
        is_open: whether it is being written.
    """

    segment_id: int
    path: int
    payload_bytes: int
    num_records: int
    num_live: int
    num_holders: int
    file_bytes: int
    is_open: bool

    @classmethod
    def of(cls, values: Mapping[str, int]) -> "SegmentInfo":
        """From the compiled store's dictionary."""
        return cls(**{**values, "is_open": bool(values["is_open"])})  # type: ignore[arg-type]  # every value but is_open is an int

    @property
    def live_share(self) -> float:
        """Share of its records that are the newest version of their row."""
        return self.num_live / self.num_records if self.num_records else 0.0


def by_log(segments: Sequence[SegmentInfo]) -> dict[int, list[SegmentInfo]]:
    """Segments of each payload size, oldest first."""
    logs: dict[int, list[SegmentInfo]] = {}
    for segment in sorted(segments, key=lambda one: (one.payload_bytes, one.segment_id)):
        logs.setdefault(segment.payload_bytes, []).append(segment)
    return logs


def text_map(segments: Sequence[SegmentInfo]) -> str:
    """Draws one block per segment, the fuller the more of its records are current; `o` is being written."""
    lines = ["segments, oldest first; the height of a block is the share of current rows, o is open"]
    for payload_bytes, log in by_log(segments).items():
        num_bytes = sum(segment.file_bytes for segment in log)
        lines.append(f"  rows of {payload_bytes} bytes: {len(log)} segments, {format_bytes(num_bytes)}")
        cells = "".join("o" if segment.is_open else _block(segment.live_share) for segment in log)
        lines += [f"    |{cells[start : start + _COLUMNS]}|" for start in range(0, len(cells), _COLUMNS)]
    return "\n".join(lines)


def svg_map(segments: Sequence[SegmentInfo], title: str) -> str:
    """Draws the same picture as an SVG document: filled from below by current rows, framed in blue where a snapshot holds it."""
    parts: list[str] = []
    y = 44
    pitch = _CELL + _GAP
    for payload_bytes, log in by_log(segments).items():
        num_bytes = sum(segment.file_bytes for segment in log)
        parts.append(f'<text x="10" y="{y}">rows of {payload_bytes} bytes: {len(log)} segments, {format_bytes(num_bytes)}</text>')
        y += 8
        for index, segment in enumerate(log):
            x, top = 10 + index % _COLUMNS * pitch, y + index // _COLUMNS * pitch
            parts.append(_svg_cell(segment, x, top))
        y += -(-len(log) // _COLUMNS) * pitch + 24
    width = 20 + _COLUMNS * pitch
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
        f'font-family="sans-serif" font-size="12"><title>{html.escape(title)}</title>'
        f'<rect width="{width}" height="{y}" fill="#fff"/><text x="10" y="20" font-weight="bold">{html.escape(title)}</text>'
        + "".join(parts)
        + "</svg>\n"
    )


def _svg_cell(segment: SegmentInfo, x: int, top: int) -> str:
    filled = round(_CELL * segment.live_share, 1)
    frame = "#d97706" if segment.is_open else "#2563eb" if segment.num_holders else "#6b7280"
    words = f"segment {segment.segment_id}: {segment.num_live} of {segment.num_records} records current, {format_bytes(segment.file_bytes)}"
    return (
        f'<g><title>{words}</title><rect x="{x}" y="{top}" width="{_CELL}" height="{_CELL}" fill="#f3f4f6"/>'
        f'<rect x="{x}" y="{top + _CELL - filled:g}" width="{_CELL}" height="{filled:g}" fill="#34d399"/>'
        f'<rect x="{x}" y="{top}" width="{_CELL}" height="{_CELL}" fill="none" stroke="{frame}"/></g>'
    )


def _block(share: float) -> str:
    return _BLOCKS[min(len(_BLOCKS) - 1, max(1, round(share * (len(_BLOCKS) - 1))))] if share > 0 else "."
