"""A run on SSD that is continued with other memory: the same plan, the same stores, the same bits. Layer: multiprocess."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.multiprocess.tiny import (
    TinyDataset,
    assert_equal_bits,
    close_stores,
    fingerprints,
    finish,
    on_ssd,
    one_rank_group,
    start,
    tiered_config,
)
from tests.spawn import SpawnRanks
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import CheckpointError, PlanError
from torchrec_kstep.planner.kept_plan import PLAN_NAME
from torchrec_kstep.train import build_loop, resume
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

BEGAN_WITH = "6KiB"  # about half of all rows, so that plans have tables of both tiers
OTHER_TIERS: list[dict[str, Any]] = [
    {"dram_bytes": "3KiB"},
    {"dram_bytes": "12KiB"},
    {"dram_bytes": "1MiB"},  # all rows
    {"dram_bytes": "0B"},
    {"prefetch_depth": 0},
    {"prefetch_depth": 4, "lookahead": 16},
]


@pytest.fixture
def world() -> Iterator[World]:
    with one_rank_group() as world:
        yield world


def began(folder: Path, engine: str, **changes: Any) -> RunConfig:
    """8 steps, a checkpoint every 3 of them."""
    config = tiered_config(checkpoint__every_steps=3, checkpoint__keep=9, train__epochs=1, train__log_every_steps=1, **changes)
    planner = replace(config.planner, sharding="auto", engine=engine)
    return on_ssd(replace(config, planner=planner), folder / "ssd", BEGAN_WITH)


def losses(run_dir: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["event"] == "train"}


def back_to_step_3(run_dir: Path) -> None:
    """Takes the later checkpoints away, as if the run had been killed before step 6."""
    for step in (6, 8):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step:010d}")


def continue_with_other_tiers(world: World, folder: Path, engine: str, **changes: Any) -> None:
    """Trains to the end, then from step 3 to the end with each of `OTHER_TIERS`, and compares every loss and every bit."""
    config, run_dir = began(folder, engine, **changes), folder / "run"
    loop, _ = finish(config, world, TinyDataset(), run_dir)
    expected, bits = losses(run_dir) if world.is_main else {}, fingerprints(loop)
    close_stores(loop)
    for other in OTHER_TIERS:
        if world.is_main:
            back_to_step_3(run_dir)
        dist.barrier()
        loop, state = start(replace(config, tiers=replace(config.tiers, **other)), world, TinyDataset(), run_dir)
        assert state.step == 3, other
        assert loop.plan_note == f"sharded as it began, by {run_dir / PLAN_NAME}"
        loop.train(state)
        loop.sinks.close()
        assert_equal_bits(fingerprints(loop), bits)
        close_stores(loop)
        if world.is_main:
            assert losses(run_dir) == expected, other
        dist.barrier()


@pytest.mark.parametrize("engine", ["topology", pytest.param("torchrec", marks=pytest.mark.slow)])
def test_a_run_continues_with_other_memory_to_the_same_bits(tmp_path: Path, world: World, engine: str) -> None:
    """A user who moves to a host with more DRAM, or less, goes on with the rows that are on the drives."""
    continue_with_other_tiers(world, tmp_path, engine)


def _on_two(world: World, folder: str, engine: str) -> None:
    continue_with_other_tiers(world, Path(folder), engine, train__batch_size=16)


@pytest.mark.parametrize("engine", ["topology", pytest.param("torchrec", marks=pytest.mark.slow)])
def test_so_do_two_ranks(spawn_ranks: SpawnRanks, tmp_path: Path, engine: str) -> None:
    spawn_ranks(_on_two, 2, args=(str(tmp_path), engine))


def test_a_new_plan_needs_whole_tables_and_the_message_says_so(tmp_path: Path, world: World) -> None:
    """The way that it shows is walked: save whole tables once, then plan anew."""
    config, run_dir = began(tmp_path, "topology"), tmp_path / "run"
    loop, _ = finish(replace(config, train=replace(config.train, max_steps=3)), world, TinyDataset(), run_dir)
    close_stores(loop)
    other = replace(config, planner=replace(config.planner, sharding="row_wise"))
    loop = build_loop(other, world, TinyDataset(), run_dir)
    assert loop.plan_note.startswith("planned anew: planner.sharding was auto, is row_wise")
    with pytest.raises(CheckpointError, match=r"(?s)lie otherwise than those of this run.*checkpoint\.tables=full"):
        resume(loop, run_dir)
    close_stores(loop)
    whole = replace(config, train=replace(config.train, max_steps=6), checkpoint=replace(config.checkpoint, tables="full"))
    loop, _ = finish(whole, world, TinyDataset(), run_dir)
    bits = {name.rpartition("@")[0]: value for name, value in fingerprints(loop).items()}
    close_stores(loop)
    loop, state = start(other, world, TinyDataset(), run_dir)
    assert state.step == 6
    assert_equal_bits({name.rpartition("@")[0]: value for name, value in fingerprints(loop).items()}, bits)
    close_stores(loop)
    loop, state = start(replace(other, planner=replace(other.planner, renew=True)), world, TinyDataset(), run_dir)
    assert (state.step, loop.plan_note) == (6, "")
    close_stores(loop)


def test_a_damaged_plan_is_named_with_what_to_do(tmp_path: Path, world: World) -> None:
    config, run_dir = began(tmp_path, "topology"), tmp_path / "run"
    loop, _ = finish(replace(config, train=replace(config.train, max_steps=3)), world, TinyDataset(), run_dir)
    close_stores(loop)
    text = (run_dir / PLAN_NAME).read_text()
    (run_dir / PLAN_NAME).write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match=rf"{PLAN_NAME} cannot be read as a plan.*planner\.renew=true"):
        build_loop(config, world, TinyDataset(), run_dir)
    (run_dir / PLAN_NAME).write_text(text)
    loop, state = start(config, world, TinyDataset(), run_dir)
    assert state.step == 3
    close_stores(loop)
