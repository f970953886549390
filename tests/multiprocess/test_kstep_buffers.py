"""KStepAdam: buffers, and the merge of dense parameters alone: means over ranks, sums, any order of replicas, numbers by hand.

Layer: multiprocess.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from tests.multiprocess.kstep_cases import Model, Trained, env_of, outcome_of
from tests.spawn import SpawnRanks
from torchrec_kstep.merge.dense import ReplicaMean
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.optim.kstep import KStepAdam
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


class Counting(Model):
    """Also counts what it has seen, in a buffer whose shares of the ranks add up, and has a constant that is not finite."""

    def __init__(self, has_batch_norm: bool = True) -> None:
        super().__init__(has_batch_norm)
        self.register_buffer("num_seen", torch.zeros(2))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unused", torch.empty(0))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("wide", torch.tensor([1234567891.25], dtype=torch.float64))

    def forward(self, ids: Any) -> torch.Tensor:
        rank = float(torch.distributed.get_rank())
        self.num_seen += torch.tensor([1.0, 10.0 * rank])  # type: ignore[has-type]  # a buffer
        self.scale += rank  # type: ignore[has-type]  # a buffer
        self.wide += 1  # type: ignore[has-type]  # a buffer
        self.num_calls += 1  # type: ignore[has-type]  # a buffer
        return super().forward(ids)


def _buffers(world: World, ranks_per_replica: int, is_late: bool) -> dict[str, Any]:
    """Two rounds of 4 steps, a flush, and another that has nothing to do; running statistics before and after the flush."""
    merge = MergeSpec(overlap_steps=2) if is_late else MergeSpec()
    trained = Trained.make(env_of(ranks_per_replica), model_type=Counting, k=4, merge=merge, summed_buffers=["num_seen"])
    trained.train(range(10))
    named = dict(trained.dmp.module.named_buffers())
    before = {name: named[name].clone() for name in ("mlp.1.running_mean", "mlp.1.running_var")}
    trained.optimizer.merge()
    after = {name: named[name].clone() for name in (*before, "num_seen", "scale", "wide", "mask", "num_calls", "mlp.1.num_batches_tracked")}
    trained.optimizer.merge()
    again = {name: named[name].clone() for name in after}
    return {"before": before, "after": after, "again": again, "rank": world.rank}


SIZES = [(2, 1, True), *(pytest.param(*size, False, marks=pytest.mark.slow) for size in ((2, 1), (4, 2)))]


@pytest.mark.parametrize(("num_ranks", "ranks_per_replica", "is_late"), SIZES)
def test_buffers_are_averaged_or_summed_over_all_ranks(
    spawn_ranks: SpawnRanks, num_ranks: int, ranks_per_replica: int, is_late: bool
) -> None:
    ranks = spawn_ranks(_buffers, num_ranks, args=(ranks_per_replica, is_late), timeout_s=110)
    first = ranks[0]["after"]
    for rank in ranks:
        for name, value in rank["after"].items():
            assert torch.equal(value, first[name]), f"{name} differs between ranks"
            assert torch.equal(rank["again"][name], value), f"{name}: a merge with nothing to do changed it"
    if not is_late:  # a late round corrects first
        for name, merged in ((name, first[name]) for name in ranks[0]["before"]):
            mean = torch.stack([rank["before"][name] for rank in ranks]).mean(dim=0)
            torch.testing.assert_close(merged, mean, rtol=1e-6, atol=1e-7)
    assert first["num_seen"].tolist() == [10.0 * num_ranks, 10.0 * 10.0 * sum(range(num_ranks))]
    assert first["scale"].item() == pytest.approx(1 + 10 * sum(range(num_ranks)) / num_ranks, rel=1e-6)
    assert first["wide"].item() == 1234567901.25, "float64 stays so"
    assert first["mask"].tolist() == [[0.0, float("-inf")], [0.0, 0.0]]
    assert first["num_calls"].item() == first["mlp.1.num_batches_tracked"].item() == 10


def _means(world: World) -> list[torch.Tensor]:
    """The mean of the same three vectors, dealt out to the replicas in every order."""
    mean = ReplicaMean(env_of(1))
    vectors = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) * 10.0**seed for seed in range(3)]
    return [mean.mean(vectors[order[world.rank]]) for order in itertools.permutations(range(3))]


def test_the_order_of_replicas_does_not_matter_to_dense_parameters(spawn_ranks: SpawnRanks) -> None:
    ranks = spawn_ranks(_means, 3)
    for other in ranks[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, ranks[0], strict=True))
    for merged in ranks[0]:
        torch.testing.assert_close(merged, ranks[0][0], rtol=1e-6, atol=1e-6)


class Line(nn.Module):
    """One weight whose gradient is what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.line.weight)

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(slope.view(1, 1))
        return out


def _by_hand(world: World) -> tuple[list[tuple[float, float, float]], tuple[str, str]]:
    """Weight, m and v after a round of two steps, and after one more step and a last merge, betas .5, lr 1; and a refusal."""
    env = env_of(1)
    refusal = outcome_of(lambda: Trained.make(env_of(1), k=4, summed_buffers=["num_sen", "mlp.1.num_batches_tracked"]))
    dmp = DistributedModelParallel(Line(), plan=env.localize(ShardingPlan({})), **env.dmp_kwargs())
    optimizer = KStepAdam(dmp, env=env, k=2, lr=1.0, betas=(0.5, 0.5), eps=1e-12)
    slope = torch.tensor(1.0 if world.rank == 0 else -2.0)

    def state() -> tuple[float, float, float]:
        (own,) = [value for name, value in optimizer.state_dict()["state"].items() if "line" in name]
        weight = next(iter(dmp.module.parameters()))
        return float(weight), float(own["exp_avg"]), float(own["exp_avg_sq"])

    found = []
    for step in range(3):
        optimizer.zero_grad()
        dmp(slope if step < 2 else torch.tensor(1.0)).sum().backward()
        optimizer.step()
        if step == 1:
            found.append(state())
    optimizer.merge()
    return [*found, state()], refusal


def test_dense_rounds_give_the_numbers_of_the_hand_computation(spawn_ranks: SpawnRanks) -> None:
    """Gradients of 1 and -2: each step moves replica 0 by -1 and replica 1 by +1, so the merged weight is 0.

    Moments after two steps from zero are (1 - .25) of g and g^2: m = .75 (1 - 2) / 2 = -.375, v = .75 (1 + 4) / 2 = 1.875.
    A third step with gradient 1 on both: m = .5 (-.375) + .5 = .3125, v = .5 (1.875) + .5 = 1.4375, corrected by 1 - 1/8.
    """
    moved = -(0.3125 / 0.875) / (1.4375 / 0.875) ** 0.5
    for states, (kind, text) in spawn_ranks(_by_hand, 2):
        assert kind == "ConfigError", "names that are no floating point buffer"
        assert "summed_buffers: 'num_sen', 'mlp.1.num_batches_tracked'" in text
        assert "mlp.1.running_mean" in text
        assert states[0] == pytest.approx((0.0, -0.375, 1.875), abs=1e-6)
        assert states[1] == pytest.approx((moved, 0.3125, 1.4375), rel=1e-6)
