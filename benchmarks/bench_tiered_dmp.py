"""Tiered tables inside `DistributedModelParallel`, on 1 rank and on 2 ranks of this machine: `--case overhead`, `training`, or both.

    overhead  a step (forward, backward, Adam) of a collection of 26 tables against the bare row group's step on the same ids,
              plus TorchRec's own dist time: a step of TorchRec's collection, same tables and plan, whose lookups hand out a
              ready-made output. Beside it, TorchRec's collection with FBGEMM's kernel.
    training  a step of DLRM in the `sparse_dist` pipeline, rows in DRAM, in a cache of 100 % and of 10 %, against the same
              model on FBGEMM's tables in DRAM (Adagrad; it has no Adam on CPU), and on one rank on `nn.EmbeddingBag`s with
              sparse gradients and `torch.optim.SparseAdam`.

Samples are those of rank 0; all ranks take the same turns. Ranks share the cores: one thread each on 2 ranks, two on 1 rank.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks._harness import ROOT, Contender, Harness, Spread, measure
from torchrec_kstep.config.schema import ModelConfig, SyntheticConfig
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.data.synthetic import SyntheticStream
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.ops.batch import Dedup
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder
from torchrec_kstep.sharding.tiered.kernel import TieredKernel
from torchrec_kstep.storage.division import RecordLayout
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL, BaseEmbedding
from torchrec_kstep.torchrec_seam.pipeline import make_pipeline
from torchrec_kstep.torchrec_seam.quiet import silence_known_warnings
from torchrec_kstep.torchrec_seam.sharding import EmbeddingBagCollectionSharder, EmbOptimType
from torchrec_kstep.types import Batch
from torchrec_kstep.units import MIB
from torchrec_kstep.world import World

NUM_TABLES = 26
LR = 1e-3
OPTIMIZER = AdamSpec(lr=LR)
DEADLINE_S = 1500.0
NUM_BATCHES = 4  # of the overhead case, in turns
PREFETCH_DEPTH, LOOKAHEAD = 2, 8
CASES = ("overhead", "training")
Kernel = TypeVar("Kernel", bound=nn.Module)
Record = tuple[dict[str, object], str, dict[str, list[float]]]  # case, metric, samples in ms by contender


@dataclass(frozen=True)
class Setting:
    """Sizes: rows of each table, columns, and rows of the global batch."""

    num_rows: int
    dim: int
    batch_size: int
    num_rounds: int
    num_timed_steps: int  # of a turn of the training case, of which a fourth of the rounds is run

    def case(self, op: str, world: World, **more: object) -> dict[str, object]:
        """The parameters as a benchmark row shows them."""
        sizes = {"dim": self.dim, "rows_per_table": self.num_rows, "batch": self.batch_size}
        return {"op": op, "ranks": world.world_size, "threads": torch.get_num_threads(), **sizes, **more}

    @property
    def full_cache_bytes(self) -> int:
        """DRAM with which every row of every table has its slot, over all ranks."""
        payload = payload_bytes_of(self.dim)
        return NUM_TABLES * (self.num_rows + 4096) * RecordLayout.of(payload, 64 * MIB).slot_bytes


def payload_bytes_of(dim: int) -> int:
    """Bytes of a row's fields."""
    return 4 * sum(field.width for field in OPTIMIZER.record_fields(dim))


def places_of(names: list[str], place: str, world: World) -> dict[str, Callable[..., Any]]:
    """Places tables: whole ones in turns, or the rows of each over all ranks."""
    if place == "row_wise":
        return {name: row_wise(compute_kernel="fused") for name in names}
    return {name: table_wise(index % world.world_size, compute_kernel="fused") for index, name in enumerate(names)}


