"""Bytes that hosts send to train one model: merging touched rows every k steps, beside what is sent otherwise.

Hosts are network namespaces on this one machine (`benchmarks.hosts`), one rank and one replica each; bytes are those of their
interfaces, headers and acknowledgements included. Where namespaces are not permitted, replicas of one process merge and
bytes are those handed to the collective. 4 hosts, 2,048 samples per host and step, 26 columns of one id, dim 64, ids Zipf 1.05;
`data=criteo`: the cardinalities of the Criteo Kaggle set, `data=equal`: 26 tables of 200,000 rows. Union merge, moments renewed.

Peers: `torchrec_sync`, TorchRec's tables spread over all hosts, every step (closed formula; its own row is measured);
`torchrec_sync_bf16`, the same with its bf16 codec; `whole_table`, a ring all-reduce of all rows every k steps (closed formula).
`formula` holds the count against rows touched and their union (`merge.message.sent_bytes`). Rounds that touch more rows than
`MAX_UNION_ROWS` are not run but computed by that formula from drawn rows, and their metric says so.

How fast rounds are is measured by `bench_merge_rate` and `bench_slow_network`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks._harness import Harness
from benchmarks.hosts import hosts, why_unavailable
from benchmarks.merge_rank import DATA_ROWS, STATES, MergeCase, make_group, touch, touched_rows
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge.message import formats, sent_bytes

WIRES = ("fp32", "bf16", "int8")
MAX_UNION_ROWS = 500_000  # of one round; more would take minutes and GiB on a small machine


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the table and returns the exit status."""
    harness = Harness.from_command_line("merge", __doc__, argv)
    num_hosts, batch, dim = (2, 64, 16) if harness.quick else (4, 2048, 64)
    intervals = (1, 5) if harness.quick else (1, 5, 20, 100)
    datasets = ("criteo",) if harness.quick else ("criteo", "equal")
    reason = why_unavailable()
    if reason:
        print(f"merge: bytes are those handed to the collective: {reason}")
    sync = _sync_bytes(num_hosts, batch, dim, value_bytes=4)
    if not reason:
        _measure_torchrec(harness, num_hosts, batch, dim)
    for data in datasets:
        cases = [MergeCase(data, k, states, wire, batch, dim) for k in intervals for states in STATES for wire in WIRES]
        rows = {(case.k, case.states): _rows(case, num_hosts) for case in cases if case.wire == WIRES[0]}
        run = [case for case in cases if _largest_union(rows[case.k, case.states]) <= MAX_UNION_ROWS]
        print(f"{data}: {len(run)} of {len(cases)} cases are run, the others computed", flush=True)
        measured = _run_in_process(run, num_hosts) if reason else _run_in_hosts(run, num_hosts)
        for case in cases:
            _record(harness, case, num_hosts, rows[case.k, case.states], measured.get(case), sync)
    return harness.finish()


def _sync_bytes(num_hosts: int, batch: int, dim: int, value_bytes: int) -> float:
    """Bytes per host and step of TorchRec: pooled rows, their gradients, ids (int64) and lengths (int32)."""
    return (num_hosts - 1) / num_hosts * batch * 26 * (2 * dim * value_bytes + 8 + 4)


def _measure_torchrec(harness: Harness, num_hosts: int, batch: int, dim: int) -> None:
    for codec, value_bytes in (("none", 4), ("bf16", 2)):
        settings = {"batch": batch, "dim": dim, "codec": codec, "steps": 5}
        with hosts(num_hosts, 1) as cluster:
            result = cluster.run(["-m", "benchmarks.merge_rank", "torchrec", json.dumps(settings)], deadline_s=300)
        measured = mean(float(str(lines[-1]["interface_bytes"])) for lines in result.json_lines())
        case = {"peer": "torchrec_sync", "codec": codec, "hosts": num_hosts, "batch": batch, "dim": dim}
        harness.record(case, "bytes per host and step", "B", measured, "formula", _sync_bytes(num_hosts, batch, dim, value_bytes))


def _rows(case: MergeCase, num_hosts: int) -> dict[int, tuple[float, float]]:
    """Returns, per period in rounds, rows that one replica touches on average and their union."""
    found = {}
    periods = STATES[case.states]
    for period in sorted({1, *(periods or ())}):
        drawn = [[_touched(case, replica, round_index) for round_index in range(period)] for replica in range(num_hosts)]
        own = union = 0.0
        for table, num_rows in enumerate(DATA_ROWS[case.data]):
            is_union = np.zeros(num_rows, dtype=bool)
            for rounds in drawn:
                is_own = np.zeros(num_rows, dtype=bool)
                for tables in rounds:
                    is_own[tables[table]] = True
                own += np.count_nonzero(is_own) / num_hosts
                is_union |= is_own
            union += np.count_nonzero(is_union)
        found[period] = own, union
    return found


