"""Predicted steps against measured ones, on this machine: the cost model's truth.

    python -m benchmarks.bench_reality --work FOLDER --json PATH      resumable: what is in FOLDER is not run again

First the machine is probed. Then training loops of `train` run on 1 to 4 ranks of one host and on two hosts (network namespaces with
rate-limited links), over tables, columns, sharding types, caches over SSD, batches and periods k. Half of the configurations, chosen
by a hash of their names, calibrates the coefficients; the other half is predicted. Last, `pairs` runs the same models once as our
planner and once as TorchRec's places them, in turns.

Two hosts share the cores of the machine: each is bound to its part of them, which the topology written for them tells. A machine that
does other work meanwhile is no measurement. `--quick` takes a few configurations and no hosts.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._harness import ROOT, Harness, Spread
from benchmarks.hosts import BURST, HostsError, hosts, why_unavailable
from benchmarks.reality_rank import Case
from torchrec_kstep.calibrate import calibrated
from torchrec_kstep.cost import Coefficients
from torchrec_kstep.cost.calibration import calibration_file
from torchrec_kstep.cost.fit import Observation
from torchrec_kstep.planner.forecast import observation, read_comparison
from torchrec_kstep.topology import ClusterTopology, Link, Network, Nic, load_topology, topology_text
from torchrec_kstep.units import parse_bandwidth, parse_bytes

PROBE_S = 24
DEADLINE_S = 900.0
SECONDS, PAIR_SECONDS = 2.5, 5.0
MODEL = ["data=synthetic", "model=dlrm", "planner=tiered", "optim=adam", "train.log_every_steps=1000000"]


class Layout(NamedTuple):
    """Hosts, ranks of each, and the rate of their links."""

    num_hosts: int
    ranks_per_host: int
    link: str = ""

    @property
    def name(self) -> str:
        """Also the name of its topology file."""
        return f"{self.num_hosts}x{self.ranks_per_host}{f'_{self.link}' if self.link else ''}"


def case(
    layout: Layout, rows: list[int], dim: int, batch: int, *more: str, ids: int = 1, cache: str = "", k: int = 0
) -> tuple[Layout, Case]:
    """One configuration."""
    overrides = [*MODEL, f"model.embedding_dim={dim}", f"train.batch_size={batch}", *more]
    if cache:
        overrides += ["tiers=dram_ssd", f"tiers.dram_bytes={cache}"]
    if k:
        overrides += [f"kstep.k={k}", f"kstep.ranks_per_replica={layout.ranks_per_host}"]
    values = [text.split("=")[1].strip("[]").replace(",", "-") for text in more] or ["auto"]
    parts = [layout.name, f"t{len(rows)}", f"r{max(rows)}", f"d{dim}", f"b{batch}", f"i{ids}", *values]
    parts += [f"c{cache}"] if cache else []
    parts += [f"k{k}"] if k else []
    return layout, Case("_".join(parts), [overrides], rows, [ids] * len(rows), SECONDS)


def configurations() -> list[tuple[Layout, Case]]:
    """All that are run."""
    one, two, four = Layout(1, 1), Layout(1, 2), Layout(1, 4)
    fast, slow, wide = Layout(2, 1, "1gbit"), Layout(2, 1, "100mbit"), Layout(2, 2, "200mbit")
    whole, rows_, columns = "planner.sharding=table_wise", "planner.sharding=row_wise", "planner.sharding=column_wise"
    many, some, few = [20_000] * 26, [200_000] * 8, [400_000] * 4
    return [
        case(one, many, 16, 256),
        case(one, many, 16, 2048),
        case(one, many, 64, 1024),
        case(one, some, 32, 4096),
        case(one, few, 128, 2048, ids=3),
        case(one, some, 64, 512, ids=10),
        case(one, some, 32, 1024, "model.mlp=[1024,512]"),
        case(one, many, 16, 512, "model.mlp=[1024,1024]"),
        case(one, some, 16, 2048, "model.mlp=[512,512]"),
        case(one, few, 32, 1024, cache="24MiB"),
        case(one, few, 64, 2048, cache="64MiB"),
        case(one, few, 16, 4096, cache="16MiB"),
        case(one, few, 64, 1024, ids=3, cache="300MiB"),
        case(one, few, 32, 2048, ids=3, cache="48MiB"),
        case(two, many, 16, 512, whole),
        case(two, many, 16, 512, rows_),
        case(two, many, 64, 2048, whole),
        case(two, some, 32, 1024, rows_),
        case(two, some, 64, 2048, rows_, ids=3),
        case(two, some, 64, 1024, columns),
        case(two, few, 128, 1024, whole, ids=3),
        case(two, some, 16, 1024, rows_, "model.mlp=[1024,256]"),
        case(two, few, 32, 1024, whole, cache="24MiB"),
        case(two, few, 64, 1024, rows_, cache="64MiB"),
        case(two, few, 32, 2048, rows_, ids=3, cache="160MiB"),
        case(two, some, 32, 1024, k=10),
        case(two, some, 32, 1024, k=50),
        case(four, many, 16, 256, whole),
        case(four, some, 64, 1024, rows_),
        case(four, some, 32, 512, whole, ids=3),
        case(four, few, 32, 512, whole, cache="48MiB"),
        case(fast, many, 16, 512, whole),
        case(fast, some, 64, 2048, rows_),
        case(fast, some, 32, 1024, k=20),
        case(slow, some, 16, 512, whole),
        case(slow, some, 32, 1024, rows_),
        case(slow, some, 32, 1024, k=20),
        case(slow, some, 32, 1024, k=100),
        case(wide, some, 16, 512, whole),
        case(wide, some, 32, 512, "planner.sharding=table_row_wise"),
        case(wide, some, 32, 512, rows_),
        case(wide, some, 32, 512, k=20),
    ]


def pairs(count: int) -> list[tuple[Layout, Case]]:
    """Random models of unequal tables, each placed by our planner and by TorchRec's."""
    rng = np.random.default_rng(20261201)
    layouts = [Layout(1, 2), Layout(1, 4), Layout(2, 1, "200mbit"), Layout(2, 2, "200mbit")]
    found = []
    for index in range(count):
        num_tables = int(rng.integers(5, 15))
        rows = [int(10 ** rng.uniform(2.7, 5.7)) for _ in range(num_tables)]
        ids = [int(rng.choice([1, 1, 2, 10, 20])) for _ in range(num_tables)]
        batch, dim = int(rng.choice([256, 512, 1024])), int(rng.choice([16, 32, 64]))
        base = [*MODEL, f"model.embedding_dim={dim}", f"train.batch_size={batch}"]
        layout = layouts[index % len(layouts)]
        engines = [[*base, "planner.engine=topology"], [*base, "planner.engine=torchrec"]]
        tags = {"tables": num_tables, "dim": dim, "batch": batch}
        found.append((layout, Case(f"pair{index:02}_{layout.name}", engines, rows, ids, PAIR_SECONDS, tags=tags)))
    return found


