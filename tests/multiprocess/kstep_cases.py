"""A small model with tiered tables, batch normalisation and a dense part, trained by replicas on batches made from seeds."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.optim.kstep import KStepAdam
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.replicas import KStepEnv
from torchrec_kstep.sharding import BagSharder
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.sharding import EmbOptimType
from torchrec_kstep.world import World

ROWS = {"a": 40, "b": 12}
BATCH = 6
SPEC = AdamSpec(lr=0.02, bias_correction="row", touches="count")
TIMEOUT_S = 20.0
FUSED_LR = 0.1


class Model(nn.Module):
    """Two tables and a small network."""

    def __init__(self, has_batch_norm: bool = True) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[f"f_{name}"])
                for name, rows in ROWS.items()
            ]
        )
        norm = [nn.BatchNorm1d(8)] if has_batch_norm else []
        self.mlp = nn.Sequential(nn.Linear(16, 8), *norm, nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(ids)
        out: torch.Tensor = self.mlp(torch.cat([pooled["f_a"], pooled["f_b"]], dim=1))
        return out


@dataclass
class Trained:
    """One rank's part of a sharded model and its optimizer."""

    env: KStepEnv
    dmp: DistributedModelParallel
    optimizer: KStepAdam

    @classmethod
    def make(
        cls,
        env: KStepEnv,
        spec: AdamSpec = SPEC,
        seed: int = 5,
        has_batch_norm: bool = True,
        is_deferred: bool = False,
        kernel: str = CUSTOMIZED_KERNEL,
        places: Mapping[str, Any] | None = None,
        fused: EmbOptimType = EmbOptimType.EXACT_SGD,
        model_type: type[Model] = Model,
        has_dmp_kwargs: bool = True,
        dmp_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "Trained":
        """Builds both. Replicas whose dense weights start from different seeds must start alike all the same."""
        torch.manual_seed(seed)
        model = model_type(has_batch_norm)
        sharing = env.replica_world
        default = {"a": row_wise(compute_kernel="fused"), "b": table_wise(sharing.world_size - 1, compute_kernel="fused")}
        module = construct_module_sharding_plan(
            model.ebc, {**default, **(places or {})}, local_size=sharing.local_world_size, world_size=sharing.world_size, device_type="cpu"
        )
        for sharding in module.values():
            sharding.compute_kernel = kernel
        sharders: dict[str, Any] = {
            CUSTOMIZED_KERNEL: lambda: TieredEmbeddingBagCollectionSharder(spec, deferred=is_deferred),
            "dense": BagSharder,
            "fused": lambda: BagSharder({"optimizer": fused, "learning_rate": FUSED_LR}),
        }
        if kernel == "dense":
            options["table_adam"] = spec
        dmp = DistributedModelParallel(
            model,
            plan=env.localize(ShardingPlan({"ebc": module})),
            sharders=[sharders[kernel]()],
            **env.dmp_kwargs(**dmp_options or {}) if has_dmp_kwargs else {"env": env.dmp_kwargs()["env"]},
        )
        return cls(env, dmp, KStepAdam(dmp, env=env, lr=0.01, **options))

    def step(self, ids: KeyedJaggedTensor) -> None:
        self.optimizer.zero_grad()
        (self.dmp(ids) - 1).square().mean().backward()
        self.optimizer.step()

    def train(self, steps: Iterable[int], stream: int | None = None) -> "Trained":
        """Takes the steps named, on this rank's batches, or on those of `stream`."""
        for step in steps:
            self.step(batch(step, self.env.world.rank if stream is None else stream))
        return self

    def bits(self, with_states: bool = True) -> dict[str, bytes]:
        """Weights, buffers and moments on this rank by name and place within the replica."""
        found = dict(_tensors(self.dmp.state_dict()))
        if with_states:
            found |= dict(_tensors(self.optimizer.state_dict()))
        return {name: value.contiguous().numpy().tobytes() for name, value in found.items()}


def batch(step: int, stream: int) -> KeyedJaggedTensor:
    """One id a bag. No row comes twice in a batch, so that sums over ranks have two terms and any order gives the same bits."""
    generator = torch.Generator().manual_seed(1000 * step + stream)
    ids = [torch.randperm(rows, generator=generator)[:BATCH] for rows in ROWS.values()]
    return KeyedJaggedTensor.from_lengths_sync(
        [f"f_{name}" for name in ROWS], torch.cat(ids), torch.ones(BATCH * len(ROWS), dtype=torch.int64)
    )


def env_of(ranks_per_replica: int, timeout_s: float = TIMEOUT_S) -> KStepEnv:
    return KStepEnv.from_torchrun(ranks_per_replica, timeout_s=timeout_s)


def outcome_of(work: Any) -> tuple[str, str]:
    """Kind and text of the error that `work` raises."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def die(_world: World) -> None:
    """Ends this process as a crash would."""
    os._exit(17)


def _tensors(state: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    for key, value in state.items():
        name = f"{path}.{key}"
        if isinstance(value, Mapping):
            yield from _tensors(value, name)
        elif hasattr(value, "local_shards"):
            for shard in value.local_shards():
                yield f"{name}@{list(shard.metadata.shard_offsets)}", (shard.tensor + 0).as_subclass(torch.Tensor)
        elif isinstance(value, torch.Tensor):
            yield name, value.detach().clone()
