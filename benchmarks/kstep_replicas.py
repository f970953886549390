"""Replicas of one process that take turns: models, tables, optimizers and the merge of rows are the product's own.

Rows are merged by `torchrec_kstep.merge` with its in-process transport, whose bits tests compare with those of processes. Only the
mean of the few dense parameters is taken here, by the rules of `merge.dense`: plain mean in the order of the replicas, states by
their periods, changes rounded to bfloat16 at random in both directions where the wire is narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torchrec_kstep.config.schema import KStepConfig, OptimConfig, RunConfig
from torchrec_kstep.merge.in_process import InProcessMerger
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.optim.build import split_parameters
from torchrec_kstep.optim.build_kstep import merge_spec, stages_of
from torchrec_kstep.optim.frozen import FrozenAdam
from torchrec_kstep.optim.keyed import TorchOptimizer, torch_optimizer
from torchrec_kstep.optim.period import Period
from torchrec_kstep.planner import make_plan
from torchrec_kstep.sharding import build_sharders, shard_task
from torchrec_kstep.sharding.tiered.state import kernels_of_model
from torchrec_kstep.types import Batch, FeatureSchema
from torchrec_kstep.world import World

WEIGHT, FIRST, SECOND = "weight", "exp_avg", "exp_avg_sq"


@dataclass
class Replica:
    """A model with its optimizer."""

    dmp: DistributedModelParallel
    optimizer: KeyedOptimizer
    dense: dict[str, torch.nn.Parameter]
    dense_optimizer: Optimizer

    def step(self, batch: Batch) -> None:
        """Takes one batch forward, back, and through the optimizer."""
        self.optimizer.zero_grad()
        loss, _ = self.dmp(batch)
        loss.backward()
        self.optimizer.step()

    def flat(self, state: str) -> torch.Tensor:
        """Returns one state of all dense parameters, as one vector."""
        return torch.cat([self._tensor(param, state).reshape(-1) for param in self.dense.values()])

    def write(self, state: str, values: torch.Tensor) -> None:
        """Sets one state of all dense parameters."""
        parts = torch.split(values, [param.numel() for param in self.dense.values()])
        for param, part in zip(self.dense.values(), parts, strict=True):
            self._tensor(param, state).copy_(part.view(param.shape))

    def _tensor(self, param: torch.nn.Parameter, state: str) -> torch.Tensor:
        if state == WEIGHT:
            return param.detach()
        value: torch.Tensor = self.dense_optimizer.state[param][state]
        return value


def make_replica(config: RunConfig, schema: FeatureSchema, kstep: KStepConfig, num_replicas: int) -> Replica:
    """Builds a replica as `train` does, on this process alone."""
    world = World()
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, schema, seed=config.train.seed, table_device=torch.device("meta"))
    task = CTRTask(model, num_replicas)
    sharders = build_sharders(config.planner, config.optim, config.tiers, 1, world, kstep, num_replicas)
    group = dist.GroupMember.WORLD
    assert group is not None
    plan = make_plan(task, config.planner, world, sharders, config.train.batch_size, group)
    dmp = shard_task(task, plan, sharders, world, torch.device("cpu"))
    for module in dmp.modules():
        assert not isinstance(module, DistributedDataParallel) or module.process_group.size() == 1
    dense, _ = split_parameters(dmp)
    inner = _dense_optimizer(list(dense.values()), config.optim, kstep, num_replicas)
    return Replica(dmp, CombinedOptimizer([TorchOptimizer(dense, inner), dmp.fused_optimizer]), dense, inner)


def _dense_optimizer(params: list[torch.nn.Parameter], optim: OptimConfig, kstep: KStepConfig, num_replicas: int) -> Optimizer:
    betas = (optim.beta1, optim.beta2)
    if kstep.variant == "frozen" and num_replicas > 1:
        return FrozenAdam(params, optim.lr, betas, optim.eps, optim.weight_decay, kstep.is_amsgrad)
    return torch_optimizer("adam", list(params), optim.lr, betas, optim.eps, optim.weight_decay)


class DenseMean:
    """Gives all replicas the mean of their dense parameters and moments, as rounds do."""

    def __init__(self, replicas: Sequence[Replica], spec: MergeSpec) -> None:
        """Takes equal replicas."""
        self._replicas = replicas
        self._spec = spec
        self._periods = {WEIGHT: 1, FIRST: spec.m_period_rounds, SECOND: spec.v_period_rounds}
        self._base = {state: replicas[0].flat(state) for state in self._periods}
        assert all(torch.equal(self._base[WEIGHT], replica.flat(WEIGHT)) for replica in replicas), "replicas start differently"

    def merge(self, round_index: int, is_full: bool) -> None:
        """Merges what is due, or everything."""
        for leg, (state, period) in enumerate(self._periods.items()):
            if not is_full and (round_index + 1) % period:
                continue
            parts = [replica.flat(state) for replica in self._replicas]
            if self._spec.wire == "fp32":
                merged = torch.stack(parts).sum(dim=0) / len(parts)
            else:
                generator = torch.Generator().manual_seed(hash((self._spec.seed, round_index, leg)) & (2**63 - 1))
                changes = [_rounded(part - self._base[state], generator) for part in parts]
                merged = self._base[state] + _rounded(torch.stack(changes).sum(dim=0) / len(parts), generator)
            if state == SECOND:
                merged = merged.clamp(min=0)  # a rounded change may overshoot a small v
            self._base[state] = merged
            for replica in self._replicas:
                replica.write(state, merged)
                if state == SECOND and isinstance(replica.dense_optimizer, FrozenAdam):
                    replica.dense_optimizer.freeze()


def _rounded(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rounds float32 to bfloat16 up or down at random, right on average."""
    noise = torch.randint(0, 1 << 16, values.shape, generator=generator, dtype=torch.int32)
    return ((values.contiguous().view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)


class Replicas:
    """Replicas that train alone and are merged; with one of them, plain training."""

    def __init__(self, config: RunConfig, schema: FeatureSchema, kstep: KStepConfig, num_replicas: int, folder: Path) -> None:
        """Builds equal replicas; those of tables on SSD keep rows below `folder`."""
        tiers = [replace(config.tiers, ssd_paths=[str(folder / f"replica{index}")]) for index in range(num_replicas)]
        self.members = [make_replica(replace(config, tiers=one), schema, kstep, num_replicas) for one in tiers]
        self._kernels = [kernels_of_model(replica.dmp) for replica in self.members]
        self._period = Period(stages_of(kstep))
        self._num_rounds = self._num_steps = self._num_unmerged_steps = 0
        self._rows: InProcessMerger | None = None
        if num_replicas > 1:
            spec = merge_spec(kstep, config.train.seed)
            self._rows = InProcessMerger([[kernel.group for kernel in kernels] for kernels in self._kernels], spec)
            self._dense = DenseMean(self.members, spec)

    @property
    def num_rounds(self) -> int:
        """Rounds so far."""
        return self._num_rounds

    def step(self, batches: Sequence[Batch]) -> None:
        """Takes a step of every replica, and merges if k steps have passed."""
        for replica, batch in zip(self.members, batches, strict=True):
            replica.step(batch)
        self._num_steps += 1
        self._num_unmerged_steps += 1
        if self._num_unmerged_steps >= self._period(self._num_steps - 1):
            self.merge(is_full=False)

    def merge(self, is_full: bool = True) -> None:
        """Makes replicas equal; `is_full`: whatever the periods of the states are."""
        if self._rows is None or not self._num_unmerged_steps:
            return
        self._dense.merge(self._num_rounds, is_full)
        for kernel in (kernel for kernels in self._kernels for kernel in kernels):
            kernel.fused_optimizer.hand_over(self._num_steps)  # by which the bias of v_hat is corrected
        self._rows.merge(self._num_rounds, self._num_unmerged_steps, is_full)
        for kernel in (kernel for kernels in self._kernels for kernel in kernels):
            kernel.fused_optimizer.hand_over()
        self._num_rounds, self._num_unmerged_steps = self._num_rounds + 1, 0