# --- running ---


class Bench:
    """Runs what is missing in a folder."""

    def __init__(self, work: Path) -> None:
        """Probes the machine, if the folder has no probe yet."""
        self.work, self.runs = work, work / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        self.machine_file = work / "machine.yaml"
        if not self.machine_file.is_file():
            command = [*_torchrun(2), "-m", "torchrec_kstep.probe", "--out", str(self.machine_file)]
            _run([*command, "--ssd-path", str(work), "--seconds", str(PROBE_S), "--file", "256MiB"])
        self.machine = load_topology(self.machine_file)

    def topology_file(self, layout: Layout) -> Path:
        """The machines of a layout, made from the probed one."""
        if layout.num_hosts == 1:
            return self.machine_file
        file = self.work / f"{layout.name}.yaml"
        topology = divided(self.machine, layout)
        if not file.is_file():
            file.write_text(topology_text(topology, "One machine as several hosts in network namespaces."), encoding="utf-8")
        return file

    def run(self, wanted: Sequence[tuple[Layout, Case]]) -> None:
        """Runs all that have no result yet, one start of the ranks for each layout, and one more after each case that fails."""
        for layout in dict.fromkeys(layout for layout, _ in wanted):
            failed: set[str] = set()
            while missing := [one for other, one in wanted if other == layout and one.name not in failed and not self.is_done(one)]:
                try:
                    self._start(layout, missing)
                except (subprocess.SubprocessError, HostsError) as error:
                    culprit = next((one.name for one in missing if not self.is_done(one)), "")
                    failed.add(culprit)
                    print(f"FAILED {culprit}, goes on without it: {error}", file=sys.stderr, flush=True)

    def _start(self, layout: Layout, missing: Sequence[Case]) -> None:
        topology = f"planner.topology={self.topology_file(layout)}"
        cases = [replace(one, variants=[_with_topology(words, topology) for words in one.variants]) for one in missing]
        file = self.work / f"cases_{layout.name}.json"
        file.write_text(json.dumps([asdict(one) for one in cases]), encoding="utf-8")
        command = ["-m", "benchmarks.reality_rank", str(file), str(self.runs)]
        if layout.num_hosts == 1:
            _run([*_torchrun(layout.ranks_per_host), *command])
        else:
            with hosts(layout.num_hosts, layout.ranks_per_host, layout.link) as cluster:
                cluster.run(command, deadline_s=DEADLINE_S)

    def is_done(self, one: Case) -> bool:
        """Whether all variants of a case were measured."""
        folders = [self.runs / one.name] if len(one.variants) == 1 else [self.runs / one.name / f"v{v}" for v in range(len(one.variants))]
        return all((folder / "measured.json").is_file() for folder in folders)

    def observations(self, wanted: Sequence[tuple[Layout, Case]]) -> list[Observation]:
        """What was measured, in the order of the cases."""
        return [observation(one.name, *read_comparison(self.runs / one.name)) for _, one in wanted]

    def measured(self, folder: str) -> dict[str, Any]:
        """One result."""
        values: dict[str, Any] = json.loads((self.runs / folder / "measured.json").read_text())
        return values


