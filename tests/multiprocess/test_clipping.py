"""A bound on the norm of the whole gradient: sharded training equals `clip_grad_norm_` on an unsharded model, for any ranks.

Layer: multiprocess.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.multiprocess.tiered_cases import gathered
from tests.multiprocess.tiny import SCHEMA, TinyDataset, start, tiny_config
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

NUM_STEPS, GLOBAL_BATCH, MAX_NORM, LR = 6, 32, 0.05, 0.5
KERNELS: dict[str, dict[str, Any]] = {
    "tiered": {"planner__kernel": "tiered"},
    "tiered_mixed": {"planner__kernel": "tiered", "planner__tables": {"tags": "table_wise", "wide_user": "column_wise"}},
    "dense": {"planner__kernel": "dense"},
    "dense_replicated": {"planner__kernel": "dense", "planner__tables": {"tags": "data_parallel", "wide_item": "table_wise"}},
}


def config_of(kernel: str, num_ranks: int, accumulation: int) -> RunConfig:
    """Gradient descent, whose steps show every factor on a gradient, where Adam's hide it."""
    return tiny_config(
        planner__sharding="row_wise",
        model__dropout=0.0,
        optim__dense="sgd",
        optim__embedding="sgd",
        optim__lr=LR,
        optim__embedding_lr=LR,
        optim__schedule="constant",
        optim__warmup_steps=0,
        optim__clip_norm=MAX_NORM,
        optim__clip_covers="all",
        train__batch_size=GLOBAL_BATCH // num_ranks // accumulation,
        train__accumulation=accumulation,
        train__max_steps=NUM_STEPS,
        **KERNELS[kernel],
    )


def unsharded(initial: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Trains plainly; returns the weights, and the norms before they were cut."""
    config = config_of("dense", 1, 1)
    task = CTRTask(build_model(config.model, SCHEMA, seed=config.train.seed), 1)
    task.load_state_dict({name: value.clone() for name, value in initial.items()})
    optimizer = torch.optim.SGD(task.parameters(), lr=LR)
    order = BatchOrder(batch_size=GLOBAL_BATCH, seed=config.train.seed, shuffle=config.data.shuffle)
    norms = []
    for _, batch in zip(range(NUM_STEPS), TinyDataset().batches("train", order), strict=False):
        optimizer.zero_grad()
        loss, _ = task(batch)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(task.parameters(), MAX_NORM)))
        optimizer.step()
    return {name: value.detach() for name, value in task.state_dict().items()}, norms


def _sharded(world: World, folder: str, configs: list[RunConfig]) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Weights before and after the training of each configuration."""
    results = []
    for index, config in enumerate(configs):
        loop, state = start(config, world, TinyDataset(), Path(folder) / f"{world.world_size}_{index}")
        initial = gathered(loop.dmp.state_dict())
        loop.train(state)
        loop.sinks.close()
        results.append((initial, gathered(loop.dmp.state_dict())))
    return results


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_bound_is_that_of_an_unsharded_model(spawn_ranks: SpawnRanks, tmp_path: Path, num_ranks: int) -> None:
    """Otherwise rows would be scaled by the norm of their rank, by that of the dense parameters, or once per micro-batch."""
    cases = [(kernel, accumulation) for kernel in KERNELS for accumulation in (1, 2)]
    configs = [config_of(kernel, num_ranks, accumulation) for kernel, accumulation in cases]
    results = spawn_ranks(_sharded, num_ranks, args=(str(tmp_path), configs))[0]
    for case, (initial, actual) in zip(cases, results, strict=True):
        expected, norms = unsharded(initial)
        assert min(norms) > 2 * MAX_NORM, "the bound cuts nothing"
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name, c=case: f"{c}: {n}: {text}")


def test_tables_that_step_inside_backward_are_refused_by_name(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    spawn_ranks(_refused, 1, args=(str(tmp_path),))


def _refused(world: World, folder: str) -> None:
    changes: dict[str, Any] = {"planner__kernel": "fused", "optim__embedding": "adagrad", "optim__clip_norm": 1.0}
    config = tiny_config(**changes, optim__clip_covers="all")
    with pytest.raises(ConfigError, match=r"optim\.clip_covers=all with 6 tables \(.*user\.weight.*step inside backward"):
        start(config, world, TinyDataset(), Path(folder))
