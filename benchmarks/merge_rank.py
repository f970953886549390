"""One rank of `bench_merge` and `bench_merge_rate`: merge rounds over touched rows, or steps of TorchRec sharded over all hosts.

Prints what was sent, or how long it took, as JSON.

python -m benchmarks.merge_rank merge '<JSON list of MergeCase>'
python -m benchmarks.merge_rank rate '<JSON of {"cases": list of MergeCase, "num_rounds"}>'
python -m benchmarks.merge_rank torchrec '<JSON of {"batch", "dim", "codec", "steps"}>'
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.rows import RowMerger
from torchrec_kstep.merge.transport import ProcessGroupTransport
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.batch import RowGradients, TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec, SgdSpec

TIMEOUT_S = 300.0
ZIPF = 1.05
# Rows of the 26 categorical columns of the Criteo Kaggle set.
CRITEO_ROWS = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173),
    *(4, 7046547, 18, 15, 286181, 105, 142572),
]
DATA_ROWS = {"criteo": CRITEO_ROWS, "equal": [200_000] * 26, "small": [1000] * 26}
# Fields by how they are sent: periods of moments in rounds; None: moments are not sent.
STATES: dict[str, tuple[int, int] | None] = {"weights": None, "w1_m3_v6": (3, 6), "all": (1, 1)}


@dataclass(frozen=True)
class MergeCase:
    """One merge to be counted.

    Attributes:
        data: sizes of the tables.
        k: steps per round.
        states: key of `STATES`.
        wire: of `MergeSpec`.
        batch: samples per host and step; one id per sample and table.
        dim: columns of every table.
    """

    data: str
    k: int
    states: str
    wire: str
    batch: int
    dim: int

    @property
    def spec(self) -> MergeSpec:
        """The way to merge."""
        periods = STATES[self.states]
        options: dict[str, Any] = (
            {"row_states": "weights"} if periods is None else {"m_period_rounds": periods[0], "v_period_rounds": periods[1]}
        )
        return MergeSpec(k=self.k, wire=self.wire, timeout_s=TIMEOUT_S, **options)  # type: ignore[arg-type]  # one of the wires

    @property
    def num_rounds(self) -> int:
        """Rounds until every field was merged alike often."""
        periods = STATES[self.states]
        return 1 if periods is None else max(periods)


def draw(num_rows: int, count: int, noise: np.random.Generator) -> np.ndarray:
    """Draws Zipf ids and returns the different ones, ascending."""
    return np.unique(draw_ids(num_rows, count, noise))


def draw_ids(num_rows: int, count: int, noise: np.random.Generator) -> np.ndarray:
    """Draws Zipf ids by the inverse of the continuous distribution."""
    power = 1.0 - ZIPF
    ids = ((num_rows**power - 1) * noise.random(count) + 1) ** (1 / power)
    found: np.ndarray = np.minimum(ids.astype(np.int64), num_rows) - 1
    return found


def touched_rows(case: MergeCase, replica: int, round_index: int) -> list[np.ndarray]:
    """Returns the rows of each table that a replica touches in a round."""
    noise = np.random.default_rng([replica, round_index, case.k])
    return [draw(num_rows, case.batch * case.k, noise) for num_rows in DATA_ROWS[case.data]]


def make_group(data: str, dim: int, num_trackers: int) -> RowGroup:
    """Makes rows in DRAM; without moments where none are sent, to save memory."""
    optimizer = (
        SgdSpec(lr=0.1, touches="count")
        if num_trackers == 0
        else AdamSpec(lr=0.1, bias_correction="row", touches="count", num_trackers=num_trackers, step_per_moment=num_trackers > 1)
    )
    tables = [
        TableSpec(f"t{index}", rows, dim, index, init="uniform", init_a=-0.01, init_b=0.01) for index, rows in enumerate(DATA_ROWS[data])
    ]
    return RowGroup.in_dram(tables, optimizer, layout="packed")


def touch(group: RowGroup, rows: list[np.ndarray]) -> None:
    """One update of all rows. Bytes do not depend on how often a row was updated, only on whether it was."""
    bounds = np.cumsum([0, *(len(own) for own in rows)])
    grads = torch.randn(sum(len(own) * dim for own, dim in zip(rows, group.table_dims, strict=True)))
    group.set_step(0.1, 1)
    counts = torch.ones(int(bounds[-1]), dtype=torch.int32)
    group.apply(RowGradients(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(bounds), counts, grads))


def interface_bytes() -> int:
    """Bytes that left through this host's interfaces to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip().startswith("eth"))


