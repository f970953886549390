"""Checkpoints of tables on SSD: snapshots of row stores, referred to by the manifest; what is kept, refused and cleaned up.

Layer: multiprocess.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess.tiered_cases import Case, gathered, gathered_states, shard, train
from tests.multiprocess.tiny import (
    TinyDataset,
    assert_equal_bits,
    close_stores,
    fingerprints,
    finish,
    on_ssd,
    one_rank_group,
    row_stores,
    start,
    tiered_config,
)
from tests.spawn import SpawnRanks
from torchrec_kstep.checkpoint import CheckpointManager, TrainState, storage
from torchrec_kstep.checkpoint.manifest import MANIFEST_NAME, read_manifest
from torchrec_kstep.checkpoint.stores import SNAPSHOT_NAME
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import CheckpointError, StorageError
from torchrec_kstep.loop import Loop
from torchrec_kstep.sharding.tiered import tier_scalars
from torchrec_kstep.sharding.tiered.state import kernels_of_model
from torchrec_kstep.storage.snapshot import Snapshot
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.train import build_loop, resume
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def world() -> Iterator[World]:
    with one_rank_group() as world:
        yield world


def config_on(folder: Path, **changes: Any) -> RunConfig:
    """8 steps an epoch, 2 epochs, a checkpoint every 3 steps."""
    return on_ssd(tiered_config(**{"checkpoint__every_steps": 3, **changes}), folder / "ssd")


def run(config: RunConfig, world: World, run_dir: Path) -> tuple[Loop, TrainState]:
    """Trains to the end and gives the stores back."""
    loop, state = finish(config, world, TinyDataset(), run_dir)
    close_stores(loop)
    return loop, state


def assert_refused(config: RunConfig, world: World, run_dir: Path, match: str) -> None:
    """A start from `run_dir` is refused; the stores are given back as at the end of a process."""
    loop = build_loop(config, world, TinyDataset(), run_dir)
    with pytest.raises(CheckpointError, match=match):
        resume(loop, run_dir)
    close_stores(loop)


def snapshots(loop: Loop) -> list[set[int]]:
    """Steps of the snapshots that each store of this rank holds for checkpoints."""
    return [{int(match.group(2)) for match in map(SNAPSHOT_NAME.fullmatch, store.snapshots()) if match} for store in row_stores(loop)]


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:010d}"


def test_the_manifest_refers_to_snapshots_and_says_what_they_hold(tmp_path: Path, world: World) -> None:
    """Otherwise a checkpoint would cost all bytes of its tables, or could not be read by other ranks later."""
    loop, state = finish(config_on(tmp_path), world, TinyDataset(), tmp_path / "run")
    manifest = read_manifest(folder_of(tmp_path / "run", state.step))
    assert not [name for name in manifest.tensors if "embedding_bags" in name and not name.endswith("num_steps")]
    parts = {part.weight: (reference, part) for reference in manifest.stores for part in reference.parts}
    weights = {f"model.{name}": value for name, value in loop.dmp.state_dict().items() if "embedding_bags" in name}
    assert parts.keys() == weights.keys()
    for name, (reference, part) in parts.items():
        assert part.size == tuple(weights[name].size())
        assert (part.first_row, part.num_rows, part.first_column, part.num_columns) == (0, part.size[0], 0, part.size[1])
        assert [(field.name, field.dtype, field.width) for field in part.fields] == [(n, "f32", part.size[1]) for n in ("weight", "m", "v")]
        stored = Snapshot.open([tmp_path / "ssd" / reference.folder], reference.snapshot).read(part.table, torch.arange(part.num_rows))
        assert torch.equal(stored["weight"], weights[name].local_shards()[0].tensor.clone())
    assert {reference.rank for reference in manifest.stores} == {0}


def test_snapshots_live_as_long_as_their_checkpoints(tmp_path: Path, world: World) -> None:
    """The newest and the best are kept in the stores too, and nothing else."""
    loop, _ = start(config_on(tmp_path), world, TinyDataset(), tmp_path / "run")
    for step in range(1, 6):
        loop.checkpoints.save(TrainState(step=step, best_step=min(step, 2)), loop.dmp, loop.optimizer)
        assert all(found == set(loop.checkpoints.steps()) for found in snapshots(loop))
    assert loop.checkpoints.steps() == [2, 4, 5]
    with pytest.raises(CheckpointError, match="exists already"):
        loop.checkpoints.save(TrainState(step=5), loop.dmp, loop.optimizer)
    assert all(found == {2, 4, 5} for found in snapshots(loop))


def test_snapshots_that_are_none_of_ours_stay(tmp_path: Path, world: World) -> None:
    """A user's own snapshot must not go with a checkpoint."""
    loop, _ = start(config_on(tmp_path, checkpoint__keep=1), world, TinyDataset(), tmp_path / "run")
    for store in row_stores(loop):
        store.snapshot("mine")
    for step in (1, 2):
        loop.checkpoints.save(TrainState(step=step), loop.dmp, loop.optimizer)
    assert all(len(store.snapshots()) == 2 and "mine" in store.snapshots() for store in row_stores(loop))