def _with_topology(words: list[str], topology: str) -> list[str]:
    return words if "planner.engine=torchrec" in words else [*words, topology]


def divided(machine: ClusterTopology, layout: Layout) -> ClusterTopology:
    """One machine as several hosts: each has its part of cores and memory, and a link of the given rate."""
    host = machine.hosts[0]
    nodes = tuple(
        replace(
            node,
            num_cores=max(1, node.num_cores // layout.num_hosts),
            memory_bytes=node.memory_bytes // layout.num_hosts,
            bandwidth_bytes_per_s=node.bandwidth_bytes_per_s / layout.num_hosts,
        )
        for node in host.numa_nodes
    )
    rate = parse_bandwidth(f"{layout.link.removesuffix('bit').upper()}bit/s")
    nic = Nic("nic0", rate, "eth0", parse_bytes(BURST.upper().replace("KB", "KiB")))  # tc's kb are KiB
    links = tuple(link for link in host.links if not any(end.startswith("nic") for end in link.ends))
    host = replace(host, numa_nodes=nodes, nics=(nic,), links=(*links, Link((nodes[0].name, "nic0"), 2e10, 1.0)))
    return replace(machine, hosts=(host,), network=Network(50.0, 1.0)).with_hosts(layout.num_hosts)


def _torchrun(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]


def _run(command: Sequence[str]) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=DEADLINE_S)


# --- judging ---


