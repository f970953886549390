"""KStepAdam: every fault ends in its documented behaviour, on all ranks, within the deadline.

Layer: multiprocess.
"""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import row_wise
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.multiprocess.dying import die_at_exchange
from tests.multiprocess.kstep_cases import BATCH, ROWS, SPEC, Trained, batch, die, env_of, outcome_of
from tests.spawn import RanksFailed, SpawnRanks
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

BOUND_S = 60.0  # far above the deadlines of these tests, far below "for ever"


def _uneven(world: World) -> tuple[str, str]:
    """10 batches on rank 0 and 7 on rank 1, k = 4."""
    trained = Trained.make(env_of(1), k=4)

    def work() -> None:
        trained.train(range(10 if world.rank == 0 else 7))
        trained.optimizer.merge()

    return outcome_of(work)


def _nan_in_dense(world: World) -> tuple[str, str]:
    trained = Trained.make(env_of(1), k=3)
    trained.train(range(2))
    if world.rank == 1:
        with torch.no_grad():
            dict(trained.dmp.module.named_parameters())["mlp.0.weight"][0, :3] = float("nan")
    return outcome_of(lambda: trained.train([2]))


def _nan_in_rows(world: World) -> tuple[str, str]:
    trained = Trained.make(env_of(1), k=3)
    trained.train(range(2))
    if world.rank == 1:
        group = next(kernel.group for kernel in trained.optimizer._kernels if kernel.group.tables[0].name == "b")
        group.write(0, group.touched_rows(0)[:1], torch.full((1, 8), float("inf")))
    return outcome_of(trained.optimizer.merge)


def _different_k(world: World) -> tuple[str, str]:
    return outcome_of(lambda: Trained.make(env_of(1), k=4 + world.rank))


def _different_decay(world: World) -> tuple[str, str]:
    return outcome_of(lambda: Trained.make(env_of(1), k=4, weight_decay=0.1 * world.rank))


def _different_table_rate(world: World) -> tuple[str, str]:
    return outcome_of(lambda: Trained.make(env_of(1), k=1, spec=replace(SPEC, lr=0.1 + 0.1 * world.rank)))


def _different_layout(world: World) -> tuple[str, str]:
    return outcome_of(lambda: env_of(1 + world.rank))


def _different_model(world: World) -> tuple[str, str]:
    return outcome_of(lambda: Trained.make(env_of(1), k=4, has_batch_norm=world.rank == 0))


def _different_plan(world: World) -> tuple[str, str]:
    places = {"b": row_wise(compute_kernel="fused")} if world.rank else {}
    return outcome_of(lambda: Trained.make(env_of(1), k=4, places=places))


def _all(world: World, cases: list[Any]) -> list[tuple[tuple[str, str], float]]:
    """Runs cases one after the other: a fault must leave the process able to go on."""
    found = []
    for case in cases:
        begin = time.monotonic()
        found.append((case(world), time.monotonic() - begin))
        dist.barrier()
    return found


def test_disagreements_and_ill_replicas_are_told_on_all_ranks(spawn_ranks: SpawnRanks) -> None:
    cases = [_different_layout, _different_k, _different_decay, _different_model, _different_plan, _uneven, _nan_in_dense, _nan_in_rows]
    cases.append(_different_table_rate)
    ranks = spawn_ranks(_all, 2, args=(cases,), timeout_s=110)
    for outcomes in ranks:
        (layout, k, decay, model, plan, uneven, dense, rows, rate), seconds = zip(*outcomes, strict=True)
        assert max(seconds) < BOUND_S
        assert layout[0] == k[0] == decay[0] == model[0] == plan[0] == "LaunchError"
        assert "sharding plan is" in plan[1]
        assert "ranks per replica is 2 there and 1 on rank 0" in layout[1]
        assert "k is '5' there and '4' on rank 0" in k[1]
        assert "weight_decay is '0.1' there and '0.0' on rank 0" in decay[1]
        assert "dense parameters is" in model[1]
        assert rate[0] == "LaunchError"
        assert "rule of tables" in rate[1]
        assert "lr=0.2" in rate[1]
        assert uneven[0] == "MergeError"
        assert "step is 7 there and 8 on rank 0" in uneven[1]
        assert dense[0] == "DivergenceError"
        assert dense[1].startswith("rank 1: ")
        assert "of 128 values of dense parameter" in dense[1]
        assert "mlp.0.weight" in dense[1]
        assert rows[0] == "DivergenceError"
        assert "'b'" in rows[1]
        assert "replica 1" in rows[1]


