"""KStepAdam in loops of other shapes: gradients cleared at the end, states loaded midway, several models, ranks without tables.

Layer: multiprocess.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from tests.multiprocess.kstep_cases import SPEC, Model, Trained, batch, env_of, outcome_of
from tests.spawn import SpawnRanks
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.optim.kstep import KStepAdam
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

LATE = MergeSpec(overlap_steps=3)
PAPER_TABLES = AdamSpec(lr=0.02, bias_correction="global", touches="count")


def _cleared_at_the_end(world: World, is_at_the_end: bool) -> dict[str, bytes]:
    """Warm-up, rounds and a merge between them, with rates that replicas raise in local steps."""
    trained = Trained.make(env_of(1), spec=PAPER_TABLES, recipe="paper", k=3, num_warmup_steps=2)
    for step in range(9):
        if not is_at_the_end:
            trained.optimizer.zero_grad()
        (trained.dmp(batch(step, world.rank)) - 1).square().mean().backward()
        trained.optimizer.step()
        if is_at_the_end:
            trained.optimizer.zero_grad()
        if step == 6:
            trained.optimizer.merge()
    trained.optimizer.merge()
    return trained.bits()


def _loaded_midway(_world: World, is_loaded: bool) -> dict[str, bytes]:
    """A state from the start, loaded while a round is under way, or nothing of that."""
    trained = Trained.make(env_of(1), k=4, merge=LATE)
    if is_loaded:
        untrained = Trained.make(env_of(1), k=4, merge=LATE)
        trained.train(range(20, 26))
        trained.dmp.load_state_dict(untrained.dmp.state_dict())
        trained.optimizer.load_state_dict(untrained.optimizer.state_dict())
    trained.train(range(9)).optimizer.merge()
    return trained.bits()


def _in_turns(_world: World, num_models: int) -> dict[str, bytes]:
    """The last of several models that train in turns over the same groups, with rounds under way at the same time."""
    env = env_of(1)
    models = [Trained.make(env, k=4 + number, merge=LATE) for number in range(num_models)]
    for step in range(9):
        for trained in models:
            trained.train([step])
    for trained in models:
        trained.optimizer.merge()
    return models[-1].bits()


USES: dict[str, Callable[[World, Any], dict[str, bytes]]] = {
    "gradients cleared at the end": _cleared_at_the_end,
    "a state loaded while a round is under way": _loaded_midway,
}


def _both(world: World) -> dict[str, tuple[dict[str, bytes], dict[str, bytes]]]:
    return {name: (use(world, False), use(world, True)) for name, use in USES.items()}


def test_the_shape_of_the_loop_changes_no_bit(spawn_ranks: SpawnRanks) -> None:
    ranks = spawn_ranks(_both, 2)
    for name in USES:
        for plain, other in (rank[name] for rank in ranks):
            assert plain == other, name
            assert other == ranks[0][name][1], f"{name}: replicas differ"


def _several(world: World) -> tuple[dict[str, bytes], dict[str, bytes]]:
    return _in_turns(world, 2), _in_turns(world, 3)


def test_models_that_share_the_groups_of_replicas_end_with_equal_replicas(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(_several, 2)
    assert first == second


class DenseOnly(nn.Module):
    """No table at all."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(values)
        return out


def _without_tables(world: World) -> list[dict[str, bytes]]:
    """Synchronous, local and mixed steps of models without tables, and on ranks that hold none."""
    found = []
    env = env_of(world.world_size // 2)
    places = {name: table_wise(0, compute_kernel="fused") for name in ("a", "b")}
    for k in (1, 3, {0: 1, 2: 3}):
        trained = Trained.make(env, k=k, places=places).train(range(5))
        trained.optimizer.merge()
        found.append(trained.bits())
        dmp = DistributedModelParallel(DenseOnly(), plan=env.localize(ShardingPlan({})), sharders=[], **env.dmp_kwargs())
        optimizer = KStepAdam(dmp, env=env, k=k)
        for _ in range(4):
            optimizer.zero_grad()
            dmp(torch.randn(5, 3)).mean().backward()
            optimizer.step()
        optimizer.merge()
        found.append({name: value.numpy().tobytes() for name, value in dmp.state_dict().items()})
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_and_models_without_tables(spawn_ranks: SpawnRanks, num_ranks: int) -> None:
    ranks = spawn_ranks(_without_tables, num_ranks)
    for rank in range(num_ranks // 2, num_ranks):
        assert ranks[rank] == ranks[rank - num_ranks // 2], "replicas differ"


class TwoHeads(Model):
    """Has a second head that some ranks use in some steps only."""

    def __init__(self, has_batch_norm: bool = True) -> None:
        super().__init__(has_batch_norm)
        self.head = nn.Linear(1, 1)
        self.uses_head = False

    def forward(self, ids: Any) -> torch.Tensor:
        out: torch.Tensor = super().forward(ids)
        return self.head(out) if self.uses_head else out


def _used_now_and_then(world: World) -> tuple[dict[str, bytes], float, float]:
    """Replica 1 uses the head in its third step only, replica 0 in its first five; updates counted by the head and by the rest."""
    options = {"static_graph": False, "find_unused_parameters": True}
    trained = Trained.make(env_of(1), model_type=TwoHeads, k=6, dmp_options=options)
    model = trained.dmp.module
    for step in range(6):
        model.uses_head = step < 5 if world.rank == 0 else step == 2
        trained.train([step])
    states = {name.removeprefix("module."): state for name, state in trained.optimizer.state_dict()["state"].items()}
    return trained.bits(), float(states["head.weight"]["step"]), float(states["mlp.0.weight"]["step"])


def test_updates_of_parameters_that_replicas_used_unequally_become_their_mean(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(_used_now_and_then, 2)
    assert first == second
    assert first[1:] == (3.0, 6.0)


def _not_localized(_world: World) -> tuple[str, str]:
    """A plan for one replica, given to all as it is."""
    env, model = env_of(1), Model()
    places = {name: table_wise(0, compute_kernel="fused") for name in ("a", "b")}
    plan = construct_module_sharding_plan(model.ebc, places, local_size=1, world_size=1, device_type="cpu")
    for sharding in plan.values():
        sharding.compute_kernel = CUSTOMIZED_KERNEL
    sharders: Any = [TieredEmbeddingBagCollectionSharder(SPEC)]
    return outcome_of(lambda: DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}), sharders=sharders, **env.dmp_kwargs()))


def test_a_plan_that_was_not_moved_to_its_replica_is_refused_by_table_and_rank(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(_not_localized, 2)
    assert first == ("", "")
    assert second[0] == "PlanError"
    assert "table 'a' on rank 0" in second[1]
    assert "env.localize(plan)" in second[1]
