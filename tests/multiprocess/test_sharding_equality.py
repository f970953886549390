"""Training does not depend on how it is sharded: losses of n ranks equal those of plain PyTorch in one process.

Layer: multiprocess. The slow lane runs the whole matrix of models, shardings, kernels and optimizers.
"""

import copy
import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from tests.batches import Rows, make_schema
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import ModelConfig, OptimConfig, PlannerConfig
from torchrec_kstep.models import MODELS, CTRTask, build_model
from torchrec_kstep.optim import LrSchedule, build_optimizer
from torchrec_kstep.planner import make_plan
from torchrec_kstep.sharding import build_sharders, shard_task
from torchrec_kstep.torchrec_seam.pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec_kstep.types import FeatureSchema, Predictions
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

NUM_STEPS = 50
NUM_ROWS = 22  # over 4 ranks: shares of 6, 6, 6 and 4 rows, so the last is padded


@functools.cache
def _rows(schema: FeatureSchema, step: int) -> Rows:
    """The global batch of a step; every tenth is shorter than the number of ranks."""
    return Rows.random(schema, 3 if step % 10 == 9 else NUM_ROWS, seed=step)


@dataclass(frozen=True)
class Case:
    """One way to train; equal `model`, `optim`, `pooling`, `num_dense` must mean equal losses."""

    sharding: str
    kernel: str = "dense"
    model: str = "deepfm"
    embedding_optimizer: str = "adam"
    pooling: str = "sum"
    num_dense: int = 2
    micro_batches: int = 1
    pipeline: str = "plain"
    tables: tuple[tuple[str, str], ...] = ()
    dim: int = 8
    tiny_rows: int = 2  # rows of one table: fewer than ranks

    @property
    def schema(self) -> FeatureSchema:
        return make_schema([40, self.tiny_rows, 7, 100], self.num_dense)

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(
            name=self.model, embedding_dim=self.dim, mlp=[16, 8], bottom_mlp=[8], pooling=self.pooling, embedding_init_std=0.1, cross_rank=0
        )

    @property
    def optim_config(self) -> OptimConfig:
        return OptimConfig(
            embedding=self.embedding_optimizer,
            lr=3e-3,
            embedding_lr=0.3 if self.embedding_optimizer == "sgd" else 1e-2,
            weight_decay=1e-3,
            embedding_l2=1e-4 if self.kernel == "dense" else 0.0,
            clip_norm=0.5,
            schedule="cosine",
            warmup_steps=10,
        )

    @property
    def planner_config(self) -> PlannerConfig:
        return PlannerConfig(sharding=self.sharding, kernel=self.kernel, tables=dict(self.tables))

    def rows(self, step: int) -> Rows:
        return _rows(self.schema, step)


def reference_losses(case: Case) -> list[float]:
    """Trains without TorchRec's sharding, with `torch.optim` alone."""
    return _reference_losses(replace(case, sharding="none", micro_batches=1, pipeline="none", tables=()))


