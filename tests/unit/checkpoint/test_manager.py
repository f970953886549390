"""Layer: checkpoint, one rank. Goal: only complete, undamaged, fitting checkpoints are ever loaded, and the last good one stays."""

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.multiprocess.tiny import TinyDataset, assert_equal_bits, fingerprints, one_rank_group, start, tiny_config
from torchrec_kstep.checkpoint import CheckpointManager, TrainState, storage
from torchrec_kstep.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from torchrec_kstep.checkpoint.state import flatten, random_state, seed_rank, set_random_state
from torchrec_kstep.errors import CheckpointError, DamagedCheckpointError
from torchrec_kstep.loop import Loop


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """A trained loop, and one process group, for all tests of this file."""
    with one_rank_group() as world:
        loop, state = start(tiny_config(train__max_steps=2), world, TinyDataset(), tmp_path_factory.mktemp("run"))
        loop.train(state)
        yield loop


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoints", keep=2, contract={"data": "A"})


def save(manager: CheckpointManager, loop: Loop, step: int, best_step: int | None = None) -> None:
    manager.save(TrainState(step=step, epoch=1, best_step=best_step), loop.dmp, loop.optimizer)


def folder_of(manager: CheckpointManager, step: int) -> Path:
    return manager._folder / f"step_{step:010d}"


def test_restoring_brings_back_every_bit_and_the_random_streams(manager: CheckpointManager, loop: Loop) -> None:
    before, state = fingerprints(loop), TrainState(5, 1, 3, 0.75, 4, 1)
    manager.save(state, loop.dmp, loop.optimizer)
    draws = [random.random(), np.random.rand(), np.random.randn(), float(torch.rand(()))]
    with torch.no_grad():
        for parameter in loop.dmp.parameters():
            parameter.add_(1)
    assert fingerprints(loop) != before
    assert manager.restore(5, loop.dmp, loop.optimizer) == (state, True)
    assert_equal_bits(fingerprints(loop), before)
    assert [random.random(), np.random.rand(), np.random.randn(), float(torch.rand(()))] == draws


