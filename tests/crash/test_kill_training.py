"""Kills training with tables on SSD by SIGKILL, at random moments and amid snapshots; what comes out must not show it.

What breaks otherwise: a snapshot of the whole job that mixes steps, of ranks or of rows and dense parameters; one that a
kill left half and that is taken for whole; a store that grows by what nobody refers to. Losses, metrics, and every bit of
the last checkpoint are compared with those of a run that was never stopped.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.training import NUM_STEPS, Trained, TrainingJob, warm_up

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

MOMENTS = ("any", "snapshot", "publishing")


class NthTime:
    """True once `condition` holds for the n-th time."""

    def __init__(self, condition: Callable[[], bool], n: int) -> None:
        self._condition = condition
        self._num_left = n
        self._held = False

    def __call__(self) -> bool:
        holds = self._condition()
        if holds and not self._held:
            self._num_left -= 1
        self._held = holds
        return holds and self._num_left <= 0


def _moment(job: TrainingJob, kind: str, rng: random.Random, run_s: float) -> Callable[[], bool]:
    """When to kill: `any` moment of a run of `run_s`, or while a snapshot is made or a checkpoint published."""
    if kind == "any":
        end_s = time.monotonic() + rng.uniform(0.0, run_s)
        return lambda: time.monotonic() > end_s
    return NthTime(job.is_amid_snapshot if kind == "snapshot" else job.is_amid_publishing, rng.randrange(1, 8))


def _kill_many_times(folder: Path, num_ranks: int, num_kills: int, seed: int, kinds: tuple[str, ...] = MOMENTS) -> None:
    """Kills runs until `num_kills` have hit one that was running; every run is continued to its end and compared."""
    rng = random.Random(seed)
    warm_up()  # the first process waits for the server's imports, which no later run does
    begin_s = time.monotonic()
    expected = TrainingJob(folder / "whole", num_ranks).finish()
    run_s = time.monotonic() - begin_s
    assert [step for event, step in expected.numbers if event == "train"] == list(range(1, NUM_STEPS + 1))
    assert len(expected.state) > num_ranks
    num_hits, num_runs = 0, 0
    while num_hits < num_kills:
        num_runs += 1
        job = TrainingJob(folder / f"run_{num_runs}", num_ranks)
        for attempt in range(min(4, num_kills - num_hits)):
            kind = kinds[num_hits % len(kinds)]
            victims = slice(None) if rng.random() < 0.7 else slice(rng.randrange(num_ranks), num_ranks)
            begin_s = time.monotonic()
            if not job.kill_when(_moment(job, kind, rng, run_s), victims):
                if attempt == 0:  # a whole run ended first: how long that took tells the next moments better
                    run_s = min(run_s, time.monotonic() - begin_s)
                break
            num_hits += 1
        _compare(job.finish(), expected, f"seed {seed}, run {num_runs} of {num_ranks} ranks")
        _check_leftovers(job)
        assert num_runs < 8 * num_kills, "runs end before they are killed"


def _compare(actual: Trained, expected: Trained, what: str) -> None:
    assert actual.numbers.keys() == expected.numbers.keys(), what
    for key, values in expected.numbers.items():
        assert actual.numbers[key] | {"rows_per_s": 0} == values | {"rows_per_s": 0}, f"{what}: {key}"
    assert actual.state == expected.state, what


def _check_leftovers(job: TrainingJob) -> None:
    """The end of the run removed what kills had left: nothing half, and a snapshot per checkpoint in every store."""
    checkpoints = job.run_dir / "checkpoints"
    assert not job.is_amid_publishing()
    assert not job.is_amid_snapshot()
    steps = {path.name.removeprefix("step_") for path in checkpoints.glob("step_*")}
    assert 1 < len(steps) <= 3
    for store in job.folder.glob("ssd_?/*/rank-*"):
        assert {path.name.rpartition("-")[2] for path in (store / "snapshots").iterdir()} == steps, store


@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [(1, ("any",)), pytest.param(1, ("snapshot",), marks=pytest.mark.slow), pytest.param(2, ("publishing",), marks=pytest.mark.slow)],
)
def test_a_killed_run_continues_to_the_bits_of_an_unbroken_one(tmp_path: Path, num_ranks: int, kinds: tuple[str, ...]) -> None:
    _kill_many_times(tmp_path, num_ranks, len(kinds), random.randrange(1 << 30), kinds)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_many_kills_leave_no_trace(tmp_path: Path, num_ranks: int) -> None:
    _kill_many_times(tmp_path, num_ranks, 18, random.randrange(1 << 30))