def shard(module: nn.Module, sharder: ModuleSharder[nn.Module], place: str, world: World, kernel: str) -> DistributedModelParallel:
    """Shards every collection inside `module` by one kind of place. Collective."""
    plan = ShardingPlan({})
    for path, collection in module.named_modules():
        if type(collection) is EmbeddingBagCollection:
            parameters = sharder.shardable_parameters(collection)
            places = places_of(list(parameters), place, world)
            plan.plan[path] = EmbeddingModuleShardingPlan()
            for name, make in places.items():
                sharding = make(parameters[name], world.local_world_size, world.world_size, "cpu", sharder)
                sharding.compute_kernel = kernel
                plan.plan[path][name] = sharding
    group = dist.group.WORLD
    assert group is not None
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(module, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def tiered_sharder(world: World, dram_bytes: int | None, folder: Path) -> TieredEmbeddingBagCollectionSharder:
    """Ours; with a number of bytes rows are in a cache over SSD."""
    tiers = None
    if dram_bytes is not None:
        tiers = TierConfig(dram_bytes, [folder], prefetch_depth=PREFETCH_DEPTH, lookahead=LOOKAHEAD)
    return TieredEmbeddingBagCollectionSharder(OPTIMIZER, tiers, world=world)


def stock_sharder() -> EmbeddingBagCollectionSharder:
    """TorchRec's, with FBGEMM's kernel."""
    return EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LR})


def kernels_in(model: nn.Module, kind: type[Kernel]) -> list[Kernel]:
    """All compute kernels of a kind; sharded collections keep their lookups out of sight of `modules`."""
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    found = [kernel for lookup in lookups for kernel in lookup.modules() if isinstance(kernel, kind)]
    assert found, f"a model without {kind.__name__}"
    return found


def materialise(model: nn.Module) -> None:
    """Gives every row of this rank a record, as it has once training has run for a while."""
    for kernel in kernels_in(model, TieredKernel):
        group = kernel.group
        for index, shard_ in enumerate(kernel.shards):
            for rows in torch.arange(shard_.first_row, shard_.first_row + shard_.num_rows).split(4096):
                if isinstance(group, TieredTables):
                    bounds = torch.tensor([0] * (index + 1) + [rows.numel()] * (len(kernel.shards) - index))
                    empty = torch.empty(0)
                    group.replay(Dedup(rows, bounds, empty, empty, empty, empty))
                else:
                    group.write(index, rows, torch.zeros(rows.numel(), group.tables[index].dim), "m")
        group.flush()


class Pooled(nn.Module):
    """A collection alone."""

    def __init__(self, setting: Setting, device: str) -> None:
        """Makes its tables on `device`."""
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{index}", embedding_dim=setting.dim, num_embeddings=setting.num_rows, feature_names=[f"f{index}"])
            for index in range(NUM_TABLES)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device(device))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns `[B, 26 * dim]`."""
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled


class _ReadyMade(torch.autograd.Function):
    """Stands for a lookup: hands out an output, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Returns `output`."""
        del ctx, anchor
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        """Does nothing with a gradient that has come all the way."""
        del ctx, grad
        return None, None


def _hand_out(anchor: torch.Tensor, output: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
    """A kernel's forward that looks at nothing."""
    del features
    ready: torch.Tensor = _ReadyMade.apply(anchor, output)
    return ready


def without_lookups(model: nn.Module, num_bags: int) -> Callable[[bool], None]:
    """Returns a switch between a model's lookups and ready-made outputs of `num_bags` rows."""
    kernels = kernels_in(model, BaseEmbedding)
    anchor = torch.empty(0, requires_grad=True)
    ready = []
    for kernel in kernels:
        columns = sum(table.local_cols * table.num_features() for table in kernel.config.embedding_tables)
        output = torch.zeros(num_bags, columns)
        ready.append(partial(_hand_out, anchor, output))

    def switch(is_ready_made: bool) -> None:
        for kernel, forward in zip(kernels, ready, strict=True):
            if is_ready_made:
                kernel.forward = forward
            else:
                kernel.__dict__.pop("forward", None)

    return switch


