"""Curves of tables on SSD, from the counters of the `tiers` records. Counters grow from the opening of the tables on."""

import itertools
from collections.abc import Callable, Sequence

from torchrec_kstep.report.chart import NUM_COLOURS, Series, line_chart
from torchrec_kstep.report.run import STEP_PHASES, Points, Run
from torchrec_kstep.units import MIB

ASKED = ("hits_rows", "misses_rows", "first_touches_rows")
MAX_TABLES = NUM_COLOURS - 1  # that have a curve of their own, beside that of all tables

Change = Callable[[str], float]  # of a counter between two records


def has_tiers(run: Run) -> bool:
    """Whether a run had tables on SSD."""
    return bool(run.curve("tiers", "misses_rows"))


def tier_charts(runs: Sequence[Run]) -> list[str]:
    """Draws what the tiers of runs did; for a single run by table, where the tables that read most have curves of their own."""
    if len(runs) == 1:
        (run,) = runs
        tables = ["", *busiest_tables(run)]
        hits = [Series(table or "all tables", index, hit_rate(run, table)) for index, table in enumerate(tables)]
        stalls = [Series(table or "all tables", index, stall_share(run, table)) for index, table in enumerate(tables)]
        reads = [Series(table or "all tables", index, per_step(run, "read_bytes", table)) for index, table in enumerate(tables)]
        writes = [
            Series("device", 0, per_step(run, "device_written_bytes")),
            Series("records", 1, per_step(run, "written_bytes")),
        ]
    else:
        hits, stalls, reads, writes = (
            [Series(run.name, index, curve(run)) for index, run in enumerate(runs)]
            for curve in (hit_rate, stall_share, _reads_per_step, _writes_per_step)
        )
    amplification = [Series(run.name, index, write_amplification(run)) for index, run in enumerate(runs)]
    cleaning = [Series(run.name, index, cleaner_share(run)) for index, run in enumerate(runs)]
    return [
        line_chart("Cache hit rate", hits, from_zero=True),
        line_chart("Share of step time waiting for rows", stalls, from_zero=True),
        line_chart("Read from SSD, MiB per step", reads, from_zero=True),
        line_chart("Written to SSD, MiB per step", writes, from_zero=True),
        line_chart("Write amplification", amplification, from_zero=True),
        line_chart("Share of the cleaner in bytes written", cleaning, from_zero=True),
    ]


def busiest_tables(run: Run) -> list[str]:
    """Returns the tables that read most bytes, at most `MAX_TABLES`, or none if there is only one."""
    read: dict[str, float] = {}
    for record in run.events:
        if record["event"] == "tiers":
            read |= {name.removeprefix("read_bytes."): value for name, value in record.items() if name.startswith("read_bytes.") and value}
    return sorted(read, key=lambda table: (-read[table], table))[:MAX_TABLES] if len(read) > 1 else []


def hit_rate(run: Run, table: str = "") -> Points:
    """Rows found in the cache over rows asked for, of one table or of all."""

    def rate(change: Change, num_steps: float, seconds: float) -> float | None:
        del num_steps, seconds
        asked = sum(change(_key(name, table)) for name in ASKED)
        return change(_key("hits_rows", table)) / asked if asked else None

    return _between_records(run, rate)


def stall_share(run: Run, table: str = "") -> Points:
    """Seconds that lookups waited for rows over seconds of steps."""
    return _between_records(run, lambda change, _, seconds: change(_key("stall_s", table)) / seconds if seconds else None)


def per_step(run: Run, counter: str, table: str = "") -> Points:
    """A counter of bytes as MiB per step."""
    return _between_records(run, lambda change, num_steps, _: change(_key(counter, table)) / num_steps / MIB)


def write_amplification(run: Run) -> Points:
    """Bytes written to the drive over bytes of the records that were written, the cleaner's copies counted in the former only."""
    return _between_records(run, lambda change, *_: _ratio(change("device_written_bytes"), change("written_bytes")))


def cleaner_share(run: Run) -> Points:
    """Bytes that the cleaner wrote over all bytes written to the drive."""
    return _between_records(run, lambda change, *_: _ratio(change("cleaner_written_bytes"), change("device_written_bytes")))


def _reads_per_step(run: Run) -> Points:
    return per_step(run, "read_bytes")


def _writes_per_step(run: Run) -> Points:
    return per_step(run, "device_written_bytes")


def _between_records(run: Run, value: Callable[[Change, float, float], float | None]) -> Points:
    """Applies `value` to (change of a counter, steps, seconds) between each `tiers` record and the one before.

    A counter that went down was opened anew by a restart, and counts from zero.
    """
    seconds = {record["step"]: sum(record.get(f"{phase}_s") or 0.0 for phase in STEP_PHASES) for record in _of(run, "train")}
    points: Points = []
    start: dict[str, float] = {"step": 0}
    for before, after in itertools.pairwise([start, *_of(run, "tiers")]):
        num_steps = after["step"] - before["step"]
        if num_steps <= 0:
            continue

        def change(name: str, before: dict[str, float] = before, after: dict[str, float] = after) -> float:
            now, then = after.get(name) or 0.0, before.get(name) or 0.0
            return now - then if now >= then else now

        found = value(change, num_steps, seconds.get(after["step"], 0.0))
        if found is not None:
            points.append((float(after["step"]), found))
    return points


def _of(run: Run, event: str) -> list[dict[str, float]]:
    return [record for record in run.events if record["event"] == event]


def _key(counter: str, table: str) -> str:
    return f"{counter}.{table}" if table else counter


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
