"""One rank of `bench_slow_network`: trains one model one way and prints its pace as JSON.

python -m benchmarks.slow_network_rank '<JSON of SlowCase>'
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from benchmarks.hosts import StepFloor
from benchmarks.merge_rank import DATA_ROWS, TIMEOUT_S, draw_ids, interface_bytes
from torchrec_kstep import AdamSpec, KStepAdam, KStepEnv, TieredEmbeddingBagCollectionSharder
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.sharding.tiered.state import kernels_of_model
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.sharding import EmbOptimType

HIDDEN = 64  # of the dense network: 26 dim -> HIDDEN -> 1
# Bytes of a synchronous step do not depend on the number of rows, and small tables cost it least.
MAX_SYNC_ROWS = 100_000
NEVER = 1_000_000
_ROWS_AT_A_TIME = 65_536


@dataclass(frozen=True)
class SlowCase:
    """One way to train.

    Attributes:
        way: "sync" (TorchRec, tables spread over all hosts), "sync_bf16" (its codec), "kstep", or "alone" (replicas that never merge).
        data: sizes of the tables, key of `DATA_ROWS`.
        batch: samples per host and step.
        dim: columns of every table.
        k: steps per round.
        wire: of `MergeSpec`.
        overlap_steps: of `MergeSpec`.
        num_warmup_steps: steps before the first that counts.
        num_steps: steps that count.
    """

    way: str
    data: str
    batch: int
    dim: int
    k: int
    wire: str
    overlap_steps: int
    num_warmup_steps: int
    num_steps: int


class Model(nn.Module):
    """Pooled rows of all tables through a small network."""

    def __init__(self, rows: list[int], dim: int) -> None:
        """Makes tables of `rows` on the meta device: sharders make their rows."""
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{index}", embedding_dim=dim, num_embeddings=count, feature_names=[f"t{index}"])
            for index, count in enumerate(rows)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.net = nn.Sequential(nn.Linear(len(rows) * dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Returns logits `[B]`."""
        out: torch.Tensor = self.net(self.ebc(ids).values())[:, 0]
        return out


def sharded(model: Model, sharder: Any, world_size: int, kernel: str) -> dict[str, Any]:
    """Spreads the tables over ranks in turn; returns the plan of the collection."""
    names = [config.name for config in model.ebc.embedding_bag_configs()]
    places = {name: table_wise(rank=index % world_size, compute_kernel="fused") for index, name in enumerate(names)}
    module = construct_module_sharding_plan(model.ebc, places, sharder, local_size=1, world_size=world_size, device_type="cpu")
    for sharding in module.values():
        sharding.compute_kernel = kernel
    return {"ebc": module}


def synchronous(case: SlowCase) -> tuple[nn.Module, torch.optim.Optimizer]:
    """TorchRec's own sharder and kernels over all hosts, the network under DDP."""
    model = Model([min(rows, MAX_SYNC_ROWS) for rows in DATA_ROWS[case.data]], case.dim)
    registry = None
    if case.way == "sync_bf16":
        registry = get_qcomm_codecs_registry(QCommsConfig(CommType.BF16, CommType.BF16), device=torch.device("cpu"))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=registry)
    plan = ShardingPlan(sharded(model, sharder, dist.get_world_size(), "fused"))
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    return dmp, torch.optim.Adam([param for name, param in dmp.named_parameters() if "net." in name], lr=1e-3)


def replicated(case: SlowCase) -> tuple[nn.Module, KStepAdam]:
    """A replica on every host, with tiered tables in DRAM."""
    env = KStepEnv.from_torchrun(1, timeout_s=TIMEOUT_S)
    model = Model(DATA_ROWS[case.data], case.dim)
    sharder = TieredEmbeddingBagCollectionSharder(AdamSpec(lr=1e-3, bias_correction="row", touches="count"))
    plan = ShardingPlan(sharded(model, sharder, 1, CUSTOMIZED_KERNEL))
    dmp = DistributedModelParallel(model, plan=env.localize(plan), sharders=[sharder], **env.dmp_kwargs())
    k = case.k if case.way == "kstep" else NEVER
    spec = MergeSpec(k=k, row_states="weights", wire=case.wire, overlap_steps=case.overlap_steps)  # type: ignore[arg-type]  # one of the wires
    return dmp, KStepAdam(dmp, env=env, k=k, lr=1e-3, merge=spec)


def bring_rows(model: nn.Module, case: SlowCase, num_hosts: int) -> None:
    """Takes memory for all rows of all hosts' batches, so that the clock sees a run in progress, not its first rounds.

    A merged row that no one here ever read takes memory that was never used before, and on a virtual machine that may cost more
    than all the rest of a round. (TorchRec's tables are filled when they are made.)
    """
    drawn = [batches(case, rank) for rank in range(num_hosts)]
    for kernel in kernels_of_model(model):
        for index, table in enumerate(kernel.group.tables):
            rows = torch.cat([ids[table.name].values() for own in drawn for ids in own]).unique()
            for part in rows.split(_ROWS_AT_A_TIME):
                kernel.group.write(index, part, kernel.group.read(index, part))


def batches(case: SlowCase, rank: int) -> list[KeyedJaggedTensor]:
    """Draws the batches of all steps before the clock runs."""
    noise = np.random.default_rng([rank, 17])
    sizes = DATA_ROWS[case.data] if case.way in ("kstep", "alone") else [min(rows, MAX_SYNC_ROWS) for rows in DATA_ROWS[case.data]]
    names = [f"t{index}" for index in range(len(sizes))]
    lengths = torch.ones(len(sizes) * case.batch, dtype=torch.int32)
    return [
        KeyedJaggedTensor(names, torch.from_numpy(np.concatenate([draw_ids(rows, case.batch, noise) for rows in sizes])), lengths=lengths)
        for _ in range(case.num_warmup_steps + case.num_steps)
    ]


def train(case: SlowCase) -> dict[str, object]:
    """Trains and returns the pace of the steps that count."""
    rank, num_hosts = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    drawn = batches(case, rank)
    labels = torch.randint(0, 2, (case.batch,), dtype=torch.float32)
    model, optimizer = synchronous(case) if case.way.startswith("sync") else replicated(case)
    if isinstance(optimizer, KStepAdam):
        bring_rows(model, case, num_hosts)
        dist.barrier()
    floor = StepFloor()
    steps_s: list[float] = []
    begin_s = sent = 0.0
    for step, ids in enumerate(drawn):
        if step == case.num_warmup_steps:
            dist.barrier()
            begin_s, sent = time.perf_counter(), float(interface_bytes())
            floor = StepFloor()
        step_begin_s = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids), labels).backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - step_begin_s)
        floor.wait()
    dist.barrier()
    duration_s = time.perf_counter() - begin_s
    found: dict[str, object] = {
        "case": asdict(case),
        "samples_per_s": case.num_steps * case.batch * num_hosts / duration_s,
        "bytes_per_step": (interface_bytes() - sent) / case.num_steps,
        "busy_ms": statistics.median(steps_s[case.num_warmup_steps :]) * 1e3,
    }
    if isinstance(optimizer, KStepAdam):
        found["scalars"] = optimizer.take_scalars()
    return found


def main(argv: list[str]) -> None:
    """Runs one case in a process group of torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    print(json.dumps(train(SlowCase(**json.loads(argv[0])))), flush=True)
    dist.barrier()  # nobody tears its connections down while a peer still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
