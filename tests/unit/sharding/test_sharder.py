"""Which kernels, optimizers and shardings go together, and what shard_task needs. Layer: unit."""

import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan

from tests.batches import make_schema
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import ModelConfig, OptimConfig, PlannerConfig
from torchrec_kstep.errors import ConfigError, PlanError
from torchrec_kstep.models import build_model
from torchrec_kstep.sharding import build_sharders, shard_task
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
        (PlannerConfig(kernel="uvm"), OptimConfig(), "planner.kernel='uvm': expected one of dense, fused"),
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
