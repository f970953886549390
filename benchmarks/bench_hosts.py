"""Training on several hosts over links of different rates, and how fast a launch that cannot work says so.

Hosts are network namespaces on this one machine (`benchmarks.hosts`), so they share its cores: step times say what a link
adds, not how training scales. No step floor is used. Workloads:

- train: DeepFM on MovieLens-100K, global batch 512, one rank per host: time per step, and the part of it that the step's
  bytes need at the link's rate (`link_limit`, the fastest that any program sending them could be);
- bytes: the same job counted twice, at the interfaces and by the collectives' own sizes;
- all_reduce: 8 MB of gradients, against the link's limit;
- launch: seconds until every host has ended, for four faults (deadlines as a user gets them).
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._harness import Harness, Spread
from benchmarks.collective_bytes import ring_all_reduce_bytes
from benchmarks.hosts import CHECKOUT, RENDEZVOUS_PORT, Hosts, hosts, why_unavailable

RATES_BITS_PER_S = {"100mbit": 100e6, "1gbit": 1e9, "unlimited": 0.0}
GLOBAL_BATCH = 512
ALL_REDUCE_BYTES = 8_000_000
LAUNCHER = "torchrec_kstep.launch"
JOIN_TIMEOUT_S = 20  # the launcher's default
TRAFFIC = str(CHECKOUT / "tests" / "multihost" / "rank_traffic.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the workloads and returns the exit status; where namespaces are not permitted it says so and measures nothing."""
    harness = Harness.from_command_line("hosts", __doc__, argv)
    if reason := why_unavailable():
        print(f"hosts: skipped: {reason}")
        return 0
    num_steps = 20 if harness.quick else 100
    for num_hosts in (2,) if harness.quick else (2, 4):
        with tempfile.TemporaryDirectory() as scratch:
            sent_bytes = _count_bytes(harness, num_hosts, Path(scratch))
            for rate in ("unlimited", "100mbit") if harness.quick else RATES_BITS_PER_S:
                _train(harness, num_hosts, rate, num_steps, sent_bytes, Path(scratch))
        for rate in () if harness.quick else RATES_BITS_PER_S:
            _all_reduce(harness, num_hosts, rate)
    if not harness.quick:
        _faults(harness)
    return harness.finish()


def _job(num_hosts: int, num_steps: int) -> list[str]:
    settings = [f"train.batch_size={GLOBAL_BATCH // num_hosts}", f"train.max_steps={num_steps}", "train.log_every_steps=10"]
    return [*settings, "metrics.tensorboard=false", "metrics.report=false"]


def _train(harness: Harness, num_hosts: int, rate: str, num_steps: int, step_bytes: float, scratch: Path) -> None:
    """Adds the time per step at one rate; windows of ten steps are the samples, the first of them is warm-up."""
    print(f"training on {num_hosts} hosts, link {rate}", flush=True)
    run_dir = scratch / f"{num_hosts}_{rate}"
    with hosts(num_hosts, 1, "" if rate == "unlimited" else rate) as cluster:
        command = ["-m", "torchrec_kstep.train", *_job(num_hosts, num_steps), f"run_dir={run_dir}"]
        cluster.run(command, cwd=scratch, deadline_s=500)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [record["rows_per_s"] for record in records if record["event"] == "train"][1:]
    case = {"model": "deepfm", "data": "movielens_100k", "hosts": num_hosts, "link": rate, "global_batch": GLOBAL_BATCH}
    steps_ms = Spread.of([GLOBAL_BATCH / rate_rows * 1e3 for rate_rows in rates])
    bits_per_s = RATES_BITS_PER_S[rate]
    limit_ms = step_bytes * 8 / bits_per_s * 1e3 if bits_per_s else None
    harness.record(case, "step time", "ms", steps_ms, "link_limit" if limit_ms else None, limit_ms)
    harness.record(case, "throughput", "rows/s", Spread.of(rates))


def _count_bytes(harness: Harness, num_hosts: int, scratch: Path) -> float:
    """Adds the bytes counted in both ways and returns what one host sends per step."""
    counted: dict[int, tuple[float, float, float]] = {}
    for num_steps in (5, 25):
        with hosts(num_hosts, 1) as cluster:
            result = cluster.run(["-m", "benchmarks.counted_train", *_job(num_hosts, num_steps)], cwd=scratch, deadline_s=500)
        own_count = sum(float(str(lines[-1]["sent_bytes"])) for lines in result.json_lines())
        counted[num_steps] = sum(result.sent_bytes[0]), result.sent_payload_bytes, own_count
    at_interfaces, payload, own_count = counted[25]
    case = {"model": "deepfm", "data": "movielens_100k", "hosts": num_hosts, "steps": 25, "global_batch": GLOBAL_BATCH}
    harness.record(case, "bytes sent by all hosts", "B", at_interfaces, "collectives_count", own_count)
    harness.record(case, "bytes sent by all hosts, without headers", "B", payload, "collectives_count", own_count)
    step_bytes = (counted[25][0] - counted[5][0]) / 20 / num_hosts  # evaluation and start cancel out
    harness.record(case, "bytes sent per host and step", "B", step_bytes)
    return step_bytes


def _all_reduce(harness: Harness, num_hosts: int, rate: str) -> None:
    samples_ms = []
    with hosts(num_hosts, 1, "" if rate == "unlimited" else rate) as cluster:
        for _ in range(2):
            result = cluster.run([TRAFFIC, "all_reduce", str(ALL_REDUCE_BYTES), "1"], deadline_s=200)
            samples_ms.append(max(float(str(lines[0]["duration_s"])) for lines in result.json_lines()) * 1e3)
    bits_per_s = RATES_BITS_PER_S[rate]
    limit_ms = ring_all_reduce_bytes(ALL_REDUCE_BYTES, num_hosts) * 8 / bits_per_s * 1e3 if bits_per_s else None
    case = {"op": "all_reduce", "bytes": ALL_REDUCE_BYTES, "hosts": num_hosts, "link": rate}
    harness.record(case, "time", "ms", Spread.of(samples_ms), "link_limit" if limit_ms else None, limit_ms)


def _faults(harness: Harness) -> None:
    """Adds how long a launch on two hosts takes to end when it cannot work."""
    train = ["-m", "torchrec_kstep.train", "train.max_steps=5"]

    def record(fault: str, cluster: Hosts, **options: object) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            settings = {"launcher": LAUNCHER, "join_timeout_s": JOIN_TIMEOUT_S, "deadline_s": 120, "check": False, "cwd": Path(scratch)}
            result = cluster.run(train, **{**settings, **options})  # type: ignore[arg-type]
        if all(code == 0 for code in result.exit_codes):
            raise RuntimeError(f"a launch with {fault} ended well")
        harness.record(
            {"launch": fault.replace(" ", "_"), "hosts": cluster.num_hosts}, "time until all hosts ended", "s", result.duration_s
        )

    with hosts(2, 1) as cluster:
        record("a wrong address", cluster, endpoint=f"10.77.0.99:{RENDEZVOUS_PORT}")
        with cluster.listening(0, RENDEZVOUS_PORT):
            record("a busy port", cluster)
        record("a missing host", cluster, missing_hosts=(1,))
        record("different configurations", cluster, command_of_host={1: [*train, "optim.lr=0.5"]})


if __name__ == "__main__":
    sys.exit(main())