@pytest.mark.parametrize("when", ["before", "after"])
def test_leftovers_of_an_interrupted_save_are_never_taken_and_go_away(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Interrupted between the snapshots and the rename of the checkpoint, or between that and the removal of old ones."""
    config, run_dir = config_on(tmp_path, checkpoint__keep=1), tmp_path / "run"
    loop, _ = start(config, world, TinyDataset(), run_dir)
    loop.checkpoints.save(TrainState(step=3, step_in_epoch=3), loop.dmp, loop.optimizer)

    def die(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(*((storage, "write_text") if when == "before" else (TieredTables, "remove_snapshot")), die)
        with pytest.raises(CheckpointError, match="power cut"):
            loop.checkpoints.save(TrainState(step=6, step_in_epoch=6), loop.dmp, loop.optimizer)
    assert all(found == {3, 6} for found in snapshots(loop))
    close_stores(loop)
    again, state = start(config, world, TinyDataset(), run_dir)
    kept = 3 if when == "before" else 6
    assert state.step == kept
    assert all(found == {kept} for found in snapshots(again))
    assert not list((run_dir / "checkpoints").glob("*.tmp"))
    again.train(state)  # makes step 6 again, in the first case
    assert state.step == 16


def test_a_refused_snapshot_leaves_the_older_checkpoints(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = start(config_on(tmp_path), world, TinyDataset(), tmp_path / "run")
    loop.checkpoints.save(TrainState(step=1), loop.dmp, loop.optimizer)

    def refuse(*_: object) -> None:
        raise StorageError("the drive is full")

    with monkeypatch.context() as patch:
        patch.setattr(TieredTables, "snapshot", refuse)
        with pytest.raises(CheckpointError, match="rank 0: the drive is full"):
            loop.checkpoints.save(TrainState(step=2), loop.dmp, loop.optimizer)
    assert loop.checkpoints.steps() == [1]
    before = fingerprints(loop)
    loop.checkpoints.restore(1, loop.dmp, loop.optimizer)
    assert_equal_bits(fingerprints(loop), before)


def test_restoring_in_place_takes_back_what_came_after(tmp_path: Path, world: World) -> None:
    """As the final test does, which reads the best checkpoint into the model that trained on."""
    loop, state = start(config_on(tmp_path, checkpoint__keep=9), world, TinyDataset(), tmp_path / "run")
    kept = []
    save = loop.checkpoints.save

    def note(*args: Any) -> None:
        save(*args)
        kept.append((state.step, fingerprints(loop)))

    loop.checkpoints.save = note  # type: ignore[method-assign]
    loop.train(state)
    assert len(kept) > 4
    for step, expected in kept[::-1]:
        loop.checkpoints.restore(step, loop.dmp, loop.optimizer)
        assert_equal_bits(fingerprints(loop), expected)
    state.best_step = kept[0][0]
    loop.test(state)
    assert_equal_bits(fingerprints(loop), kept[0][1])


def test_another_place_or_another_run_in_it_is_refused_by_name(tmp_path: Path, world: World) -> None:
    """Rows of another run, or none at all, must never be taken for those of the checkpoint."""
    config, run_dir = config_on(tmp_path, train__max_steps=3), tmp_path / "run"
    run(config, world, run_dir)
    with pytest.raises(
        CheckpointError, match=rf"needs snapshot 'checkpoint-\w+-0000000003' of the row store at {tmp_path}/moved.*has none"
    ):
        start(on_ssd(config, tmp_path / "moved"), world, TinyDataset(), run_dir)
    assert_refused(config, world, tmp_path / "other", rf"{tmp_path}/ssd.*holds checkpoints of another run: step 3 of {run_dir}/checkpoints")
    loop, state = start(config, world, TinyDataset(), run_dir)
    assert state.step == 3
    close_stores(loop)


def test_a_copied_run_directory_may_not_use_the_stores_of_the_original(tmp_path: Path, world: World) -> None:
    """Both have one identity, so each would delete the snapshots that the other relies on. A moved one goes on."""
    config, run_dir = config_on(tmp_path, train__max_steps=3), tmp_path / "run"
    run(config, world, run_dir)
    shutil.copytree(run_dir, tmp_path / "copy")
    assert_refused(
        config, world, tmp_path / "copy", rf"belongs to the checkpoints in {run_dir}/checkpoints, of which .*/copy/checkpoints is a copy"
    )
    (tmp_path / "copy").rename(tmp_path / "kept")
    shutil.rmtree(run_dir)
    loop, state = start(config, world, TinyDataset(), tmp_path / "kept")
    assert state.step == 3
    close_stores(loop)


@pytest.mark.parametrize("other", ["dram", "table_wise"])
def test_other_tiers_or_shards_are_refused_with_what_differs(tmp_path: Path, world: World, other: str) -> None:
    config, run_dir = config_on(tmp_path, train__max_steps=3), tmp_path / "run"
    run(config, world, run_dir)
    changed = tiered_config() if other == "dram" else replace(config, planner=replace(config.planner, sharding=other))
    assert_refused(changed, world, run_dir, r"(?s)checkpoint has model\.\S+user\.weight, rows 0 to 23, .*checkpoint\.tables=full")


def test_a_changed_snapshot_is_refused_and_a_damaged_one_named(tmp_path: Path, world: World) -> None:
    config, run_dir = config_on(tmp_path, train__max_steps=3), tmp_path / "run"
    run(config, world, run_dir)
    path = folder_of(run_dir, 3) / MANIFEST_NAME
    text = path.read_text()
    body = json.loads(text)
    body.pop("sha256")
    body["stores"][0]["manifest_sha256"] = "0" * 64
    from torchrec_kstep.checkpoint.manifest import _digest

    path.write_text(json.dumps({**body, "sha256": _digest(body)}))
    assert_refused(config, world, run_dir, r"MANIFEST does not match its checksum: expected sha256 0{16}\.\.\., got")
    body["stores"][0]["snapshot"] = "../../elsewhere"
    path.write_text(json.dumps({**body, "sha256": _digest(body)}))
    assert_refused(config, world, run_dir, r"refers to the snapshot '\.\./\.\./elsewhere'")
    path.write_text(text)
    for segment in sorted((tmp_path / "ssd").rglob("snapshots/*/log-*/*.seg")):
        content = bytearray(segment.read_bytes())
        content[-40] ^= 1  # in the trailer, which every opening reads
        segment.write_bytes(content)
    assert_refused(config, world, run_dir, r"seg-\w+\.seg")


def _on_two(world: World, folder: str) -> dict[str, torch.Tensor]:
    """One checkpoint by snapshots, then one of whole tables; what the second holds, put together."""
    run_dir = Path(folder) / "run"
    config = config_on(Path(folder), train__batch_size=16, train__max_steps=3)
    loop, state = finish(config, world, TinyDataset(), run_dir)
    assert {reference.rank for reference in read_manifest(folder_of(run_dir, 3)).stores} == {0, 1}
    close_stores(loop)
    dist.barrier()
    whole = replace(config, train=replace(config.train, max_steps=6), checkpoint=replace(config.checkpoint, tables="full"))
    loop, state = finish(whole, world, TinyDataset(), run_dir)
    assert state.step == 6
    assert read_manifest(folder_of(run_dir, 6)).stores == ()
    tables = gathered(loop.dmp.state_dict())
    close_stores(loop)
    return tables


def test_another_number_of_ranks_is_refused_and_reads_whole_tables(spawn_ranks: SpawnRanks, tmp_path: Path) -> None:
    """The way that the message shows is walked: 2 ranks with tables on SSD, then whole tables, then 1 rank in DRAM."""
    expected = spawn_ranks(_on_two, 2, args=(str(tmp_path),))[0]
    config = tiered_config(train__max_steps=6)
    with one_rank_group() as world:
        loop, state = start(config, world, TinyDataset(), tmp_path / "run")
        assert state.step == 6
        actual = gathered(loop.dmp.state_dict())
        assert all(torch.equal(actual[name], table) for name, table in expected.items())
        with pytest.raises(CheckpointError, match=r"saved by 2 ranks.*this run has 1: continue with the ranks.*checkpoint\.tables=full"):
            loop.checkpoints.restore(3, loop.dmp, loop.optimizer)


def _columns_on_ssd(world: World, folder: str) -> None:
    """Trains a table with several column shards on one rank, on SSD and in DRAM."""
    case = Case(("cw_same", "cw", "rw"))
    dram = shard(case, world)
    tiers = TierConfig("4KiB", [Path(folder) / "ssd"], ssd_bytes="8MiB", segment_bytes="64KiB")
    ssd = shard(case, world, tiers=tiers)
    for steps in (range(3), range(3, 6)):
        for dmp in (dram, ssd):
            train(case, dmp, world, steps)
        _assert_equal_states(ssd, dram, world)
        if steps.start == 0:
            manager = CheckpointManager(Path(folder) / "checkpoints", 1, {})
            manager.save(TrainState(step=3), ssd, ssd.fused_optimizer)
    own = read_manifest(Path(folder) / "checkpoints" / "step_0000000003").stores
    parts = [part for reference in own for part in reference.parts if part.weight.endswith(".a.weight")]
    assert sorted((part.table, part.first_column, part.num_columns) for part in parts) == [("a[0:4]", 0, 4), ("a[4:8]", 4, 4)]
    counters, by_shard = tier_scalars(ssd), [kernel.group.counters() for kernel in kernels_of_model(ssd)]
    for name in ("hits_rows", "misses_rows", "first_touches_rows"):
        of_a = sum(shards.get(shard, {}).get(name, 0) for shards in by_shard for shard in ("a[0:4]", "a[4:8]"))
        assert counters.get(f"{name}.a", 0) == of_a
    assert ("first_touches_rows.a" in counters) == (world.rank == world.world_size - 1)
    assert not any("[" in name for name in counters)
    found = manager.resume(ssd, ssd.fused_optimizer)
    assert found is not None
    train(case, ssd, world, range(3, 6))
    _assert_equal_states(ssd, dram, world)


def _assert_equal_states(actual: Any, expected: Any, world: World) -> None:
    for ours, theirs in (
        (gathered(actual.state_dict()), gathered(expected.state_dict())),
        (gathered_states(actual, world), gathered_states(expected, world)),
    ):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_column_shards_of_a_table_share_a_store(spawn_ranks: SpawnRanks, tmp_path: Path, num_ranks: int) -> None:
    """They have names of their own in the store and the checkpoint, and count as one table in what users see."""
    spawn_ranks(_columns_on_ssd, num_ranks, args=(str(tmp_path),))
