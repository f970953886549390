"""KStepAdam with a bound on the norm of the whole gradient: whose norm it is, and that everything is scaled by it.

Layer: multiprocess.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.multiprocess.kstep_cases import SPEC, Model, Trained, batch, env_of, outcome_of
from tests.spawn import SpawnRanks
from torchrec_kstep.optim.clipping import GlobalNormClipping
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

# A large eps makes Adam's step follow the size of the gradient, which otherwise cancels.
FLAT = replace(SPEC, lr=1.0, eps=10.0)
BOUND, NUM_STEPS = 0.02, 4


def whole_weights(trained: Trained) -> dict[str, torch.Tensor]:
    """Weights of the unsharded model, from all ranks of the replica. Collective."""
    found = {}
    for name, value in trained.dmp.state_dict().items():
        if not hasattr(value, "local_shards"):
            found[name] = value.detach().clone()
            continue
        own = torch.zeros(tuple(value.size()))
        for shard in value.local_shards():
            first = shard.metadata.shard_offsets[0]
            own[first : first + shard.metadata.shard_sizes[0]] = (shard.tensor + 0).as_subclass(torch.Tensor)
        torch.distributed.all_reduce(own, group=trained.env.sharding_group)
        found[name] = own
    return found


def plain_norm(weights: dict[str, torch.Tensor], batches: list[Any]) -> float:
    """Norm of the mean gradient over batches, of the model without any sharding."""
    model = Model(has_batch_norm=False)
    model.load_state_dict(weights)
    for ids in batches:
        ((model(ids) - 1).square().mean() / len(batches)).backward()  # type: ignore[no-untyped-call]
    return float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]))


def _norms(world: World, ranks_per_replica: int, k: int) -> list[tuple[float, float]]:
    """The norm that each step was cut by, and what it should have been."""
    seen: list[float] = []
    measure = GlobalNormClipping.gradient_norm

    def watched(self: GlobalNormClipping) -> torch.Tensor:
        norm = measure(self)
        seen.append(float(norm))
        return norm

    env = env_of(ranks_per_replica)
    trained = Trained.make(env, FLAT, has_batch_norm=False, k=k, clip_norm=BOUND, clip_covers="all")
    expected = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GlobalNormClipping, "gradient_norm", watched)
        for step in range(NUM_STEPS):
            shares_gradient = k == 1 or ranks_per_replica == world.world_size
            streams = range(world.world_size) if shares_gradient else [world.rank]
            expected.append(plain_norm(whole_weights(trained), [batch(step, stream) for stream in streams]))
            trained.step(batch(step, world.rank))
    return list(zip(seen, expected, strict=True))


def _all_norms(world: World) -> dict[str, list[tuple[float, float]]]:
    cases = {"synchronous": (1, 1), "local": (1, 3), "one sharded replica": (2, 3)}
    return {name: _norms(world, *case) for name, case in cases.items()}


def test_the_norm_is_that_of_the_gradient_that_is_used(spawn_ranks: SpawnRanks) -> None:
    """At k = 1 that of the mean over replicas; in local steps that of the replica alone, over all its ranks; tables included."""
    for cases in spawn_ranks(_all_norms, 2):
        for name, norms in cases.items():
            assert len(norms) == NUM_STEPS
            for seen, expected in norms:
                assert seen == pytest.approx(expected, rel=1e-5), name
                assert seen > 2 * BOUND, "the bound cuts nothing"


def _synchronous(_world: World, cases: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for case in cases:
        trained = Trained.make(env_of(case.pop("ranks_per_replica")), FLAT, has_batch_norm=False, **case).train(range(NUM_STEPS))
        found.append(whole_weights(trained))
    return found


def test_synchronous_replicas_equal_one_replica_and_rows_are_scaled_too(spawn_ranks: SpawnRanks) -> None:
    clip = {"clip_norm": BOUND, "clip_covers": "all"}
    cases = [
        {"ranks_per_replica": 1, "k": 1, **clip},
        {"ranks_per_replica": 2, "k": 1, **clip},
        {"ranks_per_replica": 1, "k": 1, "clip_norm": BOUND},
    ]
    replicas, one, dense_only = spawn_ranks(_synchronous, 2, args=(cases,))[0]
    for name, value in one.items():
        torch.testing.assert_close(replicas[name], value, rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    tables = [name for name in one if "ebc" in name]
    assert all((dense_only[name] - one[name]).abs().max() > 1e-4 for name in tables), "rows were not scaled"


def _rounds(_world: World) -> tuple[dict[str, bytes], tuple[str, str]]:
    trained = Trained.make(env_of(1), FLAT, k=3, clip_norm=BOUND, clip_covers="all").train(range(7))
    trained.optimizer.merge()
    return trained.bits(), outcome_of(lambda: Trained.make(env_of(1), k=3, clip_norm=1.0, clip_covers="tables"))


def test_replicas_that_clip_by_norms_of_their_own_are_equal_after_rounds(spawn_ranks: SpawnRanks) -> None:
    (first, refusal), (second, _) = spawn_ranks(_rounds, 2)
    assert first == second
    assert refusal == ("ConfigError", "KStepAdam: clip_covers is 'tables', expected 'dense' or 'all'")
