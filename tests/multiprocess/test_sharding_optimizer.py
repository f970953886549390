"""The optimizer of a sharded task: accumulation, schedules, and a state that survives a checkpoint on other ranks.

Layer: multiprocess.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from tests.batches import Rows, make_schema
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import ModelConfig, OptimConfig, PlannerConfig
from torchrec_kstep.errors import CheckpointError, ConfigError
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.optim import LrSchedule, build_optimizer
from torchrec_kstep.planner import make_plan
from torchrec_kstep.sharding import build_sharders, shard_task
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

SCHEMA = make_schema([30, 6, 50], num_dense=2)
MODEL = ModelConfig(name="deepfm", embedding_dim=8, mlp=[8], embedding_init_std=0.1)


def make_trainer(
    world: World, planner: PlannerConfig, optim: OptimConfig, accumulation: int = 1, seed: int = 5
) -> tuple[DistributedModelParallel, KeyedOptimizer]:
    """Returns a sharded task and its optimizer."""
    group = dist.group.WORLD
    assert group is not None
    task = CTRTask(build_model(MODEL, SCHEMA, seed=seed), world.world_size)
    sharders = build_sharders(planner, optim)
    plan = make_plan(task, planner, world, sharders, 16, group)
    dmp = shard_task(task, plan, sharders, world, torch.device("cpu"))
    return dmp, build_optimizer(dmp, optim, accumulation)


def train(world: World, dmp: nn.Module, optimizer: KeyedOptimizer, steps: range, micro_batches: int = 1, num_rows: int = 64) -> None:
    """Takes the given steps; which rows a step sees does not depend on ranks or micro-batches."""
    for step in steps:
        rows = Rows.random(SCHEMA, num_rows, seed=step)
        for micro in range(micro_batches):
            optimizer.zero_grad()
            loss, _ = dmp(rows.share(world.rank * micro_batches + micro, world.world_size * micro_batches))
            loss.backward()
            optimizer.step()


def whole_state(dmp: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers all parameters, shards put together."""
    whole = {}
    for name, value in dmp.state_dict().items():
        if hasattr(value, "local_shards"):
            tensor = torch.zeros(value.size())
            for shard in value.local_shards():
                (row, column), (num_rows, num_columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                tensor[row : row + num_rows, column : column + num_columns] = shard.tensor
            dist.all_reduce(tensor)
        else:
            tensor = value.detach().clone()
        whole[name] = tensor
    return whole


# --- accumulation (C26) ---


def _parameters_after_ten_steps(world: World, accumulation: int) -> dict[str, torch.Tensor]:
    planner = PlannerConfig(kernel="dense", sharding="row_wise", tables={"f1": "data_parallel", "f2": "table_wise"})
    dmp, optimizer = make_trainer(world, planner, OptimConfig(lr=1e-2, embedding_lr=1e-2, clip_norm=1.0), accumulation)
    train(world, dmp, optimizer, range(10), accumulation)
    return whole_state(dmp)


def test_ranks_times_micro_batches_do_not_matter(spawn_ranks: SpawnRanks) -> None:
    """Otherwise the average over ranks or micro-batches would be taken twice, or not at all: 64 rows as 1x64, 2x32, 1x4x16, 2x2x16."""
    expected, *others = (
        spawn_ranks(_parameters_after_ten_steps, world_size, args=(accumulation,))[0]
        for world_size, accumulation in ((1, 1), (2, 1), (1, 4), (2, 2))
    )
    for other in others:
        assert other.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def _refusals(world: World) -> list[str]:
    messages = []
    try:
        make_trainer(world, PlannerConfig(sharding="table_wise", kernel="fused"), OptimConfig(embedding="adagrad"), accumulation=2)
    except ConfigError as error:
        messages.append(str(error))
    dmp, optimizer = make_trainer(world, PlannerConfig(kernel="dense"), OptimConfig(), accumulation=2)
    state = optimizer.state_dict()
    loss, _ = dmp(Rows.random(SCHEMA, 4, seed=0).batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for act in (optimizer.state_dict, lambda: optimizer.load_state_dict(state)):
        try:
            act()
        except CheckpointError as error:
            messages.append(str(error))
    optimizer.zero_grad()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return messages


def test_accumulation_refuses_fused_tables_and_saving_in_the_middle(spawn_ranks: SpawnRanks) -> None:
    """Otherwise fused tables would step once per micro-batch, and a resumed run would lose half a gradient."""
    (messages,) = spawn_ranks(_refusals, 1)
    assert len(messages) == 3
    assert "train.accumulation=2 with planner.kernel=fused: 6 tables (model.embeddings.embedding_bags.f0.weight" in messages[0]
    assert "cannot be saved after micro-batch 1 of 2" in messages[1]
    assert "cannot be loaded after micro-batch 1 of 2" in messages[2]


# --- schedules reach every group (C57) ---


def _row_movement_by_step(world: World, kernel: str) -> list[tuple[list[float], float]]:
    optim = OptimConfig(dense="sgd", embedding="sgd", lr=0.5, embedding_lr=2.0, warmup_steps=100)
    dmp, optimizer = make_trainer(world, PlannerConfig(sharding="row_wise", kernel=kernel), optim)
    schedule = LrSchedule(optimizer, optim, num_total_steps=200)
    start = {name: value.clone() for name, value in whole_state(dmp).items()}
    name = "model.embeddings.embedding_bags.f0.weight"
    results = []
    for step in (0, 49, 99):
        dmp.load_state_dict(dict(start))
        schedule.apply(step)
        train(world, dmp, optimizer, range(1))
        results.append(([group["lr"] for group in optimizer.param_groups], float((whole_state(dmp)[name] - start[name]).norm())))
    return results


@pytest.mark.parametrize("kernel", ["dense", "fused"])
def test_warm_up_moves_dense_parameters_and_tables_alike(spawn_ranks: SpawnRanks, kernel: str) -> None:
    """Otherwise the warm-up would hold back the dense rate only, and tables would start at full rate."""
    results = spawn_ranks(_row_movement_by_step, 2, args=(kernel,))[0]
    (_, full) = results[2]
    assert full > 1e-3
    for (rates, moved), scale in zip(results, (0.01, 0.5, 1.0), strict=True):
        assert sorted(set(rates)) == pytest.approx([0.5 * scale, 2.0 * scale])
        assert moved == pytest.approx(scale * full, rel=1e-3)


# --- checkpoints: state complete before the first step, sharded as the tables are, loadable on other ranks ---


def _save(world: World, folder: str, planner: PlannerConfig, optim: OptimConfig) -> dict[str, torch.Tensor]:
    """Trains 5 steps, saves, trains 5 more."""
    dmp, optimizer = make_trainer(world, planner, optim)
    train(world, dmp, optimizer, range(5))
    dcp.save({"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    train(world, dmp, optimizer, range(5, 10))
    return whole_state(dmp)


def _load(world: World, folder: str, planner: PlannerConfig, optim: OptimConfig) -> dict[str, torch.Tensor]:
    """Starts from other weights, loads before any step, trains the last 5 steps."""
    dmp, optimizer = make_trainer(world, planner, optim, seed=99)
    state = {"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    dmp.load_state_dict(dict(state["model"]))
    optimizer.load_state_dict(state["optimizer"])
    train(world, dmp, optimizer, range(5, 10))
    return whole_state(dmp)


OPTIM = OptimConfig(lr=1e-2, embedding_lr=1e-2)
CHECKPOINT_CASES = {
    "dense_adam": (
        PlannerConfig(kernel="dense", sharding="row_wise", tables={"f1": "data_parallel", "f2": "column_wise", "wide_f0": "table_wise"}),
        OPTIM,
    ),
    "dense_adagrad": (
        PlannerConfig(kernel="dense", sharding="column_wise", tables={"f0": "row_wise"}),
        replace(OPTIM, embedding="adagrad"),
    ),
    "dense_sgd": (PlannerConfig(kernel="dense", sharding="table_wise"), replace(OPTIM, embedding="sgd", dense="adagrad")),
    "fused_adagrad": (
        PlannerConfig(sharding="row_wise", kernel="fused", tables={"f1": "column_wise", "wide_f1": "table_wise"}),
        replace(OPTIM, embedding="adagrad"),
    ),
    "fused_rowwise_adagrad": (PlannerConfig(sharding="table_wise", kernel="fused"), replace(OPTIM, embedding="rowwise_adagrad")),
}


@pytest.mark.parametrize(
    ("world_size", "load_world_size"),
    [(2, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("case", CHECKPOINT_CASES)
def test_resuming_equals_not_stopping_also_on_other_numbers_of_ranks(
    spawn_ranks: SpawnRanks, tmp_path: Path, case: str, world_size: int, load_world_size: int
) -> None:
    """Otherwise moments of all ranks but one would be lost (plain tensors of one name), or lie on the wrong rows."""
    planner, optim = CHECKPOINT_CASES[case]
    folder = str(tmp_path / "checkpoint")
    expected = spawn_ranks(_save, world_size, args=(folder, planner, optim))[0]
    actual = spawn_ranks(_load, load_world_size, args=(folder, planner, optim))[0]
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
