"""A placement as a picture: hosts as boxes, ranks and drives inside, tables as blocks in the colour of their tier."""

from html import escape
from itertools import groupby

from torchrec_kstep.planner.explain import bytes_by_rank
from torchrec_kstep.planner.placement import PlacedTable, Placement
from torchrec_kstep.topology import ClusterTopology
from torchrec_kstep.units import format_bandwidth, format_bytes, format_seconds

_COLOURS = {"device": "#4c9f70", "dram": "#3b7dd8", "ssd": "#d98e32"}
_RANK_WIDTH, _GAP, _LINE, _BLOCK, _TITLE = 190, 12, 16, 18, 26
_MAX_HOSTS, _MAX_BLOCKS = 8, 14


def svg(placement: Placement, topology: ClusterTopology) -> str:
    """Draws the ranks of one replica, the first hosts of it, and the step as a bar.

    Args:
        placement: what goes where.
        topology: the machines; names and bandwidths of cards and drives are taken from it.
    """
    per_host = min(placement.local_world_size, placement.world_size)
    num_hosts = max(1, placement.world_size // per_host)
    shown = min(num_hosts, _MAX_HOSTS)
    width = max(per_host * (_RANK_WIDTH + _GAP) + 3 * _GAP, 720)
    parts: list[str] = []
    y = _TITLE + _GAP
    y = _step_bar(parts, placement, width, y)
    for index in range(shown):
        y = _host(parts, placement, topology, index, per_host, width, y)
    if shown < num_hosts:
        parts.append(_text(_GAP, y + _LINE, f"and {num_hosts - shown} more hosts"))
        y += 2 * _LINE
    y = _legend(parts, y)
    title = f"{placement.topology}: step {format_seconds(placement.step.seconds)} +- {format_seconds(placement.step.error_s)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{y}" fill="#ffffff"/>\n'
        f'<text x="{_GAP}" y="{_TITLE}" font-size="16" font-weight="bold">{escape(title)}</text>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _step_bar(parts: list[str], placement: Placement, width: int, y: int) -> int:
    """The phases of the step side by side, as long as they take."""
    x, full = float(_GAP), width - 2 * _GAP
    shades = ["#8fb3d9", "#b5d0a5", "#e3c58f", "#c9b3d9", "#d9a3a3", "#a3d1d1", "#cfcfcf", "#e0d48a", "#d98e32"]
    for phase, shade in zip(placement.step.phases, shades, strict=False):
        part = full * phase.seconds / max(placement.step.seconds, 1e-12)
        if phase.is_hidden or part < 0.5:
            continue
        tip = f"{phase.name}: {format_seconds(phase.seconds)}"
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{part:.1f}" height="22" fill="{shade}"><title>{escape(tip)}</title></rect>')
        if part > 7 * len(phase.name):
            parts.append(_text(x + 4, y + 15, phase.name))
        x += part
    return y + 22 + _GAP


def _host(parts: list[str], placement: Placement, topology: ClusterTopology, index: int, per_host: int, width: int, y: int) -> int:
    host = topology.hosts[min(index, len(topology.hosts) - 1)]
    ranks = range(index * per_host, (index + 1) * per_host)
    blocks = {rank: _blocks(placement, rank) for rank in ranks}
    height = _TITLE + 2 * _LINE + max(len(block) for block in blocks.values()) * (_BLOCK + 2) + 2 * _GAP + _LINE
    parts.append(f'<rect x="{_GAP}" y="{y}" width="{width - 2 * _GAP}" height="{height}" rx="6" fill="#f4f6f8" stroke="#8a94a0"/>')
    cards = ", ".join(f"{nic.name} {format_bandwidth(nic.bandwidth_bytes_per_s)}" for nic in host.nics[:4])
    drives = ", ".join(f"{drive.name} {format_bytes(drive.capacity_bytes)}" for drive in host.drives[:4])
    head = f"{host.name}: {format_bytes(host.memory_bytes)} DRAM" + (f"; {cards}" if cards else "") + (f"; {drives}" if drives else "")
    parts.append(_text(2 * _GAP, y + _LINE + 2, head, "bold"))
    held = bytes_by_rank(placement)
    for position, rank in enumerate(ranks):
        x = 2 * _GAP + position * (_RANK_WIDTH + _GAP)
        top = y + _TITLE
        place = host.devices[position].name if position < len(host.devices) else "cores"
        parts.append(f'<rect x="{x}" y="{top}" width="{_RANK_WIDTH}" height="{height - _TITLE - _GAP}" fill="#ffffff" stroke="#b8c0c8"/>')
        parts.append(_text(x + 6, top + _LINE, f"rank {rank} on {place}: {format_bytes(held[rank])}"))
        for number, (label, tier, tip) in enumerate(blocks[rank]):
            block_y = top + _LINE + 8 + number * (_BLOCK + 2)
            parts.append(
                f'<rect x="{x + 6}" y="{block_y}" width="{_RANK_WIDTH - 12}" height="{_BLOCK}" rx="3" fill="{_COLOURS[tier]}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            parts.append(f'<text x="{x + 10}" y="{block_y + 13}" fill="#ffffff">{escape(label)}</text>')
    return y + height + _GAP


def _blocks(placement: Placement, rank: int) -> list[tuple[str, str, str]]:
    """Label, tier and description of the tables of a rank, the largest first; small ones are counted by tier."""
    own = sorted((table for table in placement.tables if rank in table.ranks), key=lambda table: (-table.bytes_per_rank, table.name))
    blocks: list[tuple[str, str, str]] = [(_label(table), table.tier, _tip(table)) for table in own[:_MAX_BLOCKS]]
    rest = sorted(own[_MAX_BLOCKS:], key=lambda table: table.tier)
    for tier, tables in groupby(rest, key=lambda table: table.tier):
        some = list(tables)
        size = format_bytes(sum(table.bytes_per_rank for table in some))
        blocks.append((f"{len(some)} more, {size}", tier, ", ".join(table.name for table in some)))
    return blocks


def _label(table: PlacedTable) -> str:
    cut = "" if table.sharding == "table_wise" else f" 1/{len(table.ranks)}" if table.sharding != "data_parallel" else " copy"
    return f"{table.name[:14]}{cut} {format_bytes(table.bytes_per_rank)}"


def _tip(table: PlacedTable) -> str:
    cache = f", cache meets {table.hit_rate:.1%}" if table.tier == "ssd" else ""
    return f"{table.name}: {table.num_rows:,} x {table.dim}, {table.sharding}, {table.tier}{cache}"


def _legend(parts: list[str], y: int) -> int:
    x = _GAP
    for tier, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(x + 20, y + 12, tier))
        x += 90
    return y + 14 + _GAP


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-weight="{weight}">{escape(text)}</text>'