def _throws(world: World, timeout_s: float) -> tuple[str, str, float]:
    """Rank 1 throws before the round of step 3."""
    trained = Trained.make(env_of(1, timeout_s), k=3)
    trained.train(range(2))
    if world.rank == 1:
        time.sleep(2 * timeout_s)  # as a rank that hangs, or was ended without a word
        return "", "", 0.0
    begin = time.monotonic()
    kind, text = outcome_of(lambda: trained.train([2]))
    return kind, text, time.monotonic() - begin


def test_a_rank_that_does_not_come_to_a_round_is_named(spawn_ranks: SpawnRanks) -> None:
    kind, text, seconds = spawn_ranks(_throws, 2, args=(3.0,))[0]
    assert kind == "RankFailure"
    assert "ranks [1] did not come to the merge round of rank 0" in text
    assert "step 3" in text
    assert seconds < BOUND_S


def _dies_in(world: World, phase: str) -> None:
    """Rank 1 dies in a phase of the first round; rank 0 must fail with a message that names the phase."""
    trained = Trained.make(env_of(1), k=2)
    trained.train([0])
    if world.rank == 1:
        optimizer: Any = trained.optimizer
        if phase == "dense parameters":
            optimizer._dense.merge = lambda *_: die(world)
        elif phase == "rows":
            optimizer._rows.merge = lambda *_, **__: die(world)
    trained.step(batch(1, world.rank))


@pytest.mark.parametrize("phase", ["dense parameters", "rows"])
def test_a_rank_killed_in_a_phase_ends_the_others_with_its_name(spawn_ranks: SpawnRanks, phase: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(_dies_in, 2, args=(phase,), timeout_s=80)
    assert time.monotonic() - begin < BOUND_S + 20
    text = str(failed.value)
    assert "rank 1: died with exit code 17" in text
    assert f"RankFailure: rank 0 (replica 0) lost another rank in round 0 after step 2, exchanging {phase}" in text


def _dies_late(world: World, number: int) -> None:
    """Rank 1 dies inside a bucket of a round that goes on while training does; rank 0 must not wait for it in the correction."""
    trained = Trained.make(env_of(1), k=3, merge=MergeSpec(overlap_steps=2))
    trained.train(range(2))
    if world.rank == 1:
        die_at_exchange(trained.optimizer._rows, number, "before")
    trained.train(range(2, 8))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_a_rank_killed_inside_a_late_round_ends_the_others_with_its_name(spawn_ranks: SpawnRanks, number: int) -> None:
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(_dies_late, 2, args=(number,), timeout_s=80)
    text = str(failed.value)
    assert "exit code -9" in text
    assert "RankFailure: rank 0 (replica 0) lost another rank in round " in text


def _empty_round(_world: World) -> list[Any]:
    """No step at all, then fewer steps than k, then again nothing."""
    trained = Trained.make(env_of(1), k=50)
    trained.optimizer.merge()
    trained.train(range(3))
    trained.optimizer.merge()
    trained.optimizer.merge()
    return [trained.optimizer.num_rounds, trained.bits()]


def test_empty_rounds_and_a_k_longer_than_the_run(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(_empty_round, 2)
    assert first == second
    assert first[0] == 1, "one merge at the end, none where nothing was trained"


def _no_rows(world: World) -> dict[str, Any]:
    """Two rounds in which bags are empty, on one replica and then on both; dense parameters are trained all the same."""
    empty = KeyedJaggedTensor.from_lengths_sync(
        [f"f_{name}" for name in ROWS], torch.empty(0, dtype=torch.int64), torch.zeros(BATCH * len(ROWS), dtype=torch.int64)
    )
    trained = Trained.make(env_of(1), k=2)
    for step in range(4):
        trained.step(empty if step >= 2 or world.rank else batch(step, world.rank))
        if step == 1:
            trained.optimizer.take_scalars()
    return {"bits": trained.bits(), "rounds": trained.optimizer.num_rounds, "scalars": trained.optimizer.take_scalars()}


def test_rounds_in_which_one_replica_or_none_touched_a_row(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(_no_rows, 2)
    assert first["bits"] == second["bits"]
    for rank in (first, second):
        assert rank["rounds"] == 2
        assert rank["scalars"]["union_rows"] == rank["scalars"]["buckets"] == 0
        assert rank["scalars"]["dense_drift"] > 0 or rank["scalars"]["dense_sent_bytes"] > 0