def is_for_fitting(names: Sequence[str]) -> list[bool]:
    """Half of the names, those with the smaller hashes."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    chosen = set(ordered[: (len(ordered) + 1) // 2])
    return [name in chosen for name in names]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (a, b)], dtype=np.float64)
    return float(np.asarray(np.corrcoef(ranks))[0, 1])


def judge(run: Harness, bench: Bench, wanted: Sequence[tuple[Layout, Case]], layouts: Sequence[Layout] = ()) -> None:
    """Calibrates on one half, for all layouts that will be planned for, and predicts the other."""
    observations = bench.observations(wanted)
    chosen = is_for_fitting([one.name for one in observations])
    fitted = [one for one, is_chosen in zip(observations, chosen, strict=True) if is_chosen]
    made = calibrated(fitted, bench.machine)
    for layout in dict.fromkeys([*(layout for layout, _ in wanted), *layouts]):
        file = bench.topology_file(layout)
        replace(made, cores=load_topology(file).cores_fingerprint).write(calibration_file(file))
    with (bench.work / "results.jsonl").open("w", encoding="utf-8") as lines:
        for one, is_chosen in zip(observations, chosen, strict=True):
            before, after = one.predicted(Coefficients()), one.predicted(made.coefficients)
            values = {"name": one.name, "fitted": is_chosen, "measured_ms": 1e3 * one.step_s, "before_ms": 1e3 * before.seconds}
            phases = {phase.name: 1e3 * phase.seconds for phase in after.phases}
            values |= {"after_ms": 1e3 * after.seconds, "error_ms": 1e3 * after.error_s, "phases_ms": phases}
            lines.write(json.dumps(values) + "\n")
            times = " ".join(f"{1e3 * seconds:9.2f}" for seconds in (one.step_s, before.seconds, after.seconds))
            print(f"{one.name:<60} {'fit ' if is_chosen else 'test'} {times}")
    for half, is_test in (("fitted", False), ("predicted", True)):
        part = [one for one, is_chosen in zip(observations, chosen, strict=True) if is_chosen != is_test]
        measured = [one.step_s for one in part]
        for label, coefficients in (("calibrated", made.coefficients), ("defaults", Coefficients())):
            steps = [one.predicted(coefficients) for one in part]
            errors = [100 * abs(step.seconds - found) / found for step, found in zip(steps, measured, strict=True)]
            words = {"op": "reality", "half": half, "coefficients": label, "configurations": len(part)}
            run.record(words, "error", "%", Spread.of(errors))
            run.record(words, "rank_correlation", "1", rank_correlation([step.seconds for step in steps], measured))
            covered = [abs(step.seconds - found) <= step.error_s for step, found in zip(steps, measured, strict=True)]
            run.record(words, "covered_by_error_bar", "%", 100 * sum(covered) / len(covered))


def judge_pairs(run: Harness, bench: Bench, wanted: Sequence[tuple[Layout, Case]]) -> None:
    """Our plans beside TorchRec's, measured in turns."""
    ratios = []
    for layout, one in wanted:
        ours, theirs = (bench.measured(f"{one.name}/v{index}") for index in range(2))
        ratios.append(theirs["median_s"] / ours["median_s"])
        words = {"op": "pair", "case": one.name, **one.tags, "hosts": layout.num_hosts, "ranks": layout.num_hosts * layout.ranks_per_host}
        run.record(words, "step", "ms", _spread(ours), "torchrec_plan", _spread(theirs))
    words = {"op": "pairs", "num": len(ratios), "not_slower": sum(ratio >= 1 for ratio in ratios)}
    run.record({**words, "peer": "torchrec_plan"}, "their_step_over_ours", "x", Spread.of(ratios))
    run.record({**words, "peer": "torchrec_plan"}, "their_step_over_ours_min", "x", min(ratios))


def _spread(values: dict[str, Any]) -> Spread:
    return Spread.of([1e3 * seconds for seconds in values["times_s"]])


def main(argv: list[str] | None = None) -> int:
    """Runs what is missing and judges all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_reality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few configurations: does it run, not how true it is")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--rounds", type=int, help="without effect here")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps runs, to go on after an interruption; default: a temporary one")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations and pairs whose name holds this")
    parser.add_argument("--pairs", type=int, default=12, metavar="N", help="pairs run; default 12")
    options = parser.parse_args(argv)
    run = Harness("reality", options.quick, options.json)
    work = (options.work or Path(tempfile.mkdtemp(prefix="kstep_reality_"))).resolve()
    try:
        bench = Bench(work)
        reason = why_unavailable() if not options.quick else "quick"
        wanted = [one for one in configurations() if options.only in one[1].name]
        versus = [one for one in pairs(options.pairs) if options.only in one[1].name]
        if reason:
            wanted, versus = ([one for one in part if one[0].num_hosts == 1] for part in (wanted, versus))
        if options.quick:
            wanted, versus = wanted[:2] + wanted[12:15], versus[:1]
            wanted, versus = ([(layout, replace(one, seconds=0.2)) for layout, one in part] for part in (wanted, versus))
        bench.run(wanted)
        done = [one for one in wanted if bench.is_done(one[1])]
        run.record({"op": "reality", "configurations": len(wanted)}, "measured", "1", float(len(done)))
        judge(run, bench, done, [layout for layout, _ in versus])
        bench.run(versus)
        if pairs_done := [one for one in versus if bench.is_done(one[1])]:
            judge_pairs(run, bench, pairs_done)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
