"""A replica killed at any point of a round: the others are told within the deadline, where; and what was saved is intact.

Layer: multiprocess.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.merging import dram_group, random_steps
from tests.multiprocess.dying import Watched, die_at_exchange, die_in_apply, kill_self
from tests.multiprocess.test_kstep_train import kstep_config
from tests.multiprocess.test_row_merge import transport
from tests.multiprocess.tiny import TinyDataset, assert_equal_bits, fingerprints, finish, start
from tests.spawn import RanksFailed, SpawnRanks
from torchrec_kstep.errors import KStepError, MergeError
from torchrec_kstep.merge.in_process import run_in_lockstep
from torchrec_kstep.merge.replica import ReplicaRows
from torchrec_kstep.merge.rows import RowMerger
from torchrec_kstep.merge.transport import Exchange
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

K = 3
IN_BUCKETS = MergeSpec(k=K, bucket_bytes=1 << 16)
ROUND_TIMEOUT_S = 8.0  # in `train`
DEADLINE_S, BOUND_S = 10.0, 9.0  # a socket that closes is told at once: nobody waits for the deadline


def phases_of_a_round() -> list[str]:
    """What two replicas exchange in the round that the tests break, in order; several buckets, the middle of which a death may hit."""
    groups = [dram_group() for _ in range(2)]
    rows = [ReplicaRows([group], IN_BUCKETS, index, 2) for index, group in enumerate(groups)]
    for replica, group in enumerate(groups):
        random_steps(group, replica, 1, K)
    seen: list[str] = []

    def watched(own: ReplicaRows, keeps: bool) -> Any:
        rounds = own.merge(0, K)
        request = next(rounds)
        while True:
            if keeps and isinstance(request, Exchange):
                seen.append(request.phase)
            answer = yield request
            try:
                request = rounds.send(answer)
            except StopIteration as end:
                return end.value

    run_in_lockstep([watched(own, index == 0) for index, own in enumerate(rows)])
    return seen


PHASES = phases_of_a_round()
POINTS = [("before", number) for number in range(len(PHASES))] + [("after", len(PHASES) - 1)]
PIECES = [("apply", number) for number in range(4)]
# In the fast lane: with two buckets on their way.
FAST = {("before", 5)}


def lanes(cases: list[tuple[str, int]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow, id=f"{case[0]}-{case[1]}") for case in cases]


def killed(world: World, when: str, number: int) -> None:
    """Rank 1 dies; rank 0 says by which of two rounds it was told, and how long that took."""
    group = dram_group()
    merger = RowMerger([group], IN_BUCKETS, transport(timeout_s=DEADLINE_S))
    if world.rank == 1:
        if when == "apply":
            die_in_apply(number)
        else:
            die_at_exchange(merger, number, when)
    begin_s = time.monotonic()
    for round_index in range(2):
        random_steps(group, world.rank, 1 + round_index * K, K)
        begin_s = time.monotonic()
        try:
            merger.merge(round_index, K)
        except MergeError as error:
            raise RuntimeError(f"told in round {round_index}, in time: {time.monotonic() - begin_s < BOUND_S}") from error


def test_a_round_has_several_buckets() -> None:
    assert len(PHASES) >= 10
    assert PHASES[0].startswith("opening of weight, m, v")


@pytest.mark.parametrize(("when", "number"), lanes(POINTS + PIECES))
def test_a_replica_killed_anywhere_in_a_round_is_told_at_once(spawn_ranks: SpawnRanks, when: str, number: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        spawn_ranks(killed, 2, args=(when, number), timeout_s=60)
    text = str(caught.value)
    assert "exit code -9" in text
    assert "in time: True" in text
    assert "MergeError: merge round, " in text
    if (when, number) not in (("after", len(PHASES) - 1), *PIECES[-1:]):
        assert "told in round 0" in text, "the others went on without a replica"


def throws_in_the_middle(world: World) -> str:
    """One replica raises between opening and rows, e.g. out of memory; it lives on, but does not come to the exchange."""
    group = dram_group()
    merger = RowMerger([group], IN_BUCKETS, transport(timeout_s=3.0))
    random_steps(group, world.rank, 1, K)

    def fail(number: int, _phase: str) -> None:
        if number == 2:
            raise MemoryError("no memory for a bucket")

    if world.rank == 1:
        merger._transport = Watched(merger._transport, fail, lambda _number, _phase: None)  # type: ignore[arg-type]
    begin_s = time.monotonic()
    try:
        merger.merge(0, K)
    except (MergeError, MemoryError) as error:
        assert time.monotonic() - begin_s < 20
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_replica_that_raises_inside_a_bucket_is_missed_within_the_deadline(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(throws_in_the_middle, 2)
    assert second == "MemoryError: no memory for a bucket"
    assert first.startswith(f"MergeError: merge round, {PHASES[2]}: replica 0 of 2")


# ---- what was saved ----------------------------------------------------------------------------------------------------


def _train_and_die(world: World, folder: str, point: str, number: int) -> None:
    """Saves after step 3 and 6 with k = 4, and has rank 1 die in the round after step 7, or the one before the save of step 6."""
    config = kstep_config(checkpoint__every_steps=3, kstep__timeout_s=ROUND_TIMEOUT_S)
    loop, state = start(config, world, TinyDataset(), Path(folder))
    optimizer: Any = loop.replicas
    if world.rank == 1:
        rounds = [0]
        merge, agree, dense = optimizer._rows.merge, optimizer._agree, optimizer._dense.merge

        def counted(*arguments: Any, **options: Any) -> Any:
            rounds[0] += 1
            if rounds[0] == 3 and point in ("before", "after"):
                die_at_exchange(optimizer._rows, number, point)
            if rounds[0] == 3 and point == "apply":
                die_in_apply(number)
            return merge(*arguments, **options)

        def gone(name: str, call: Any) -> Any:
            def maybe(*arguments: Any, **options: Any) -> Any:
                if point == name and rounds[0] == 2:
                    # No socket tells of a rank that does not come to an agreement: the other is to be told by its deadline.
                    time.sleep(ROUND_TIMEOUT_S + 2 if name == "agreement" else 0)
                    kill_self()
                return call(*arguments, **options)

            return maybe

        optimizer._rows.merge = counted
        optimizer._agree, optimizer._dense.merge = gone("agreement", agree), gone("dense", dense)
    try:
        loop.train(state)
    except KStepError as error:
        raise RuntimeError("told") from error


def _resume(world: World, folder: str) -> None:
    config = kstep_config(checkpoint__every_steps=3, kstep__timeout_s=ROUND_TIMEOUT_S)
    loop, state = start(config, world, TinyDataset(), Path(folder) / "killed")
    assert state.step in (3, 6), "no checkpoint"
    loop.train(state)
    loop.sinks.close()
    unbroken, _ = finish(config, world, TinyDataset(), Path(folder) / "unbroken")
    assert_equal_bits(fingerprints(loop), fingerprints(unbroken))


SAVED = [("before", 2), ("before", 0), ("before", 1), ("before", 3), ("before", 4), ("after", 4), ("apply", 0)]
SAVED += [("agreement", 0), ("dense", 0)]


@pytest.mark.parametrize(("point", "number"), [pytest.param(*case, marks=pytest.mark.slow if case != SAVED[0] else ()) for case in SAVED])
def test_a_job_that_lost_a_rank_in_a_round_resumes_to_the_bits_of_one_that_did_not(
    spawn_ranks: SpawnRanks, tmp_path: Path, point: str, number: int
) -> None:
    with pytest.raises(RanksFailed) as caught:
        spawn_ranks(_train_and_die, 2, args=(str(tmp_path / "killed"), point, number), timeout_s=60)
    assert "exit code -9" in str(caught.value)
    assert "rank 0: raised" in str(caught.value), "the other rank did not end"
    if point not in ("after", "apply"):  # there the round may be over for the other, which then misses the rank elsewhere
        assert "RankFailure" in str(caught.value)
    spawn_ranks(_resume, 2, args=(str(tmp_path),), timeout_s=110)