def test_there_is_no_pickle_on_disk(manager: CheckpointManager, loop: Loop) -> None:
    save(manager, loop, 1)
    files = sorted(path.name for path in folder_of(manager, 1).iterdir())
    assert files == [MANIFEST_NAME, "rank_0000.safetensors"]
    content = (folder_of(manager, 1) / "rank_0000.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    json.loads(content[8 : 8 + header_bytes])
    assert b"torch._utils" not in content
    assert b"PK\x03\x04" not in content


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
@pytest.mark.parametrize("name", ["rank_0000.safetensors", MANIFEST_NAME])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_file(manager: CheckpointManager, loop: Loop, name: str, harm: str) -> None:
    save(manager, loop, 1)
    path = folder_of(manager, 1) / name
    content = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[: len(content) // 2] if harm == "cut" else content)
    before = fingerprints(loop)
    with pytest.raises(CheckpointError, match=name):
        manager.restore(1, loop.dmp, loop.optimizer)
    assert_equal_bits(fingerprints(loop), before)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest and signs it again, as an attacker would."""
    body = json.loads(path.read_text())
    body.pop("sha256")
    change(body)
    from torchrec_kstep.checkpoint.manifest import _digest

    path.write_text(json.dumps({**body, "sha256": _digest(body)}))


def test_a_manifest_cannot_lead_out_of_its_folder(manager: CheckpointManager, loop: Loop) -> None:
    save(manager, loop, 1)

    def escape(body: dict[str, Any]) -> None:
        body["files"]["../../secret.safetensors"] = body["files"].pop("rank_0000.safetensors")

    rewrite(folder_of(manager, 1) / MANIFEST_NAME, escape)
    with pytest.raises(CheckpointError, match=r"names the file '../../secret.safetensors'"):
        manager.restore(1, loop.dmp, loop.optimizer)


def test_a_manifest_of_another_version_or_kind_is_refused_by_name(manager: CheckpointManager, loop: Loop) -> None:
    save(manager, loop, 1)
    path = folder_of(manager, 1) / MANIFEST_NAME
    rewrite(path, lambda body: body.update(version=99))
    with pytest.raises(CheckpointError, match=r"has version 99, this release reads version 1"):
        manager.restore(1, loop.dmp, loop.optimizer)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="is no checkpoint manifest"):
        manager.restore(1, loop.dmp, loop.optimizer)


def test_a_manifest_survives_its_text() -> None:
    manifest = Manifest(3, {"step": 3}, {"data": "A", "n": 1, "b": True}, 2, {}, {"o.x": ("rank_0000.safetensors", "o.x")}, {})
    text = manifest.dumps()
    assert json.loads(text)["version"] == 1


def test_leftovers_of_an_interrupted_save_are_never_taken_and_go_away(
    manager: CheckpointManager, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(manager, loop, 1)

    def die(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_text", die)
        with pytest.raises(CheckpointError, match=r"save failed on rank 0: OSError: power cut"):
            save(manager, loop, 2)
    assert (manager._folder / "step_0000000002.tmp" / "rank_0000.safetensors").exists()
    (manager._folder / "step_0000000007").mkdir()  # a copy that somebody began by hand
    (manager._folder / "notes.txt").write_text("mine")
    assert manager.steps() == [1]
    assert manager.newest() == 1
    save(manager, loop, 3)
    assert manager.steps() == [1, 3]
    assert sorted(os.listdir(manager._folder)) == ["notes.txt", "step_0000000001", "step_0000000003", "step_0000000007"]


def test_the_newest_and_the_best_are_kept(manager: CheckpointManager, loop: Loop) -> None:
    for step in range(1, 6):
        save(manager, loop, step, best_step=min(step, 2))
    assert manager.steps() == [2, 4, 5]


def test_a_failed_save_leaves_the_older_ones(manager: CheckpointManager, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(manager, loop, step)
    monkeypatch.setattr(storage, "write_safetensors", lambda *_: (_ for _ in ()).throw(CheckpointError("disk full")))
    with pytest.raises(CheckpointError, match="save failed on rank 0: disk full"):
        save(manager, loop, 3)
    assert manager.steps() == [1, 2]
    monkeypatch.undo()
    manager.restore(2, loop.dmp, loop.optimizer)


def test_a_published_checkpoint_is_never_overwritten(manager: CheckpointManager, loop: Loop) -> None:
    save(manager, loop, 1)
    with pytest.raises(CheckpointError, match="exists already"):
        save(manager, loop, 1)


def test_a_folder_without_a_manifest_is_set_aside_and_its_step_saved_again(manager: CheckpointManager, loop: Loop) -> None:
    """A lost manifest must not stand in the way of the step when the run gets there again."""
    for step in (1, 2):
        save(manager, loop, step)
    (folder_of(manager, 2) / MANIFEST_NAME).unlink()
    found = manager.resume(loop.dmp, loop.optimizer)
    assert found is not None
    assert found.state.step == 1
    assert found.notes[0].startswith("checkpoint of step 2 is damaged, was renamed to step_0000000002.damaged")
    save(manager, loop, 2)
    assert manager.steps() == [1, 2]


def test_a_best_checkpoint_that_is_damaged_is_told_and_sought_anew(manager: CheckpointManager, loop: Loop) -> None:
    """Otherwise the run would train to its end and then fail to load it for the test."""
    for step in (1, 2, 3):
        save(manager, loop, step, best_step=1)
    (folder_of(manager, 1) / "rank_0000.safetensors").unlink()
    found = manager.resume(loop.dmp, loop.optimizer)
    assert found is not None
    assert (found.state.step, found.state.best_step) == (3, None)
    assert re.search(r"best checkpoint so far, of step 1, cannot be loaded.*rank_0000\.safetensors is missing", found.notes[0])


def test_nothing_is_changed_where_no_checkpoint_is_whole(manager: CheckpointManager, loop: Loop) -> None:
    for step in (1, 2):
        save(manager, loop, step)
        (folder_of(manager, step) / "rank_0000.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=r"(?s)no checkpoint in .* is whole.*step 2: .* has 0 bytes, expected \d+.*step 1: "):
        manager.resume(loop.dmp, loop.optimizer)
    assert manager.steps() == [1, 2]


def test_another_contract_is_refused_with_what_differs(manager: CheckpointManager, loop: Loop) -> None:
    save(manager, loop, 1)
    other = CheckpointManager(manager._folder, 2, {"data": "B", "new": 1})
    with pytest.raises(CheckpointError, match=r"data: checkpoint 'A', this run 'B'\n  new: checkpoint has none, this run 1"):
        other.restore(1, loop.dmp, loop.optimizer)


@pytest.mark.parametrize(
    "change", [{"model__mlp": [16, 4]}, {"model__name": "dlrm"}, {"optim__embedding": "sgd"}, {"optim__dense": "adagrad"}]
)
def test_another_model_or_optimizer_is_refused_with_the_tensors_that_differ(
    manager: CheckpointManager, loop: Loop, tmp_path: Path, change: dict[str, Any]
) -> None:
    save(manager, loop, 1)
    other, _ = start(tiny_config(**change), loop.world, TinyDataset(), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"holds another model or optimizer; \d+ of \d+ entries differ"):
        manager.restore(1, other.dmp, other.optimizer)


def test_every_tensor_of_model_and_optimizer_is_in_the_manifest(manager: CheckpointManager, loop: Loop) -> None:
    save(manager, loop, 1)
    manifest = read_manifest(folder_of(manager, 1))
    names = {name for name in manifest.tensors if not name.startswith("random.")}
    assert names == {*flatten("model", loop.dmp.state_dict()), *flatten("optimizer", loop.optimizer.state_dict())}
    assert any(name.endswith("exp_avg_sq") and "embedding_bags" in name for name in names)


def test_state_that_cannot_be_saved_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"optimizer.a.b: cannot save a set"):
        flatten("optimizer", {"a": {"b": {1, 2}}})
    with pytest.raises(CheckpointError, match=r"two entries of the state are called m.a.b"):
        flatten("m", {"a.b": 1, "a": {"b": 2}})


def test_ranks_and_steps_have_random_streams_of_their_own() -> None:
    kept = random_state()
    draws = set()
    for key in [(1, 0, 0), (1, 1, 0), (2, 0, 0), (1, 0, 7)]:
        seed_rank(*key)
        draws.add((random.random(), np.random.rand(), float(torch.rand(()))))
    seed_rank(1, 0, 0)
    draws.add((random.random(), np.random.rand(), float(torch.rand(()))))
    set_random_state(kept)
    assert len(draws) == 4
