"""Tiered collections beside an unsharded one with a reference optimizer: cases, batches, and the comparison step by step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, data_parallel, grid_shard, row_wise, table_row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.optim_spec import AdamSpec, CowClip, OptimizerSpec
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.sharding import EmbOptimType
from torchrec_kstep.world import World

NUM_STEPS = 20
ADAM = AdamSpec(lr=0.02, betas=(0.8, 0.95), eps=1e-3)
CLIPPED = replace(ADAM, l2=0.01, clip=CowClip(ratio=0.35, zeta=1e-2, exempt=("c",)))  # scales some updates of `a` down and not others
REPLAYING = replace(ADAM, l2=0.05, l2_absent_rows="replay")
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN

# The generators of `torchrec.distributed.sharding_plan` by name: `tw0` is table-wise on rank 0, `cw01` a column shard on each.
PLACES: dict[str, Callable[[World], Any]] = {
    "tw0": lambda _: table_wise(0, compute_kernel="fused"),
    "tw_last": lambda world: table_wise(world.world_size - 1, compute_kernel="fused"),
    "rw": lambda _: row_wise(compute_kernel="fused"),
    "cw": lambda world: column_wise(ranks=[0, world.world_size - 1], compute_kernel="fused"),
    "cw_same": lambda world: column_wise(ranks=[world.world_size - 1] * 2, compute_kernel="fused"),
    "twrw0": lambda _: table_row_wise(0),
    "twrw_last": lambda world: table_row_wise(world.num_hosts - 1),
    "grid": lambda world: grid_shard(host_indexes=[0, world.num_hosts - 1]),
    "dp": lambda _: data_parallel(),
}


@dataclass(frozen=True)
class Case:
    """One collection of three tables: `a` has two features, `b` and `c` share one.

    Attributes:
        places: sharding of `a`, `b` and `c`, out of `PLACES`.
        pooling: of each table.
        stock: tables that keep a kernel of TorchRec's.
        weighted: ids carry weights.
        uneven: ranks have batches of different sizes.
        deferred: update in `optimizer.step()`.
        micro_batches: backwards per step.
        dim: columns of a table.
        rows: rows of a table.
    """

    places: tuple[str, str, str]
    pooling: tuple[PoolingType, PoolingType, PoolingType] = (SUM, SUM, SUM)
    stock: Mapping[str, str] = field(default_factory=dict)
    weighted: bool = False
    uneven: bool = False
    deferred: bool = False
    micro_batches: int = 1
    dim: int = 8
    rows: tuple[int, int, int] = (41, 23, 7)
    optimizer: OptimizerSpec = ADAM

    def tables(self) -> list[EmbeddingBagConfig]:
        features = (["f0", "f1"], ["f2"], ["f3", "f2"])
        return [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=self.dim,
                feature_names=list(names),
                pooling=pooling,
                init_fn=partial(nn.init.normal_, std=0.3) if name == "a" else None,
            )
            for name, names, rows, pooling in zip("abc", features, self.rows, self.pooling, strict=True)
        ]

    @property
    def outputs(self) -> list[str]:
        return ["f0", "f1", "f2@b", "f3", "f2@c"]


class Pooled(nn.Module):
    """A collection, and its outputs side by side in the order of names: TorchRec's own order depends on the plan."""

    def __init__(self, ebc: EmbeddingBagCollection, outputs: list[str]) -> None:
        super().__init__()
        self.ebc = ebc
        self.outputs = outputs

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return torch.cat([pooled[name] for name in self.outputs], dim=1)


@dataclass(frozen=True)
class Share:
    """What one rank sees of a step in one micro-batch."""

    features: KeyedJaggedTensor
    factor: torch.Tensor  # of the loss, [B, columns]

    def loss(self, pooled: torch.Tensor, num_parts: int) -> torch.Tensor:
        return (torch.tanh(2 * pooled) * self.factor).sum() / (8 * num_parts)


def share(case: Case, step: int, rank: int, micro_batch: int = 0) -> Share:
    """Seeded: the same for every way to train."""
    generator = torch.Generator().manual_seed(1_000_000 + 1000 * step + 10 * rank + micro_batch)
    num_bags = 6 + (3 * rank if case.uneven else 0)
    limits = {"f0": case.rows[0], "f1": case.rows[0], "f2": min(case.rows[1:]), "f3": case.rows[2]}
    lengths = torch.randint(0, 4, (len(limits) * num_bags,), generator=generator)
    ids = [
        torch.randint(0, limit, (int(lengths[index * num_bags : (index + 1) * num_bags].sum()),), generator=generator)
        for index, limit in enumerate(limits.values())
    ]
    values = torch.cat(ids)
    features = KeyedJaggedTensor(
        keys=list(limits), values=values, lengths=lengths, weights=torch.rand(len(values), generator=generator) if case.weighted else None
    )
    return Share(features, torch.randn(num_bags, case.dim * 5, generator=generator))


