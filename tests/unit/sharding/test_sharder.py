"""Which kernels, optimizers and shardings go together, and what shard_task needs. Layer: unit."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan

from tests.batches import make_schema
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import ModelConfig, OptimConfig, PlannerConfig, TiersConfig
from torchrec_kstep.errors import ConfigError, PlanError
from torchrec_kstep.models import build_model
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec, RowwiseAdagradSpec, SgdSpec
from torchrec_kstep.planner import find_tables, placed_shards
from torchrec_kstep.planner.plan import plan_alone
from torchrec_kstep.sharding import TieredEmbeddingBagCollectionSharder, build_sharders, shard_task
from torchrec_kstep.units import TIB
from torchrec_kstep.world import World


@pytest.mark.parametrize(
    ("planner", "optim", "expected"),
    [
        (PlannerConfig(kernel="fused"), OptimConfig(embedding="adam"), "FBGEMM has no Adam on CPU; choose planner.kernel=dense"),
        (PlannerConfig(kernel="fused"), OptimConfig(embedding="lamb"), "'lamb' with planner.kernel=fused: expected one of sgd, adagrad"),
        (PlannerConfig(kernel="fused"), OptimConfig(embedding="sgd", embedding_l2=0.1), "embedding_l2=0.1 with planner.kernel=fused"),
        (PlannerConfig(kernel="fused", sharding="data_parallel"), OptimConfig(embedding="sgd"), r"data_parallel \(planner.sharding\)"),
        (PlannerConfig(kernel="fused", tables={"a": "data_parallel"}), OptimConfig(embedding="sgd"), r"data_parallel \(a\)"),
        (PlannerConfig(kernel="dense"), OptimConfig(embedding="rowwise_adagrad"), "exists as a fused kernel only"),
        (PlannerConfig(kernel="uvm"), OptimConfig(), "planner.kernel='uvm': expected one of dense, fused, tiered"),
        (PlannerConfig(kernel="tiered"), OptimConfig(embedding="adagrad"), "expected one of adam, sgd, rowwise_adagrad"),
        (
            PlannerConfig(kernel="tiered", tables={"a": "data_parallel"}),
            OptimConfig(),
            r"data_parallel \(a\): rows in tiers have one owner",
        ),
    ],
)
def test_settings_that_upstream_cannot_run_are_refused_with_the_reason(planner: PlannerConfig, optim: OptimConfig, expected: str) -> None:
    """Otherwise they fail in the first step, as an assertion inside FBGEMM, on every rank."""
    with pytest.raises(ConfigError, match=expected):
        build_sharders(planner, optim)


def test_all_findings_are_told_at_once() -> None:
    """Otherwise users would mend one fault per run."""
    with pytest.raises(ConfigError) as error:
        build_sharders(PlannerConfig(kernel="fused", sharding="data_parallel"), OptimConfig(embedding="adam", embedding_l2=1.0))
    assert str(error.value).count("\n") == 3


@pytest.mark.parametrize(
    ("kernel", "embedding"),
    [("dense", "adam"), ("dense", "sgd"), ("dense", "adagrad"), ("fused", "sgd"), ("fused", "adagrad"), ("fused", "rowwise_adagrad")],
)
def test_every_other_combination_has_a_sharder(kernel: str, embedding: str) -> None:
    """Otherwise something that works would be refused."""
    (sharder,) = build_sharders(PlannerConfig(kernel=kernel), OptimConfig(embedding=embedding))
    assert (sharder.fused_params is not None) == (kernel == "fused")


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (OptimConfig(embedding_lr=0.5, embedding_l2=0.1, beta1=0.8), AdamSpec(lr=0.5, l2=0.1, betas=(0.8, 0.999), eps=1e-8)),
        (OptimConfig(embedding="sgd", embedding_lr=0.5), SgdSpec(lr=0.5)),
        (OptimConfig(embedding="rowwise_adagrad", embedding_lr=0.5, eps=1e-4), RowwiseAdagradSpec(lr=0.5, eps=1e-4)),
    ],
)
def test_tiered_tables_get_the_optimizer_that_was_asked_for(optim: OptimConfig, expected: OptimizerSpec) -> None:
    (sharder,) = build_sharders(PlannerConfig(kernel="tiered"), optim, world=World())
    assert isinstance(sharder, TieredEmbeddingBagCollectionSharder)
    assert sharder.optimizer == expected
    assert sharder.copies_per_weight == {"adam": 3, "sgd": 1, "rowwise_adagrad": 1}[optim.embedding]


def test_planning_takes_the_quota_on_ssd_for_the_memory_of_a_rank(tmp_path: Path) -> None:
    """Otherwise no plan would hold the tables that tiers are for."""
    tiers = TiersConfig("dram_ssd", dram_bytes="1MiB", ssd_paths=[str(tmp_path / "a" / "b")], ssd_bytes="8TiB")
    world = World(0, 2, 0, 2)
    (sharder,) = build_sharders(PlannerConfig(kernel="tiered"), OptimConfig(), tiers, world=world)
    assert sharder.tier_bytes_per_rank == 4 * TIB
    model = build_model(ModelConfig(mlp=[4], embedding_dim=64), make_schema([4_000_000_000]), torch.device("meta"))
    plan = plan_alone(model, PlannerConfig(kernel="tiered", engine="torchrec"), world, [sharder], batch_size=8)
    assert {shard.kernel for shard in placed_shards(plan, find_tables(model))} == {"customized_kernel"}
    (free,) = build_sharders(PlannerConfig(kernel="tiered"), OptimConfig(), replace(tiers, ssd_bytes=""), world=world)
    assert 0 < free.tier_bytes_per_rank < shutil.disk_usage(tmp_path).total


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("world", [World(), World(0, 4, 0, 2)])
def test_automatic_plans_of_tiered_tables_use_all_types_but_columns(pooling: str, world: World) -> None:
    """Averages are right in every mix, so nothing need be avoided."""
    (sharder,) = build_sharders(PlannerConfig(kernel="tiered"), OptimConfig(), world=world)
    model = build_model(ModelConfig(mlp=[4], embedding_dim=6, pooling=pooling), make_schema([3, 50, 700_000]), torch.device("meta"))
    plan = plan_alone(model, PlannerConfig(kernel="tiered", tables={"f0": "row_wise", "f1": "table_wise"}), world, [sharder], batch_size=8)
    types = {shard.table: shard.sharding_type for shard in placed_shards(plan, find_tables(model))}
    assert (types["f0"], types["f1"]) == ("row_wise", "table_wise")
    assert "column_wise" not in types.values()


def test_sharding_without_a_process_group_says_what_to_do() -> None:
    """Otherwise it would end in an assertion of TorchRec."""
    with pytest.raises(PlanError, match="expected a process group of 1 ranks before sharding, got None: call init_process_group first"):
        shard_task(nn.Linear(1, 1), ShardingPlan({}), [], World(), torch.device("cpu"))


def _shard_wrong(world: World) -> list[str]:
    messages = []
    model = build_model(ModelConfig(mlp=[4]), make_schema([5]), torch.device("meta"))
    for claimed, device in ((world, "cpu"), (World(0, 2, 0, 2), "cpu"), (world, "cuda")):
        try:
            shard_task(model, ShardingPlan({}), [], claimed, torch.device(device))
        except (ConfigError, PlanError) as error:
            messages.append(str(error))
    return messages


@pytest.mark.multiprocess
def test_a_task_without_weights_a_group_of_another_size_and_other_devices_are_refused(spawn_ranks: SpawnRanks) -> None:
    """Otherwise tables would start from whatever the shards hold, or ranks would wait for others that do not exist."""
    ((no_weights, wrong_size, wrong_device),) = spawn_ranks(_shard_wrong, 1)
    assert "build it on cpu to train it" in no_weights
    assert "expected a process group of 2 ranks before sharding, got 1" in wrong_size
    assert "sharding to device 'cuda': plans are made for cpu ranks" in wrong_device