class AllToAll:
    """Gloo's all-to-all of as many bytes as a round sends, in as many messages; memory is there before the clock runs."""

    def __init__(self, report: RoundReport, num_replicas: int) -> None:
        """Takes the sizes of a round: of each leg the largest part that a rank sends another, the same on all ranks."""
        self._num_buckets = report.num_buckets
        self._payloads = []
        for phase in ("up", "down"):
            part = torch.tensor(report.sent_bytes[phase] // max(1, num_replicas - 1) // max(1, report.num_buckets))
            dist.all_reduce(part, dist.ReduceOp.MAX)  # hosts own about as many rows each, not exactly
            payload = torch.ones(int(part) * num_replicas, dtype=torch.uint8)
            self._payloads.append((payload, torch.ones_like(payload)))

    def run(self) -> None:
        """Exchanges."""
        for payload, received in self._payloads:
            for _ in range(self._num_buckets):
                dist.all_to_all_single(received, payload)


def copy_bytes_per_s(num_bytes: int = 1 << 28) -> float:
    """Times a copy that all ranks make at once: bytes copied per second and rank."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    dist.barrier()
    begin_s = time.perf_counter()
    target.copy_(source)
    dist.barrier()
    return num_bytes / (time.perf_counter() - begin_s)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Returns seconds until all ranks have made a call, and seconds that this one's threads ran meanwhile."""
    dist.barrier()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    call()
    dist.barrier()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def run_rate(case: MergeCase, group: RowGroup, joined: ProcessGroupTransport, num_rounds: int) -> dict[str, Any]:
    """Times rounds and the same bytes by all-to-all, in turns; the first round is warm-up."""
    merger = RowMerger([group], case.spec, joined)
    merge_s: list[tuple[float, float]] = []
    peer_s: list[tuple[float, float]] = []
    reports: list[RoundReport] = []
    peer: AllToAll | None = None

    def merge_once() -> None:
        reports.append(merger.merge(len(reports), case.k, is_full=True))

    for _ in range(num_rounds + 1):
        touch(group, touched_rows(case, joined.index, 0))
        merge_s.append(timed(merge_once))
        peer = peer or AllToAll(reports[0], joined.num_replicas)
        peer_s.append(timed(peer.run))
    report = reports[-1]
    phases = [dict(report.duration_s) for report in reports[1:]]
    return {
        "case": asdict(case),
        "merge_s": [wall_s for wall_s, _ in merge_s[1:]],
        "merge_cpu_s": [cpu_s for _, cpu_s in merge_s[1:]],
        "all_to_all_s": [wall_s for wall_s, _ in peer_s[1:]],
        "all_to_all_cpu_s": [cpu_s for _, cpu_s in peer_s[1:]],
        "phases_s": {name: statistics.median(own.get(name, 0.0) for own in phases) for name in phases[-1]},
        "copy_bytes_per_s": copy_bytes_per_s(),
        "num_own_rows": sum(report.num_own_rows.values()),
        "num_union_rows": sum(report.num_union_rows.values()),
        "sent_bytes": report.total_sent_bytes,
        "num_buckets": report.num_buckets,
    }


def rate(cases: list[MergeCase], num_rounds: int) -> None:
    """Times rounds of all cases."""
    joined = ProcessGroupTransport(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), TIMEOUT_S)
    for case in cases:
        group = make_group(case.data, case.dim, 0 if case.states == "weights" else case.spec.num_trackers)
        print(json.dumps(run_rate(case, group, joined, num_rounds)), flush=True)


def run_merge(case: MergeCase, group: RowGroup, joined: ProcessGroupTransport) -> dict[str, Any]:
    """Merges once per period and returns bytes per step and rows."""
    merger = RowMerger([group], case.spec, joined)
    collective_bytes = interface = 0
    num_own = num_union = 0
    for round_index in range(case.num_rounds):
        touch(group, touched_rows(case, joined.index, round_index))
        dist.barrier()
        before = interface_bytes()
        report = merger.merge(round_index, case.k)
        dist.barrier()
        interface += interface_bytes() - before
        collective_bytes += report.total_sent_bytes
        num_own += sum(report.num_own_rows.values())
        num_union += sum(report.num_union_rows.values())
    num_steps = case.num_rounds * case.k
    return {
        "case": asdict(case),
        "interface_bytes": interface / num_steps,
        "collective_bytes": collective_bytes / num_steps,
        "num_own_rows": num_own,
        "num_union_rows": num_union,
    }


def merge(cases: list[MergeCase]) -> None:
    """Runs all cases; rows of one data set and number of trackers are shared."""
    world = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    joined = ProcessGroupTransport(world, TIMEOUT_S)
    groups: dict[tuple[str, int], RowGroup] = {}
    for case in cases:
        num_trackers = 0 if case.states == "weights" else case.spec.num_trackers
        key = (case.data, num_trackers)
        if key not in groups:
            groups.clear()
            groups[key] = make_group(case.data, case.dim, num_trackers)
        print(json.dumps(run_merge(case, groups[key], joined)), flush=True)


def torchrec_steps(batch: int, dim: int, codec: str, steps: int) -> None:
    """Counts steps of an `EmbeddingBagCollection` whose 26 tables are spread over all hosts, table by table.

    Tables are small: what travels does not depend on their rows. Their optimizer is a stock one.
    """
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan

    names = [f"t{index}" for index in range(26)]
    tables = [EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=1000, feature_names=[name]) for name in names]
    registry = None
    if codec == "bf16":
        registry = get_qcomm_codecs_registry(QCommsConfig(CommType.BF16, CommType.BF16), device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    num_hosts = dist.get_world_size()
    places = {name: table_wise(rank=index % num_hosts, compute_kernel="fused") for index, name in enumerate(names)}
    module = construct_module_sharding_plan(model, places, sharder, local_size=1, world_size=num_hosts, device_type="cpu")
    plan = ShardingPlan({"": module})
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    noise = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        ids = torch.randint(0, 1000, (26 * batch,), generator=noise)
        pooled = dmp(KeyedJaggedTensor(names, ids, lengths=torch.ones(26 * batch, dtype=torch.int32)))
        pooled.values().sum().backward()

    step()
    dist.barrier()
    before = interface_bytes()
    for _ in range(steps):
        step()
    dist.barrier()
    print(json.dumps({"codec": codec, "interface_bytes": (interface_bytes() - before) / steps}), flush=True)


def main(argv: list[str]) -> None:
    """Runs one mode in a process group of torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    kind, settings = argv[0], json.loads(argv[1])
    if kind == "merge":
        merge([MergeCase(**case) for case in settings])
    elif kind == "rate":
        rate([MergeCase(**case) for case in settings["cases"]], settings["num_rounds"])
    else:
        torchrec_steps(**settings)
    dist.barrier()  # nobody tears its connections down while a peer still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