_drawn: dict[tuple[str, int, int, int], list[np.ndarray]] = {}


def _touched(case: MergeCase, replica: int, round_index: int) -> list[np.ndarray]:
    """As `touched_rows`, drawn once for all states and wires; keeps the draws of one data set and interval."""
    key = (case.data, case.k, replica, round_index)
    if key not in _drawn:
        if any(old[:2] != key[:2] for old in _drawn):
            _drawn.clear()
        _drawn[key] = touched_rows(case, replica, round_index)
    return _drawn[key]


def _largest_union(rows: dict[int, tuple[float, float]]) -> float:
    return max(union for _, union in rows.values())


def _run_in_hosts(cases: Sequence[MergeCase], num_hosts: int) -> dict[MergeCase, dict[str, Any]]:
    """Runs all cases on hosts; values are those of the first rank, but bytes are means over all."""
    with hosts(num_hosts, 1) as cluster:
        settings = json.dumps([asdict(case) for case in cases])
        result = cluster.run(["-m", "benchmarks.merge_rank", "merge", settings], deadline_s=1800)
    found = {}
    for by_rank in zip(*result.json_lines(), strict=True):
        first: dict[str, Any] = dict(by_rank[0])
        for name in ("interface_bytes", "collective_bytes"):
            first[name] = mean(float(str(line[name])) for line in by_rank)
        found[MergeCase(**first["case"])] = first
    return found


def _run_in_process(cases: Sequence[MergeCase], num_hosts: int) -> dict[MergeCase, dict[str, Any]]:
    """Counts at the collective, without hosts; times nothing."""
    found = {}
    for case in cases:
        groups = [make_group(case.data, case.dim, 0 if case.states == "weights" else case.spec.num_trackers) for _ in range(num_hosts)]
        merger = InProcessMerger([[group] for group in groups], case.spec)
        total = 0
        for round_index in range(case.num_rounds):
            for replica, group in enumerate(groups):
                touch(group, touched_rows(case, replica, round_index))
            total += sum(report.total_sent_bytes for report in merger.merge(round_index, case.k))
        found[case] = {"collective_bytes": total / num_hosts / case.num_rounds / case.k}
    return found


def _formula(case: MergeCase, num_hosts: int, rows: dict[int, tuple[float, float]]) -> float:
    """Bytes per host and step by the closed formula."""
    fields: dict[int, list[str]] = {1: ["weight"]}
    for name, period in zip("mv", STATES[case.states] or (), strict=False):
        fields.setdefault(period, []).append(name)
    total = 0.0
    for period, names in fields.items():
        has_row_step = case.states != "weights"
        up, down = formats(case.spec, names, case.dim, torch.int32, has_row_step, case.k * period)
        total += sent_bytes(up, down, *rows[period], num_hosts) / (case.k * period)
    return total


def _record(
    harness: Harness, case: MergeCase, num_hosts: int, rows: dict[int, tuple[float, float]], measured: dict[str, Any] | None, sync: float
) -> None:
    shown = {
        "data": case.data,
        "k": case.k,
        "states": case.states,
        "wire": case.wire,
        "hosts": num_hosts,
        "batch": case.batch,
        "dim": case.dim,
    }
    formula = _formula(case, num_hosts, rows)
    sent, metric = formula, "bytes per host and step, by formula"
    if measured is not None:
        sent, metric = measured.get("interface_bytes", measured["collective_bytes"]), "bytes per host and step"
    num_fields = 1 if case.states == "weights" else sum(1 / period for period in (1, *(STATES[case.states] or ())))
    whole = 2 * (num_hosts - 1) / num_hosts * sum(DATA_ROWS[case.data]) * case.dim * 4 * num_fields / case.k
    harness.record(shown, metric, "B", sent, "torchrec_sync", sync)
    harness.record(shown, metric, "B", sent, "torchrec_sync_bf16", _sync_bytes(num_hosts, case.batch, case.dim, value_bytes=2))
    harness.record(shown, metric, "B", sent, "whole_table", whole)
    if measured is None:
        return
    harness.record(shown, "bytes against the formula", "B", sent, "formula", formula)


if __name__ == "__main__":
    sys.exit(main())
