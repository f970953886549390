"""Samples per second over a slow network: replicas merged every k steps, beside synchronous TorchRec over all hosts.

Hosts are network namespaces on this one machine (`benchmarks.hosts`), one rank each, so they share its cores. To stand for hosts
with cores of their own they are held to a step floor: no step ends sooner (`floor=`; `floor=0` shows the bare machine). A floor
must lie above what a step computes here, which the row `step without floor` tells; a synchronous step is held to it with its
exchanges included, which favours it. 2,048 samples per host and step, 26 tables of the cardinalities of the Criteo Kaggle set,
dim 64, ids Zipf 1.05, a dense network of 26 x 64 -> 64 -> 1.

Replicas hold all rows of the batches in memory before the clock runs: rounds of a run in progress, not its first ones.

- `kstep`: k = 20, weights merged (`row_states=weights`, union), Adam; training waits for rounds.
- `torchrec_sync`: every step, tables spread over all hosts table by table by TorchRec's own sharder and kernels (row-wise Adagrad,
  which costs less than Adam), dense parameters under DDP; `torchrec_sync_bf16` with its bf16 codec. Its tables have at most 100,000 rows:
  what it sends does not depend on them, and small tables cost it least.
- `overlapped`: rounds beside training at 1 Gbit/s, against the same replicas that never merge (`never_merged`).

Each repeat runs all ways in turn, each in a fresh job whose first round is warm-up. Where namespaces are not permitted it says so.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean

from benchmarks._harness import Harness, Spread
from benchmarks.hosts import hosts, why_unavailable
from benchmarks.slow_network_rank import SlowCase

CASES = ("synchronous", "overlapped")
WIRES = ("fp32", "bf16", "int8")
FLOOR_MS = {2: 150.0, 4: 300.0}  # of a step, by the number of hosts that share this machine's cores
MAX_REPEATS = 2
DEADLINE_S = 400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all ways and returns the exit status."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--case", choices=CASES, nargs="+", default=CASES)
    own.add_argument("--hosts", type=int, choices=tuple(FLOOR_MS), nargs="+", default=tuple(FLOOR_MS))
    own.add_argument("--floor-only", action="store_true")
    chosen, rest = own.parse_known_args(argv)
    options = f"--case: {' '.join(CASES)}. --hosts: 2 4. --floor-only: nothing on the bare machine."
    harness = Harness.from_command_line("slow_network", f"{__doc__} {options}", rest)
    if reason := why_unavailable():
        print(f"slow_network: skipped: {reason}")
        return 0
    batch, dim, k = (64, 16, 4) if harness.quick else (2048, 64, 20)
    base = SlowCase("kstep", "small" if harness.quick else "criteo", batch, dim, k, "fp32", 0, k, 2 * k)
    num_repeats = min(harness.num_rounds, 1 if harness.quick else MAX_REPEATS)
    for num_hosts in chosen.hosts[:1] if harness.quick else chosen.hosts:
        floor_ms = 20.0 if harness.quick else FLOOR_MS[num_hosts]
        for floor, repeats in ((floor_ms, num_repeats),) if chosen.floor_only else ((floor_ms, num_repeats), (0.0, 1)):
            if "synchronous" in chosen.case:
                compare_synchronous(harness, base, num_hosts, "100mbit", floor, repeats)
            if "overlapped" in chosen.case:
                compare_overlapped(harness, base, num_hosts, "1gbit", floor, repeats)
    return harness.finish()


def run(case: SlowCase, num_hosts: int, bandwidth: str, floor_ms: float) -> dict[str, float]:
    """Runs one job; returns means over its ranks."""
    with hosts(num_hosts, 1, bandwidth, step_floor_ms=floor_ms) as cluster:
        result = cluster.run(["-m", "benchmarks.slow_network_rank", json.dumps(asdict(case))], deadline_s=DEADLINE_S)
    lines = [own[-1] for own in result.json_lines()]
    found = {name: fmean(float(str(line[name])) for line in lines) for name in ("samples_per_s", "bytes_per_step", "busy_ms")}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    way = f"{case.way} {case.wire} overlap {case.overlap_steps}"
    print(f"{num_hosts} hosts, {bandwidth}, floor {floor_ms:.0f} ms: {way}: {shown}", flush=True)
    return found


def compare_synchronous(harness: Harness, base: SlowCase, num_hosts: int, bandwidth: str, floor_ms: float, num_repeats: int) -> None:
    """Adds merging in every wire against synchronous training."""
    sync = replace(base, way="sync", num_warmup_steps=2, num_steps=4)
    ways = {"torchrec_sync": sync, "torchrec_sync_bf16": replace(sync, way="sync_bf16")}
    ways |= {wire: replace(base, wire=wire) for wire in WIRES}
    paces, sent, busy = repeated(ways, num_hosts, bandwidth, floor_ms, num_repeats)
    for wire in WIRES:
        shown = described(base, num_hosts, bandwidth, floor_ms) | {"wire": wire}
        for peer in ("torchrec_sync", "torchrec_sync_bf16"):
            harness.record(shown, "samples/s", "samples/s", paces[wire], peer, paces[peer], higher_is_better=True)
        harness.record(shown, "bytes per host and step", "B", sent[wire], "torchrec_sync", sent["torchrec_sync"])
        if not floor_ms:
            harness.record(shown, "step without floor", "ms", busy[wire])


def compare_overlapped(harness: Harness, base: SlowCase, num_hosts: int, bandwidth: str, floor_ms: float, num_repeats: int) -> None:
    """Adds rounds beside training, and rounds that training waits for, against replicas that never merge."""
    overlap = base.k // 2
    late = replace(base, wire="bf16", overlap_steps=overlap, num_warmup_steps=base.k + overlap + 1)
    ways = {"never_merged": replace(base, way="alone", wire="bf16"), "overlapped": late, "waited_for": replace(base, wire="bf16")}
    paces, _, _ = repeated(ways, num_hosts, bandwidth, floor_ms, num_repeats)
    for name in ("overlapped", "waited_for"):
        shown = described(base, num_hosts, bandwidth, floor_ms) | {"wire": "bf16", "rounds": name}
        harness.record(shown, "samples/s", "samples/s", paces[name], "never_merged", paces["never_merged"], higher_is_better=True)


def repeated(
    ways: dict[str, SlowCase], num_hosts: int, bandwidth: str, floor_ms: float, num_repeats: int
) -> tuple[dict[str, Spread], dict[str, float], dict[str, Spread]]:
    """Runs all ways in turn, each repeat beginning with another; returns by way samples/s, bytes per step, and ms without the floor."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    names = list(ways)
    for repeat in range(num_repeats):
        start = repeat % len(names)
        for name in names[start:] + names[:start]:
            found[name].append(run(ways[name], num_hosts, bandwidth, floor_ms))

    def spread(name: str, metric: str) -> Spread:
        return Spread.of([values[metric] for values in found[name]])

    return (
        {name: spread(name, "samples_per_s") for name in names},
        {name: spread(name, "bytes_per_step").median for name in names},
        {name: spread(name, "busy_ms") for name in names},
    )


def described(base: SlowCase, num_hosts: int, bandwidth: str, floor_ms: float) -> dict[str, object]:
    """The parameters as a benchmark row shows them."""
    return {
        "hosts": num_hosts,
        "link": bandwidth,
        "floor": f"{floor_ms:.0f}ms" if floor_ms else 0,
        "k": base.k,
        "batch": base.batch,
        "dim": base.dim,
        "data": base.data,
    }


if __name__ == "__main__":
    sys.exit(main())