@dataclass
class Reference:
    """An unsharded collection and the rows' optimizer, written down plainly."""

    case: Case
    model: Pooled
    state: dict[str, dict[str, torch.Tensor]]

    @classmethod
    def make(cls, case: Case) -> "Reference":
        torch.manual_seed(7)
        ebc = EmbeddingBagCollection(tables=case.tables(), is_weighted=case.weighted)
        state = {
            table.name: {name: torch.zeros(table.num_embeddings, case.dim) for name in ("m", "v")} for table in ebc.embedding_bag_configs()
        }
        return cls(case, Pooled(ebc, case.outputs), state)

    def step(self, step: int, lr: float, world_size: int) -> list[list[torch.Tensor]]:
        """Takes one step over all ranks and micro-batches; returns what each of them saw."""
        case = self.case
        parts = [[share(case, step, rank, micro) for micro in range(case.micro_batches)] for rank in range(world_size)]
        pooled = [[self.model(part.features) for part in of_rank] for of_rank in parts]
        self.model.zero_grad()
        losses = [
            part.loss(out, case.micro_batches)
            for of_rank, outs in zip(parts, pooled, strict=True)
            for part, out in zip(of_rank, outs, strict=True)
        ]
        (torch.stack(losses).sum() / world_size).backward()
        touched = self._touched([part.features for of_rank in parts for part in of_rank])
        with torch.no_grad():
            for table, (rows, counts) in touched.items():
                self._update(table, rows, counts, step + 1, lr)
        return [[out.detach() for out in outs] for outs in pooled]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: bag.weight.detach() for name, bag in self.model.ebc.embedding_bags.items()}

    def _touched(self, features: list[KeyedJaggedTensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Rows of each table in these bags, and how often each occurs."""
        ids = {
            table.name: torch.cat([of_rank[name].values() for of_rank in features for name in table.feature_names])
            for table in self.model.ebc.embedding_bag_configs()
        }
        return {table: torch.unique(values, return_counts=True) for table, values in ids.items()}

    def _update(self, table: str, rows: torch.Tensor, counts: torch.Tensor, step: int, lr: float) -> None:
        weight, state, spec = self.model.ebc.embedding_bags[table].weight, self.state[table], self.case.optimizer
        if table in self.case.stock:  # plain gradient descent
            weight[rows] -= lr * weight.grad[rows]
            return
        assert isinstance(spec, AdamSpec)
        if spec.replays_l2:  # every row, with a gradient of zero where it is absent
            counts = torch.ones(len(weight), dtype=counts.dtype).index_copy(0, rows, counts)
            rows = torch.arange(len(weight))
        grad = weight.grad[rows]
        grad = self._shaped(table, grad, weight[rows], counts)
        beta1, beta2 = spec.betas
        m, v = beta1 * state["m"][rows] + (1 - beta1) * grad, beta2 * state["v"][rows] + (1 - beta2) * grad * grad
        state["m"][rows], state["v"][rows] = m, v
        weight[rows] -= lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + spec.eps)

    def _shaped(self, table: str, grad: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """L2, then CowClip as in the paper's algorithm 1, over the summed gradient of all ranks and micro-batches."""
        spec = self.case.optimizer
        grad = grad + spec.l2 * weight
        if spec.clip is None or not spec.clip.covers(table):
            return grad
        floor = spec.clip.ratio * self.case.dim**0.5 * spec.clip.zeta
        limit = spec.clip.ratio * counts * weight.norm(dim=1).clamp(min=floor)
        return grad * (limit / torch.maximum(grad.norm(dim=1), limit))[:, None]


def plan_of(case: Case, module: EmbeddingBagCollection, sharder: TieredEmbeddingBagCollectionSharder, world: World) -> ShardingPlan:
    """The plan of a case; what is not stock is tiered."""
    parameters = sharder.shardable_parameters(module)
    plan = EmbeddingModuleShardingPlan()
    for name, place in zip("abc", case.places, strict=True):
        plan[name] = PLACES[place](world)(parameters[name], world.local_world_size, world.world_size, "cpu", sharder)
        plan[name].compute_kernel = case.stock.get(name, CUSTOMIZED_KERNEL)
    return ShardingPlan({"ebc": plan})


def shard(case: Case, world: World, seed: int = 11, tiers: TierConfig | None = None) -> DistributedModelParallel:
    """Shards a collection without weights."""
    sharder = TieredEmbeddingBagCollectionSharder(
        case.optimizer,
        tiers,
        world=world,
        deferred=case.deferred,
        seed=seed,
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": ADAM.lr},
    )
    module = EmbeddingBagCollection(tables=case.tables(), is_weighted=case.weighted, device=torch.device("meta"))
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        Pooled(module, case.outputs),
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=plan_of(case, module, sharder, world),
        sharders=[sharder],
    )


def lr_of(step: int) -> float:
    """A rate that changes, so that one that stands still is seen."""
    return ADAM.lr * (1 + step % 3)


def train(case: Case, dmp: nn.Module, world: World, steps: range, check: Callable[[int, int, torch.Tensor], None] | None = None) -> None:
    """Trains sharded; `check` sees the output of each step and micro-batch."""
    optimizer = dmp.fused_optimizer
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        optimizer.zero_grad()
        for micro in range(case.micro_batches):
            part = share(case, step, world.rank, micro)
            pooled = dmp(part.features)
            if check:
                check(step, micro, pooled.detach())
            part.loss(pooled, case.micro_batches).backward()
        optimizer.step()
        _step_dense(dmp, lr_of(step))


@torch.no_grad()
def _step_dense(dmp: nn.Module, lr: float) -> None:
    """Plain gradient descent for the tables of which nobody else takes care: those with TorchRec's dense kernel."""
    for parameter in dmp.parameters():
        if parameter.grad is not None:
            parameter -= lr * parameter.grad
            parameter.grad = None


def gathered(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Puts sharded tensors together. Collective, so every rank must hold every key: see `gathered_states` for others."""
    whole = {}
    for name in sorted(state):
        value = state[name]
        if hasattr(value, "local_shards"):
            tensor = torch.zeros(value.size(), dtype=value.dtype)
            for part in value.local_shards():
                (row, column), (num_rows, num_columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
                tensor[row : row + num_rows, column : column + num_columns] = part.tensor
            dist.all_reduce(tensor)
        else:
            tensor = value.detach().clone()
        whole[name] = tensor
    return whole


def gathered_states(dmp: DistributedModelParallel, world: World) -> dict[str, torch.Tensor]:
    """Puts optimizer states together, which exist on the ranks of their shards only. Collective."""
    mine = {}
    for states in dmp.fused_optimizer.state_dict()["state"].values():
        for name, value in states.items():
            if hasattr(value, "local_shards"):
                mine[name] = (tuple(value.size()), [(part.metadata.shard_offsets, part.tensor.clone()) for part in value.local_shards()])
            else:
                mine[name] = (tuple(value.shape), value.clone())
    everyone: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for of_rank in everyone:
        for name, (size, value) in of_rank.items():
            if isinstance(value, torch.Tensor):
                whole[name] = value
                continue
            tensor = whole.setdefault(name, torch.zeros(size))
            for (row, column), part in value:
                tensor[row : row + part.shape[0], column : column + part.shape[1]] = part
    return whole


def check_case(world: World, case: Case) -> None:
    """Forward, `NUM_STEPS` steps and all state of a case equal those of the unsharded collection to 1e-6."""
    reference = Reference.make(case)
    dmp = shard(case, world)
    dmp.load_state_dict({f"ebc.embedding_bags.{name}.weight": weight.clone() for name, weight in reference.weights().items()})
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    train(case, dmp, world, range(NUM_STEPS), lambda step, micro, pooled: outputs.__setitem__((step, micro), pooled))
    for step in range(NUM_STEPS):
        expected = reference.step(step, lr_of(step), world.world_size)[world.rank]
        for micro, pooled in enumerate(expected):
            assert_close(outputs[step, micro], pooled, f"{case}: output of step {step}")
    weights = gathered(dmp.state_dict())
    for name, weight in reference.weights().items():
        assert_close(weights[f"ebc.embedding_bags.{name}.weight"], weight, f"{case}: weights of {name}")
    states = gathered_states(dmp, world)
    for name in (name for name in "abc" if name not in case.stock):
        for moment, value in reference.state[name].items():
            assert_close(states[f"{name}.{moment}"], value, f"{case}: {name}.{moment}")
        assert int(states[f"{name}.num_steps"]) == NUM_STEPS


def check_cases(world: World, cases: list[Case]) -> None:
    for case in cases:
        check_case(world, case)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")
