"""How fast merge rounds are: rows of the union per second, beside what gloo's all-to-all moves of the same bytes in the same run.

`merge rate` of a rank: rows of the union / seconds of a round (from touched rows to merged rows in the tables, all ranks waited for).
Its peer `gloo_all_to_all`: the same rows / seconds that all-to-alls of as many bytes, in messages as large and as many as
those of the round, take between the same processes. So a ratio of 1 would be rounds that compute nothing. Both take turns;
the all-to-all's memory is there before the clock runs. 26 tables of the cardinalities of the Criteo Kaggle set, dim 64, what 20
steps of 2,048 samples touch, ids Zipf 1.05; one thread per rank.

`merged per second of processor time` is the same in seconds that the rank's own threads ran, which says more on a machine that others use.

Ranks are hosts in network namespaces (`benchmarks.hosts`) that share this machine's cores: without a rate limit the all-to-all
is copying by the kernel on the same cores, as the merging is, so neither can hide behind the other. `limit` is what is left of the
all-to-all's rate if a round passes over each row as seldom as it can and every pass ran at the speed of a plain copy
(`copy`, measured with all ranks at once): own rows are read twice (row, base) and written once, contributions read once, merged
ones written once, and per row of the union the message and row are read and the row written.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from benchmarks._harness import Harness, Spread, case_text
from benchmarks.hosts import hosts, why_unavailable
from benchmarks.merge_rank import STATES, MergeCase

LINKS = ("", "1gbit", "100mbit")
MAX_ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all cases and returns the exit status."""
    harness = Harness.from_command_line("merge_rate", __doc__, argv)
    if reason := why_unavailable():
        print(f"merge_rate: skipped: {reason}")
        return 0
    num_rounds = min(harness.num_rounds, MAX_ROUNDS)
    for num_hosts in (2,) if harness.quick else (2, 4):
        for link in LINKS[:1] if harness.quick else LINKS:
            print(f"{num_hosts} hosts, {link or 'no rate limit'}", flush=True)
            for found in run(cases(harness.quick, link), num_hosts, link, 2 if link == "100mbit" else num_rounds):
                record(harness, found, num_hosts, link)
    return harness.finish()


def cases(is_quick: bool, link: str) -> list[MergeCase]:
    """Returns what is run on a link; slow ones carry the cases that fit in a minute."""
    if is_quick:
        return [MergeCase("small", 2, "weights", "bf16", 64, 16)]
    wires = ("fp32", "bf16", "int8")
    made = [MergeCase("criteo", 20, "weights", wire, 2048, 64) for wire in wires]
    return made + [MergeCase("criteo", 5, "all", wire, 2048, 64) for wire in wires] if not link else made


def run(selected: Sequence[MergeCase], num_hosts: int, link: str, num_rounds: int) -> list[list[dict[str, Any]]]:
    """Returns per case what each rank told."""
    settings = json.dumps({"cases": [asdict(case) for case in selected], "num_rounds": num_rounds})
    with hosts(num_hosts, 1, link) as cluster:
        result = cluster.run(["-m", "benchmarks.merge_rank", "rate", settings], deadline_s=900)
    return [[dict(line) for line in by_rank] for by_rank in zip(*result.json_lines(), strict=True)]


def record(harness: Harness, by_rank: Sequence[dict[str, Any]], num_hosts: int, link: str) -> None:
    """Adds the rows of one case."""
    first = by_rank[0]
    case = MergeCase(**first["case"])
    shown = {"hosts": num_hosts, "link": link or "unlimited", "states": case.states, "wire": case.wire, "k": case.k, "dim": case.dim}
    shown |= {"own_rows": first["num_own_rows"], "union_rows": first["num_union_rows"], "buckets": first["num_buckets"]}
    merge = Spread.of([first["num_union_rows"] / seconds for seconds in first["merge_s"]])
    peer = Spread.of([first["num_union_rows"] / seconds for seconds in first["all_to_all_s"]])
    harness.record(shown, "merge rate", "rows/s", merge, "gloo_all_to_all", peer, higher_is_better=True)
    print(f"{case_text(shown)}: {merge.median:.4g} rows/s, {merge.median / peer.median:.2f} of gloo's all-to-all", flush=True)
    used = [Spread.of([first["num_union_rows"] / seconds for seconds in first[name]]) for name in ("merge_cpu_s", "all_to_all_cpu_s")]
    harness.record(shown, "merged per second of processor time", "rows/s", used[0], "gloo_all_to_all", used[1], higher_is_better=True)
    limit = num_union_per_s_at_best(by_rank, case)
    harness.record(shown, "merge rate at best", "rows/s", limit, "gloo_all_to_all", peer, higher_is_better=True)
    sent_mb_per_s = first["sent_bytes"] / median(first["merge_s"]) / 1e6
    harness.record(shown, "bytes sent per rank", "MB/s", sent_mb_per_s)
    harness.record(shown, "copy, all ranks at once", "MB/s", fmean(rank["copy_bytes_per_s"] for rank in by_rank) / 1e6)
    for phase, seconds in first["phases_s"].items():
        harness.record(shown, f"time in {phase}", "ms", seconds * 1e3)


def num_union_per_s_at_best(by_rank: Sequence[dict[str, Any]], case: MergeCase) -> float:
    """Rows per second of a round whose passes run at the speed of a copy, after an all-to-all with which they share the cores."""
    first = by_rank[0]
    num_fields = 1 if STATES[case.states] is None else 3
    record_bytes = 4 * case.dim * num_fields
    wire_bytes = {"fp32": 4, "bf16": 2, "int8": 1}[case.wire] * case.dim * num_fields
    own, union, num_hosts = first["num_own_rows"], first["num_union_rows"], len(by_rank)
    moved = (
        own * (2 * record_bytes + wire_bytes) + own * wire_bytes + union / num_hosts * wire_bytes + union * (wire_bytes + 2 * record_bytes)
    )
    compute_s = moved / (2 * fmean(rank["copy_bytes_per_s"] for rank in by_rank))  # a copy reads and writes each byte
    best_s: float = compute_s + median(first["all_to_all_s"])
    return float(union) / best_s


if __name__ == "__main__":
    sys.exit(main())
