"""Layer: loop, one rank. Goal: every batch trains exactly once, and a resumed run is the unbroken run bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess.tiny import TinyDataset, assert_equal_bits, fingerprints, finish, one_rank_group, start, tiny_config
from torchrec_kstep.checkpoint import TrainState
from torchrec_kstep.errors import CheckpointError, ConfigError, DivergenceError
from torchrec_kstep.metrics.ctr import CTRReport
from torchrec_kstep.train import last_line
from torchrec_kstep.world import World

PIPELINES = ("sparse_dist", "base", "plain")


@pytest.fixture
def world() -> Iterator[World]:
    with one_rank_group() as alone:
        yield alone


def train_records(run_dir: Path) -> list[dict[str, Any]]:
    return [r for r in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if r["event"] == "train"]


@pytest.mark.parametrize("num_batches", [1, 2, 7])
def test_every_batch_is_one_step_whatever_the_look_ahead(world: World, tmp_path: Path, num_batches: int) -> None:
    results = []
    for name in PIPELINES:
        dataset = TinyDataset(num_train=32 * num_batches)
        loop, state = finish(tiny_config(train__pipeline=name, train__epochs=1), world, dataset, tmp_path / name)
        assert state.step == num_batches
        assert sorted(row for batch in dataset.rows_seen for row in batch) == list(range(32 * num_batches))
        results.append(fingerprints(loop))
    assert_equal_bits(results[0], results[1])
    assert_equal_bits(results[0], results[2])


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_epoch_has_all_its_steps_and_a_loss(world: World, tmp_path: Path, pipeline: str) -> None:
    _, state = finish(tiny_config(train__pipeline=pipeline, train__epochs=3), world, TinyDataset(num_train=150), tmp_path)
    assert (state.step, state.epoch, state.step_in_epoch) == (15, 3, 0)
    assert {record["epoch"] for record in train_records(tmp_path)} == {1.0, 2.0, 3.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"train__pipeline": "sparse_dist"},
        {"train__pipeline": "base", "planner__sharding": "row_wise"},
        {"planner__kernel": "fused", "optim__embedding": "adagrad"},
        {"planner__kernel": "fused", "optim__embedding": "rowwise_adagrad", "planner__sharding": "row_wise"},
        {"train__accumulation": 2, "optim__embedding": "adagrad", "optim__clip_norm": 0.5},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
@pytest.mark.parametrize("stop_at", [5, 8], ids=["in an epoch", "between epochs"])
def test_a_resumed_run_is_the_unbroken_run_bit_for_bit(world: World, tmp_path: Path, changes: dict[str, Any], stop_at: int) -> None:
    config = tiny_config(train__epochs=3, checkpoint__every_steps=stop_at, **changes)
    whole, whole_state = finish(config, world, TinyDataset(), tmp_path / "whole")
    broken, _ = start(config, world, TinyDataset(), tmp_path / "broken")
    save, saved = broken.checkpoints.save, []

    def save_and_die(state: TrainState, *rest: Any) -> None:
        save(state, *rest)
        saved.append(state.step)
        if state.step >= stop_at:
            raise KeyboardInterrupt

    broken.checkpoints.save = save_and_die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        broken.train(TrainState())
    broken.sinks.close()
    torch.manual_seed(999)  # whatever another process would have
    dataset = TinyDataset()
    resumed, resumed_state = finish(config, world, dataset, tmp_path / "broken")
    assert resumed_state == whole_state
    assert_equal_bits(fingerprints(resumed), fingerprints(whole))
    rates = [
        [(r["step"], r["lr"], r["loss"]) for r in train_records(tmp_path / name) if r["step"] > stop_at + 3] for name in ("whole", "broken")
    ]
    assert rates[0] == rates[1], "schedule and loss go on where they were"


def test_rows_of_an_interrupted_epoch_are_neither_repeated_nor_skipped(world: World, tmp_path: Path) -> None:
    first, second = TinyDataset(num_train=20 * 32), TinyDataset(num_train=20 * 32)
    finish(tiny_config(train__epochs=1, train__max_steps=7), world, first, tmp_path)
    finish(tiny_config(train__epochs=1), world, second, tmp_path)
    assert len(first.rows_seen) == 7
    assert sorted(row for batch in first.rows_seen + second.rows_seen for row in batch) == list(range(20 * 32))


def test_max_steps_ends_in_the_middle_of_an_epoch_and_reports(world: World, tmp_path: Path) -> None:
    _, state = finish(tiny_config(train__max_steps=5), world, TinyDataset(), tmp_path)
    assert (state.step, state.step_in_epoch) == (5, 5)
    assert train_records(tmp_path)[-1]["step"] == 5
    assert state.best_step == 5


def test_evaluation_changes_nothing_in_the_training(world: World, tmp_path: Path) -> None:
    often, _ = finish(tiny_config(train__epochs=4, train__eval_every_epochs=1), world, TinyDataset(), tmp_path / "often")
    once, _ = finish(tiny_config(train__epochs=4, train__eval_every_epochs=4), world, TinyDataset(), tmp_path / "once")
    assert_equal_bits(fingerprints(often), fingerprints(once))


def test_evaluation_counts_every_row_once_and_never_the_padding(world: World, tmp_path: Path) -> None:
    loop, _ = start(tiny_config(), world, TinyDataset(num_eval=101), tmp_path)
    assert loop.evaluate("validation", 0).num_rows == 101
    assert loop.evaluate("test", 0).num_rows == 101


def test_accumulation_gives_the_steps_of_the_whole_batch(world: World, tmp_path: Path) -> None:
    results = []
    for accumulation in (1, 2, 8):
        config = tiny_config(train__batch_size=64 // accumulation, train__accumulation=accumulation, model__dropout=0.0)
        loop, state = finish(config, world, TinyDataset(num_train=300), tmp_path / str(accumulation))
        assert state.step == 2 * 5
        results.append([parameter.detach().clone() for _, parameter in sorted(loop.dmp.named_parameters())])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def scripted(loop: Any, aucs: list[float | None]) -> None:
    """Lets validation see these AUCs in turn."""
    remaining = iter(aucs)
    real = loop.evaluate

    def evaluate(split: str, step: int) -> CTRReport:
        if split != "validation":
            return real(split, step)
        return CTRReport(next(remaining), 0.5, None, 1.0, 10, "")

    loop.evaluate = evaluate


def test_early_stop_ends_the_run_and_tests_the_best_weights(world: World, tmp_path: Path) -> None:
    config = tiny_config(train__epochs=9, train__early_stop_patience=2, checkpoint__keep=1)
    loop, state = start(config, world, TinyDataset(), tmp_path)
    scripted(loop, [0.6, 0.8, 0.7, 0.75, 0.9])
    loop.train(state)
    assert (state.epoch, state.best_auc, state.best_step) == (4, 0.8, 16)
    last = fingerprints(loop)
    loop.test(state)
    best = fingerprints(loop)
    assert best != last
    short, _ = finish(
        tiny_config(train__epochs=9, train__early_stop_patience=2, train__max_steps=16), world, TinyDataset(), tmp_path / "short"
    )
    assert short.schedule.num_total_steps != loop.schedule.num_total_steps  # so only the position can be compared
    assert loop.checkpoints.steps() == [16, 32], "the best is kept besides the newest"
    again, stopped = start(config, world, TinyDataset(), tmp_path)
    assert again.is_over(stopped), "a stopped run stays stopped"
    again.test(stopped)
    assert_equal_bits(fingerprints(again), best)


def test_an_undefined_auc_neither_stops_nor_invents_a_best(world: World, tmp_path: Path) -> None:
    loop, state = start(tiny_config(train__epochs=3, train__early_stop_patience=1), world, TinyDataset(), tmp_path)
    scripted(loop, [None, None, None])
    loop.train(state)
    assert (state.epoch, state.best_auc, state.best_step) == (3, None, None)
    assert loop.test(state).num_rows == 101


def test_divergence_names_the_step_and_the_parameters(world: World, tmp_path: Path) -> None:
    loop, state = start(tiny_config(train__epochs=5), world, TinyDataset(), tmp_path)
    name, poisoned = next(iter(loop.dmp.named_parameters()))
    real = loop.schedule.apply

    def poison(step: int) -> float:
        if step == 4:
            poisoned.data[0, 0] = float("nan")
        return real(step)

    loop.schedule.apply = poison  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match=r"the loss of step 5 is NaN or infinite \(not finite after it: ") as error:
        loop.train(state)
    assert name in str(error.value)


def test_another_data_set_model_or_batch_is_refused_with_what_differs(world: World, tmp_path: Path) -> None:
    finish(tiny_config(), world, TinyDataset(), tmp_path)
    with pytest.raises(CheckpointError, match=r"data: checkpoint 'tiny tiny-256-101-3', this run 'tiny tiny-512-101-3'"):
        start(tiny_config(), world, TinyDataset(num_train=512), tmp_path)
    with pytest.raises(CheckpointError, match=r"model.embedding_dim: checkpoint '8', this run '16'"):
        start(tiny_config(model__embedding_dim=16), world, TinyDataset(), tmp_path)
    with pytest.raises(CheckpointError, match=r"global batch .*: checkpoint 32, this run 64"):
        start(tiny_config(train__accumulation=2), world, TinyDataset(), tmp_path)
    with pytest.raises(CheckpointError, match=r"optim.embedding: checkpoint 'adam', this run 'sgd'"):
        start(tiny_config(optim__embedding="sgd"), world, TinyDataset(), tmp_path)


def test_a_longer_run_continues_a_finished_one_and_other_rates_are_allowed(world: World, tmp_path: Path) -> None:
    finish(tiny_config(train__epochs=1), world, TinyDataset(), tmp_path)
    _, state = finish(tiny_config(train__epochs=2, optim__lr=0.001), world, TinyDataset(), tmp_path)
    assert (state.epoch, state.step) == (2, 16)


def test_checkpoints_in_the_way_of_a_run_that_shall_not_resume_are_not_overwritten(world: World, tmp_path: Path) -> None:
    finish(tiny_config(train__epochs=1), world, TinyDataset(), tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint.resume=false: choose another run_dir"):
        start(tiny_config(checkpoint__resume=False), world, TinyDataset(), tmp_path)


def test_the_last_line_says_undefined_instead_of_a_number() -> None:
    assert last_line(CTRReport(0.78614, 0.5, 0.9, 1.0, 10)) == "test AUC 0.7861"
    assert last_line(CTRReport(None, 0.5, None, 1.0, 10, "all 10 rows are negative")) == "test AUC undefined: all 10 rows are negative"