def zipf_batches(setting: Setting, world: World, num_batches: int) -> list[Batch]:
    """This rank's shares of global batches: one Zipf id per bag."""
    config = SyntheticConfig(
        num_train_rows=num_batches * setting.batch_size, num_eval_rows=1, num_rows_per_table=[setting.num_rows] * NUM_TABLES
    )
    order = BatchOrder(world.rank, world.world_size, setting.batch_size // world.world_size)
    stream = SyntheticStream(config, prefetch_batches=0).batches("train", order)
    return [batch for batch, _ in zip(stream, range(num_batches), strict=False)]


def overhead(world: World, setting: Setting, place: str, folder: Path) -> list[Record]:
    """Measures the `overhead` case for one kind of plan."""
    ours = {
        "dram": shard(Pooled(setting, "meta"), tiered_sharder(world, None, folder), place, world, CUSTOMIZED_KERNEL),
        "cache_100": shard(
            Pooled(setting, "meta"), tiered_sharder(world, setting.full_cache_bytes, folder / "full"), place, world, CUSTOMIZED_KERNEL
        ),
    }
    stock = shard(Pooled(setting, "cpu"), stock_sharder(), place, world, "fused")
    features = [
        KeyedJaggedTensor(keys=[f"f{index}" for index in range(NUM_TABLES)], values=batch.sparse.values(), lengths=batch.sparse.lengths())
        for batch in zipf_batches(setting, world, NUM_BATCHES)
    ]
    grad = torch.randn(setting.batch_size // world.world_size, NUM_TABLES * setting.dim)
    switch = without_lookups(stock, setting.batch_size)
    records: list[Record] = []
    for tier, dmp in ours.items():
        materialise(dmp)
        contenders = {
            "dmp": Contender(collection_step(dmp, features, grad), dist.barrier),
            "bare": Contender(bare_step(dmp, features, setting), dist.barrier),
            "dist": Contender(collection_step(stock, features, grad), lambda: (switch(True), dist.barrier())),
            "fbgemm": Contender(collection_step(stock, features, grad), lambda: (switch(False), dist.barrier())),
        }
        samples = measure(contenders, setting.num_rounds, num_warmup_rounds=4)
        found = {name: [1e3 * sample for sample in values] for name, values in samples.items()}
        records.append((setting.case("overhead", world, place=place, tier=tier), "time", found))
    close(ours["cache_100"])
    return records


def collection_step(dmp: DistributedModelParallel, batches: list[KeyedJaggedTensor], grad: torch.Tensor) -> Callable[[], None]:
    """One step through TorchRec."""
    optimizer, at = dmp.fused_optimizer, iter(range(10**9))

    def step() -> None:
        optimizer.zero_grad()
        dmp(batches[next(at) % len(batches)]).backward(grad)
        optimizer.step()

    return step


def bare_step(dmp: DistributedModelParallel, batches: list[KeyedJaggedTensor], setting: Setting) -> Callable[[], None]:
    """One step of the row groups below a collection, on what its input dist makes of the batches."""
    ebc = dmp.module.ebc
    prepared: list[list[tuple[TieredKernel, torch.Tensor, torch.Tensor, list[int], torch.Tensor]]] = []
    for features in batches:
        parts = []
        for lookup, sent in zip(ebc._lookups, ebc.input_dist(ebc.create_context(), features).wait().wait(), strict=True):
            for kernel, own in zip(lookup._emb_modules, sent.split(lookup._feature_splits), strict=True):
                tables = [index for index, table in enumerate(kernel.config.embedding_tables) for _ in range(table.num_features())]
                first = torch.tensor([kernel.shards[table].first_row for table in tables])
                ids = own.values() + torch.repeat_interleave(first, torch.tensor(own.length_per_key()))
                columns = sum(kernel.group.table_dims[table] for table in tables)
                parts.append((kernel, ids, own.offsets().long(), tables, torch.randn(setting.batch_size, columns)))
        prepared.append(parts)
    at = iter(range(10**9))

    def step() -> None:
        for kernel, ids, offsets, tables, grad in prepared[next(at) % len(prepared)]:
            kernel.group.set_step(LR, 1)
            kernel.group.pooled(ids, offsets, tables).backward(grad)

    return step


def training(world: World, setting: Setting, folder: Path) -> list[Record]:
    """Measures the `training` case, whole tables in turns over the ranks."""
    full = setting.full_cache_bytes
    sides: dict[str, Callable[[list[Batch]], list[float]]] = {
        "cache_10": partial(turn, *tiered_dlrm(world, setting, full // 10, folder / "small"), setting),
        "cache_100": partial(turn, *tiered_dlrm(world, setting, full, folder / "full"), setting),
        "dram": partial(turn, *tiered_dlrm(world, setting, None, folder), setting),
        "fbgemm_adagrad": partial(turn, *fbgemm_dlrm(world, setting), setting),
    }
    if world.world_size == 1:
        sides["sparse_adam"] = partial(turn, *sparse_adam_dlrm(setting), setting)
    num_steps = LOOKAHEAD + 1 + setting.num_timed_steps + PREFETCH_DEPTH
    batches = zipf_batches(setting, world, num_steps * 2)
    samples: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(setting.num_rounds + 1):
        start = (index * 7919) % num_steps
        part = (batches + batches)[start : start + num_steps]
        for name in names[index % len(names) :] + names[: index % len(names)]:
            dist.barrier()
            seconds = sides[name](part)
            if index:
                samples[name].append(1e3 * sum(seconds) / len(seconds))
    return [(setting.case("training", world, model="dlrm"), "time", samples)]


Side = tuple[nn.Module, Any]


def turn(model: nn.Module, optimizer: Any, setting: Setting, batches: list[Batch]) -> list[float]:
    """Trains on all batches; seconds of each step but those at both ends, where there is more or less to prefetch."""
    is_sharded = isinstance(model, DistributedModelParallel)
    pipeline = make_pipeline("sparse_dist" if is_sharded else "plain", model, optimizer, torch.device("cpu"))
    source, seconds = iter(batches), []
    begin = time.perf_counter()
    for index in range(len(batches)):
        pipeline.progress(source)
        end = time.perf_counter()
        if LOOKAHEAD + 1 <= index < LOOKAHEAD + 1 + setting.num_timed_steps:
            seconds.append(end - begin)
        begin = end
    return seconds


def dlrm(setting: Setting, world: World, table_device: str | None) -> CTRTask:
    """DLRM over the tables; the same dense parameters on every rank."""
    config = SyntheticConfig(num_train_rows=1, num_eval_rows=1, num_rows_per_table=[setting.num_rows] * NUM_TABLES)
    device = None if table_device is None else torch.device(table_device)
    model = build_model(ModelConfig(name="dlrm", embedding_dim=setting.dim), SyntheticStream(config).schema, table_device=device)
    return CTRTask(model, world.world_size)


def tiered_dlrm(world: World, setting: Setting, dram_bytes: int | None, folder: Path) -> Side:
    """On our tables, every row with a record."""
    dmp = shard(dlrm(setting, world, "meta"), tiered_sharder(world, dram_bytes, folder), "table_wise", world, CUSTOMIZED_KERNEL)
    materialise(dmp)
    return dmp, Both(dmp)


def fbgemm_dlrm(world: World, setting: Setting) -> Side:
    """On FBGEMM's tables in DRAM."""
    dmp = shard(dlrm(setting, world, None), stock_sharder(), "table_wise", world, "fused")
    return dmp, Both(dmp)


def sparse_adam_dlrm(setting: Setting) -> Side:
    """Unsharded, in plain PyTorch below TorchRec's unsharded collection."""
    task = dlrm(setting, World(), None)
    tables = [module for module in task.modules() if isinstance(module, nn.EmbeddingBag)]
    for table in tables:
        table.sparse = True
    rows = [table.weight for table in tables]
    kept = {id(weight) for weight in rows}
    dense = [parameter for parameter in task.parameters() if id(parameter) not in kept]
    return task, Several([torch.optim.SparseAdam(rows, lr=LR), torch.optim.Adam(dense, lr=LR)])


class Several:
    """Several optimizers as one."""

    def __init__(self, optimizers: list[Any]) -> None:
        """Takes them in the order in which they step."""
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        """Of all."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Of all."""
        for optimizer in self._optimizers:
            optimizer.step()


class Both(Several):
    """The fused optimizer of the tables and Adam for the dense parameters."""

    def __init__(self, dmp: DistributedModelParallel) -> None:
        """Finds them in a sharded model."""
        dense = [parameter for parameter in dmp.parameters() if not hasattr(parameter, "_in_backward_optimizers")]
        super().__init__([dmp.fused_optimizer, torch.optim.Adam(dense, lr=LR)])


def close(model: nn.Module) -> None:
    """Ends the row stores of a model."""
    for kernel in kernels_in(model, TieredKernel):
        if isinstance(kernel.group, TieredTables):
            kernel.group.close()


def on_rank(rank: int, world_size: int, case: str, setting: Setting, folder: Path) -> None:
    """Measures on one rank, and on rank 0 writes the samples down."""
    silence_known_warnings()
    torch.set_num_threads(max(1, 2 // world_size))
    torch.manual_seed(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    world = World(rank, world_size, rank, world_size)
    records: list[Record] = []
    try:
        if case == "overhead":
            for place in ("table_wise", "row_wise") if world_size > 1 else ("table_wise",):
                records += overhead(world, setting, place, folder / place)
        else:
            records += training(world, setting, folder / "training")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(records, folder / "records.pt")


def add(run: Harness, record: Record) -> None:
    """Turns samples into rows."""
    case, metric, samples = record
    spreads = {name: Spread.of(values) for name, values in samples.items()}
    if case["op"] == "overhead":
        summed = Spread.of([bare + moved for bare, moved in zip(samples["bare"], samples["dist"], strict=True)])
        run.record(case, metric, "ms", spreads["dmp"], "bare_kernel+torchrec_dist", summed)
        run.record(case, metric, "ms", spreads["dmp"], "fbgemm_adagrad", spreads["fbgemm"])
        run.record({**case, "part": "bare_kernel"}, metric, "ms", spreads["bare"])
        run.record({**case, "part": "torchrec_dist"}, metric, "ms", spreads["dist"])
        return
    for tier in ("cache_10", "cache_100", "dram"):
        for peer in sorted(set(samples) & {"fbgemm_adagrad", "sparse_adam"}):
            run.record({**case, "tier": tier}, metric, "ms", spreads[tier], peer, spreads[peer])


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--case", action="append", choices=CASES)
    own.add_argument("--ranks", type=int, action="append", choices=(1, 2))
    options, rest = own.parse_known_args(argv)
    run = Harness.from_command_line("tiered_dmp", f"{__doc__}\n{own.format_help()}", rest)
    settings = {
        "overhead": Setting(2000, 16, 256, run.num_rounds, 0) if run.quick else Setting(80_000, 64, 8192, run.num_rounds, 0),
        "training": Setting(2000, 16, 256, 2, 3) if run.quick else Setting(80_000, 64, 4096, max(2, run.num_rounds // 4), 5),
    }
    (ROOT / "build").mkdir(exist_ok=True)  # a drive, not a memory file system
    for world_size in options.ranks or (1, 2):
        for case in options.case or CASES:  # each in processes of its own, so that none finds the memory of another
            with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
                arguments = (world_size, case, settings[case], Path(folder))
                context = mp.start_processes(on_rank, arguments, nprocs=world_size, join=False, start_method="spawn")
                deadline = time.monotonic() + DEADLINE_S
                while not context.join(timeout=5.0):
                    if time.monotonic() > deadline:
                        for process in context.processes:
                            process.kill()
                        raise TimeoutError(f"{case} on {world_size} ranks took more than {DEADLINE_S:.0f} s")
                for record in torch.load(Path(folder) / "records.pt", weights_only=True):
                    add(run, record)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
