"""State of tiered tables: initial rows, state on ranks without shards, checkpoints read by other plans and numbers of ranks.

Layer: multiprocess.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.multiprocess.tiered_cases import REPLAYING, Case, gathered, gathered_states, shard, train
from tests.spawn import SpawnRanks
from torchrec_kstep.checkpoint import CheckpointManager, TrainState
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

ROW_BIAS = AdamSpec(lr=0.02, betas=(0.8, 0.95), eps=1e-3, bias_correction="row")
PLANS = {
    "rows": Case(("rw", "rw", "rw")),
    "mixed": Case(("cw", "tw_last", "rw"), stock={"b": "fused"}),
    "columns": Case(("cw_same", "cw", "tw0")),
    "replayed": Case(("cw", "tw_last", "rw"), stock={"b": "fused"}, optimizer=REPLAYING),
}


def _initial_rows(world: World, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    return [gathered(shard(case, world).state_dict()) for case in cases]


def test_rows_start_alike_under_every_plan_and_number_of_ranks(spawn_ranks: SpawnRanks) -> None:
    """Otherwise a run on more ranks would be another run."""
    cases = [Case(("tw0", "tw0", "tw0")), Case(("rw", "cw", "rw")), Case(("cw_same", "rw", "twrw_last"))]
    results = [result for world_size in (1, 3) for result in spawn_ranks(_initial_rows, world_size, args=(cases,))[0]]
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        assert all(torch.equal(value, results[0][name]) for name, value in result.items())


def _absent(world: World) -> tuple[list[str], list[str], list[int]]:
    dmp = shard(Case(("tw0", "tw0", "tw0")), world)
    train(Case(("tw0", "tw0", "tw0")), dmp, world, range(2))
    state = dmp.state_dict()
    shards = [len(value.local_shards()) for value in state.values()]
    return sorted(state), sorted(dmp.fused_optimizer.state_dict()["state"]), shards


def test_ranks_without_shards_show_the_same_tables(spawn_ranks: SpawnRanks) -> None:
    """Otherwise saving would wait for a rank that has nothing to say."""
    first, second = spawn_ranks(_absent, 2)
    names = [f"ebc.embedding_bags.{name}.weight" for name in "abc"]
    assert first == (names, names, [1, 1, 1])
    assert second == (names, [], [0, 0, 0])


def _save(world: World, folder: str, case: Case) -> dict[str, torch.Tensor]:
    """Trains 5 steps, saves in two ways, trains 5 more."""
    dmp = shard(case, world)
    train(case, dmp, world, range(5))
    CheckpointManager(Path(folder) / "ours", 1, {}).save(TrainState(step=5), dmp, dmp.fused_optimizer)
    dcp.save({"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}, checkpoint_id=f"{folder}/plain")
    train(case, dmp, world, range(5, 10))
    return gathered(dmp.state_dict()) | gathered_states(dmp, world)


def _load(world: World, folder: str, case: Case, is_plain: bool) -> dict[str, torch.Tensor]:
    """Starts from other rows, loads before any step, trains the last 5."""
    dmp = shard(case, world, seed=99)
    if is_plain:
        state: dict[str, Any] = {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/plain")
        dmp.load_state_dict(state["model"])
        dmp.fused_optimizer.load_state_dict(state["optimizer"])
    else:
        CheckpointManager(Path(folder) / "ours", 1, {}).restore(5, dmp, dmp.fused_optimizer)
    train(case, dmp, world, range(5, 10))
    return gathered(dmp.state_dict()) | gathered_states(dmp, world)


def _assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "name", ["mixed", "replayed", pytest.param("rows", marks=pytest.mark.slow), pytest.param("columns", marks=pytest.mark.slow)]
)
def test_resuming_equals_not_stopping(spawn_ranks: SpawnRanks, tmp_path: Path, name: str) -> None:
    """Through our checkpoints and through torch's own, which pickle what they save."""
    expected = spawn_ranks(_save, 2, args=(str(tmp_path), PLANS[name]))[0]
    assert int(expected["a.num_steps"]) == 10
    for is_plain in (False, True):
        _assert_equal(spawn_ranks(_load, 2, args=(str(tmp_path), PLANS[name], is_plain))[0], expected)


def _go_back(world: World, folder: str, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trains 5 steps, saves, trains 5 more, goes back in place, and trains those again."""
    dmp = shard(case, world)
    train(case, dmp, world, range(5))
    manager = CheckpointManager(Path(folder) / "ours", 1, {})
    manager.save(TrainState(step=5), dmp, dmp.fused_optimizer)
    train(case, dmp, world, range(5, 10))
    first = gathered(dmp.state_dict()) | gathered_states(dmp, world)
    manager.restore(5, dmp, dmp.fused_optimizer)
    train(case, dmp, world, range(5, 10))
    return first, gathered(dmp.state_dict()) | gathered_states(dmp, world)


@pytest.mark.parametrize("name", ["replayed", pytest.param("mixed", marks=pytest.mark.slow)])
def test_going_back_in_place_equals_the_first_time(spawn_ranks: SpawnRanks, tmp_path: Path, name: str) -> None:
    """Rows that replay their L2 know their step: after going back it is an earlier one."""
    for first, again in spawn_ranks(_go_back, 2, args=(str(tmp_path), PLANS[name])):
        assert first.keys() == again.keys()
        assert all(torch.equal(again[key], value) for key, value in first.items())


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize(("first", "second"), [("rows", "columns"), ("columns", "rows")])
def test_another_plan_on_other_ranks_reads_the_state(
    spawn_ranks: SpawnRanks, tmp_path: Path, saved_by: int, loaded_by: int, first: str, second: str
) -> None:
    """Otherwise moments would be lost, or lie on the wrong rows. Batches depend on ranks here, so only the state is compared."""
    spawn_ranks(_save, saved_by, args=(str(tmp_path), PLANS[first]))
    expected = spawn_ranks(_state, 1, args=(str(tmp_path), PLANS[first]))[0]
    _assert_equal(spawn_ranks(_state, loaded_by, args=(str(tmp_path), PLANS[second]))[0], expected)


def _state(world: World, folder: str, case: Case) -> dict[str, torch.Tensor]:
    dmp = shard(case, world, seed=99)
    CheckpointManager(Path(folder) / "ours", 1, {}).restore(5, dmp, dmp.fused_optimizer)
    return gathered(dmp.state_dict()) | gathered_states(dmp, world)


def _row_fields(world: World) -> dict[str, torch.Tensor]:
    case = Case(("cw", "rw", "tw0"), optimizer=ROW_BIAS)
    dmp = shard(case, world)
    train(case, dmp, world, range(3))
    states = gathered_states(dmp, world)
    dist.barrier()
    return states


def test_fields_of_one_element_per_row_have_a_column_per_part(spawn_ranks: SpawnRanks) -> None:
    """A table that is cut by columns counts its rows' updates in each part, alike."""
    states = spawn_ranks(_row_fields, 2)[0]
    assert states["a.step"].shape == (41, 2)
    assert states["b.step"].shape == (23, 1)
    assert torch.equal(states["a.step"][:, 0], states["a.step"][:, 1])
    assert states["a.step"].max() == 3
