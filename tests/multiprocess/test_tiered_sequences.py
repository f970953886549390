"""Tiered tables that are read without pooling train as an unsharded `EmbeddingCollection` does.

Layer: multiprocess.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.multiprocess.tiered_cases import ADAM, PLACES, assert_close, gathered, gathered_states, lr_of
from tests.spawn import SpawnRanks
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.sharding import TieredEmbeddingCollectionSharder
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.sharding import EmbOptimType
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

NUM_STEPS, DIM = 20, 8
ROWS = {"a": 31, "b": 13}  # a fused shard of TorchRec needs a row on each of 4 ranks
FEATURES = {"f0": "a", "f1": "a", "f2": "b"}


class Sequences(nn.Module):
    """The rows of each feature, one below the other."""

    def __init__(self, ec: EmbeddingCollection) -> None:
        super().__init__()
        self.ec = ec

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(features)
        return torch.cat([rows[name].values() for name in FEATURES])


def tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=DIM,
            feature_names=[feature for feature, table in FEATURES.items() if table == name],
        )
        for name, num_rows in ROWS.items()
    ]


def share(step: int, rank: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Batches of ranks differ in size."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num_bags = 4 + 2 * rank
    lengths = torch.randint(0, 4, (3 * num_bags,), generator=generator)
    ids = [
        torch.randint(0, ROWS[table], (int(lengths[index * num_bags : (index + 1) * num_bags].sum()),), generator=generator)
        for index, table in enumerate(FEATURES.values())
    ]
    values = torch.cat(ids)
    return KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths), torch.randn(len(values), DIM, generator=generator)


def loss_of(rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(2 * rows) * factor).sum() / 8


def make(
    places: tuple[str, str],
    world: World,
    stock: dict[str, str],
    device: str = "meta",
    optimizer: OptimizerSpec = ADAM,
    deferred: bool = False,
) -> DistributedModelParallel:
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": ADAM.lr}
    sharder = TieredEmbeddingCollectionSharder(optimizer, deferred=deferred, fused_params=fused_params)
    module = EmbeddingCollection(tables=tables(), device=torch.device(device))
    parameters = sharder.shardable_parameters(module)
    plan = EmbeddingModuleShardingPlan()
    for name, place in zip(ROWS, places, strict=True):
        plan[name] = PLACES[place](world)(parameters[name], world.local_world_size, world.world_size, "cpu", sharder)
        plan[name].compute_kernel = stock.get(name, CUSTOMIZED_KERNEL)
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        Sequences(module),
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ec": plan}),
        sharders=[sharder],
    )


def check(world: World, cases: list[tuple[tuple[str, str], dict[str, str]]]) -> None:
    for places, stock in cases:
        _check(world, places, stock)


def _check(world: World, places: tuple[str, str], stock: dict[str, str]) -> None:
    torch.manual_seed(5)
    reference = Sequences(EmbeddingCollection(tables=tables()))
    state = {name: {"m": torch.zeros(rows, DIM), "v": torch.zeros(rows, DIM)} for name, rows in ROWS.items()}
    dmp = make(places, world, stock)
    dmp.load_state_dict({f"ec.embeddings.{name}.weight": reference.ec.embeddings[name].weight.detach().clone() for name in ROWS})
    for step in range(NUM_STEPS):
        for group in dmp.fused_optimizer.param_groups:
            group["lr"] = lr_of(step)
        dmp.fused_optimizer.zero_grad()
        features, factor = share(step, world.rank)
        rows = dmp(features)
        shares = [share(step, rank) for rank in range(world.world_size)]
        expected = [reference(features) for features, _ in shares]
        assert_close(rows, expected[world.rank], f"{places} {stock}: rows of step {step}")
        loss_of(rows, factor).backward()
        dmp.fused_optimizer.step()
        reference.zero_grad()
        (sum(loss_of(rows, factor) for rows, (_, factor) in zip(expected, shares, strict=True)) / world.world_size).backward()
        for table in tables():
            touched = torch.unique(torch.cat([features[name].values() for features, _ in shares for name in table.feature_names]))
            _update(reference.ec.embeddings[table.name].weight, state[table.name], touched, step, is_stock=table.name in stock)
    weights, states = gathered(dmp.state_dict()), gathered_states(dmp, world)
    for name in ROWS:
        assert_close(weights[f"ec.embeddings.{name}.weight"], reference.ec.embeddings[name].weight.detach(), f"{places}: {name}")
        if name not in stock:
            assert_close(states[f"{name}.m"], state[name]["m"], f"{places}: {name}.m")
            assert_close(states[f"{name}.v"], state[name]["v"], f"{places}: {name}.v")


@torch.no_grad()
def _update(weight: torch.Tensor, state: dict[str, torch.Tensor], rows: torch.Tensor, step: int, is_stock: bool) -> None:
    grad, lr, (beta1, beta2) = weight.grad[rows], lr_of(step), ADAM.betas
    if is_stock:
        weight[rows] -= lr * grad
        return
    state["m"][rows] = beta1 * state["m"][rows] + (1 - beta1) * grad
    state["v"][rows] = beta2 * state["v"][rows] + (1 - beta2) * grad * grad
    root = (state["v"][rows] / (1 - beta2 ** (step + 1))).sqrt() + ADAM.eps
    weight[rows] -= lr * state["m"][rows] / (1 - beta1 ** (step + 1)) / root


CASES = [
    (("rw", "tw_last"), {}),
    (("cw", "cw"), {}),
    (("cw", "rw"), {}),
    (("rw", "rw"), {"b": "fused"}),
]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_an_unsharded_collection(spawn_ranks: SpawnRanks, world_size: int) -> None:
    """Otherwise a row would reach another position of a sequence, or a gradient another row."""
    spawn_ranks(check, world_size, args=(CASES,))


def _kept_and_refused(world: World) -> tuple[bool, str]:
    torch.manual_seed(5)
    expected = EmbeddingCollection(tables=tables()).state_dict()
    torch.manual_seed(5)
    state = gathered(make(("rw", "cw"), world, {}, device="cpu").state_dict())
    is_kept = all(torch.equal(state[f"ec.{name}"], value) for name, value in expected.items())
    try:
        make(("twrw0", "rw"), world, {})
    except ConfigError as error:
        return is_kept, str(error)
    return is_kept, ""


def test_weights_of_the_module_are_kept_and_other_types_refused(spawn_ranks: SpawnRanks) -> None:
    for is_kept, message in spawn_ranks(_kept_and_refused, 2):
        assert is_kept
        assert "tiered table 'a' of an EmbeddingCollection is table_row_wise: expected one of table_wise, row_wise, column_wise" in message