@functools.cache
def _reference_losses(case: Case) -> list[float]:
    config = case.optim_config
    task = CTRTask(build_model(case.model_config, case.schema, seed=3), num_ranks=1)
    dense = [param for name, param in task.named_parameters() if ".embedding_bags." not in name]
    tables = [param for name, param in task.named_parameters() if ".embedding_bags." in name]
    make = {
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adagrad": lambda *args, **kw: torch.optim.Adagrad(*args, eps=config.eps, **kw),
    }
    optimizers = [
        torch.optim.Adam(dense, lr=config.lr, weight_decay=config.weight_decay),
        make[case.embedding_optimizer](tables, lr=config.embedding_lr, weight_decay=config.embedding_l2),
    ]
    schedules = [LrSchedule(optimizer, config, NUM_STEPS) for optimizer in optimizers]
    losses = []
    untrained = copy.deepcopy(task)
    for step in range(NUM_STEPS):
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            schedule.apply(step)
            optimizer.zero_grad()
        loss, _ = task(case.rows(step).batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(dense, config.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    last_rows = case.rows(NUM_STEPS - 2).batch()
    moved = task(last_rows)[1].logit - untrained(last_rows)[1].logit
    assert moved.abs().max() > 0.05, "a test in which nothing changes proves nothing"
    return losses


def sharded_losses(world: World, cases: list[Case]) -> list[list[float]]:
    """Trains each case sharded over the ranks; returns the global loss of each step."""
    return [_losses_of(world, case) for case in cases]


def _losses_of(world: World, case: Case) -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    task = CTRTask(build_model(case.model_config, case.schema, seed=3), num_ranks=world.world_size)
    sharders = build_sharders(case.planner_config, case.optim_config)
    plan = make_plan(task, case.planner_config, world, sharders, batch_size=NUM_ROWS, process_group=group)
    dmp = shard_task(task, plan, sharders, world, torch.device("cpu"))
    optimizer = build_optimizer(dmp, case.optim_config, case.micro_batches)
    schedule = LrSchedule(optimizer, case.optim_config, NUM_STEPS)
    count = world.world_size * case.micro_batches
    share = lambda step, micro: case.rows(step).share(world.rank * case.micro_batches + micro, count)  # noqa: E731
    losses = torch.zeros(NUM_STEPS, dtype=torch.float64)
    if case.pipeline == "plain":
        for step in range(NUM_STEPS):
            schedule.apply(step)
            for micro in range(case.micro_batches):
                optimizer.zero_grad()
                loss, _ = dmp(share(step, micro))
                loss.backward()
                optimizer.step()
                losses[step] += float(loss.detach()) / world.world_size
    else:
        pipeline_type = {"base": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}[case.pipeline]
        pipeline = pipeline_type(dmp, optimizer, torch.device("cpu"))
        batches = iter([share(step, micro) for step in range(NUM_STEPS) for micro in range(case.micro_batches)])
        for step in range(NUM_STEPS):
            schedule.apply(step)
            for _ in range(case.micro_batches):
                losses[step] += _loss(pipeline.progress(batches), len(case.rows(step).label))
        if case.pipeline == "sparse_dist":
            assert pipeline._pipelined_modules, "nothing was pipelined: the tracer lost its way in the model"
    dist.all_reduce(losses)
    return [float(loss) for loss in losses]


def _loss(predictions: Predictions, num_rows: int) -> float:
    """Recomputes a rank's part of the global mean loss: pipelines hand out predictions only."""
    per_row = torch.nn.functional.binary_cross_entropy_with_logits(predictions.logit, predictions.label, reduction="none")
    return float((predictions.weight * per_row).sum()) / num_rows


def assert_equal_losses(actual: list[float], expected: list[float], what: object) -> None:
    """Compares step by step."""
    worst = max(range(len(expected)), key=lambda step: abs(actual[step] - expected[step]))
    assert abs(actual[worst] - expected[worst]) < 1e-5, f"{what}: step {worst}: {actual[worst]} against {expected[worst]}"


# Fused row-wise tables need a row on each rank; f1 has two.
TINY_BY_TABLE = (("f1", "table_wise"), ("wide_f1", "table_wise"))
FAST_CASES = [
    Case("row_wise"),
    Case("table_wise", pipeline="sparse_dist"),
    Case("data_parallel"),
    Case("auto", micro_batches=2, pipeline="sparse_dist"),
    Case("row_wise", kernel="fused", embedding_optimizer="adagrad", pipeline="sparse_dist", tables=TINY_BY_TABLE),
    Case("table_wise", kernel="fused", embedding_optimizer="adagrad"),
    Case("row_wise", tables=(("f0", "table_wise"), ("wide_f2", "data_parallel"), ("f3", "column_wise"))),
]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_of_many_ranks_equal_those_of_plain_torch(spawn_ranks: SpawnRanks, world_size: int) -> None:
    """Otherwise a wrong gradient scale, a lost row or a table that never steps would hide behind a falling loss."""
    local_world_size = 2
    results = spawn_ranks(sharded_losses, world_size, local_world_size, args=(FAST_CASES,), timeout_s=100)
    for index, case in enumerate(FAST_CASES):
        expected = reference_losses(case)
        for rank in range(world_size):
            assert_equal_losses(results[rank][index], expected, case)


def _matrix() -> list[Case]:
    """DeepFM (two collections, first-order tables) in all ways, the others in the ways that differ most."""
    cases = []
    for sharding, (kernel, optimizer), (pooling, num_dense, micro_batches, pipeline) in itertools.product(
        ("data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "auto"),
        (("dense", "adam"), ("dense", "sgd"), ("dense", "adagrad"), ("fused", "sgd"), ("fused", "adagrad")),
        (("sum", 0, 1, "base"), ("mean", 3, 1, "plain"), ("sum", 1, 2, "sparse_dist")),
    ):
        if kernel == "fused" and (sharding == "data_parallel" or micro_batches > 1):
            continue
        tiny_rows = 4 if kernel == "fused" and "row_wise" in sharding else 2
        case = Case(sharding, kernel, "deepfm", optimizer, pooling, num_dense, micro_batches, pipeline, tiny_rows=tiny_rows)
        cases.append(case)
        if sharding in ("data_parallel", "table_wise", "row_wise") and optimizer in ("adam", "adagrad") and pooling == "mean":
            cases += [replace(case, model=model) for model in MODELS if model != "deepfm"]
    return cases


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "local_world_size"), [(1, 1), (2, 2), (4, 2)])
def test_losses_of_the_whole_matrix(spawn_ranks: SpawnRanks, world_size: int, local_world_size: int) -> None:
    """As above, for every sharding, kernel, optimizer, pooling and pipeline, and for every model."""
    cases = _matrix()
    results = spawn_ranks(sharded_losses, world_size, local_world_size, args=(cases,), timeout_s=800)
    for index, case in enumerate(cases):
        assert_equal_losses(results[0][index], reference_losses(case), case)
