"""Damage to the files of checkpoints of tables on SSD: found before anything is changed, named, and the newest good one is continued.

Layer: multiprocess.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.multiprocess.tiny import (
    TinyDataset,
    assert_equal_bits,
    close_stores,
    fingerprints,
    on_ssd,
    one_rank_group,
    start,
    tiered_config,
)
from torchrec_kstep.checkpoint import TrainState
from torchrec_kstep.checkpoint.manager import Resumed
from torchrec_kstep.checkpoint.manifest import MANIFEST_NAME
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import CorruptionError, DamagedCheckpointError, StorageError
from torchrec_kstep.loop import Loop
from torchrec_kstep.train import build_loop
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess


class Job:
    """A run with checkpoints of steps 3, 6 and 8, which can be put back as it was."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world, self._kept = folder, world, folder.with_name("kept")
        self.bits: dict[int, dict[str, bytes]] = {}
        loop, state = start(self.config, world, TinyDataset(), self.run_dir)
        save = loop.checkpoints.save

        def note(saved: TrainState, *args: Any) -> None:
            save(saved, *args)
            self.bits[saved.step] = fingerprints(loop)

        loop.checkpoints.save = note  # type: ignore[method-assign,assignment]
        loop.train(state)
        loop.sinks.close()
        close_stores(loop)
        assert sorted(self.bits) == [3, 6, 8]
        self._copy(folder, self._kept)

    @property
    def config(self) -> RunConfig:
        return on_ssd(tiered_config(checkpoint__every_steps=3, checkpoint__keep=9, train__epochs=1), self.folder / "ssd")

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def put_back(self) -> None:
        shutil.rmtree(self.folder)
        self._copy(self._kept, self.folder)

    def files(self, step: int) -> list[Path]:
        """What the checkpoint of `step` consists of."""
        own = sorted((self.run_dir / "checkpoints" / f"step_{step:010d}").iterdir())
        snapshots = (self.folder / "ssd").glob(f"*/rank-0/snapshots/checkpoint-*-{step:010d}")
        return own + sorted(path for folder in snapshots for path in folder.rglob("*") if path.is_file())

    def hit(self, harmed: Path) -> set[int]:
        """Steps whose files have the bytes of `harmed`: snapshots share segments."""
        inode = harmed.stat().st_ino
        return {step for step in self.bits if any(path.stat().st_ino == inode for path in self.files(step))}

    def resume(self, reads_all: bool = True) -> tuple[Loop, Resumed]:
        loop = build_loop(self.config, self.world, TinyDataset(), self.run_dir)
        try:
            found = loop.checkpoints.resume(loop.dmp, loop.optimizer, reads_all)
        except BaseException:
            close_stores(loop)
            raise
        assert found is not None
        return loop, found

    def _copy(self, source: Path, target: Path) -> None:
        """Keeps links between files, as snapshots have them."""
        subprocess.run(["cp", "-a", str(source), str(target)], check=True, timeout=30)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with one_rank_group() as world:
        yield Job(tmp_path_factory.mktemp("damage") / "job", world)


def harm(path: Path, how: str, where: float) -> None:
    content = bytearray(path.read_bytes())
    position = min(int(len(content) * where), len(content) - 1)
    if how == "remove":
        path.unlink()
        return
    if how == "flip":
        content[position] ^= 1
    with path.open("r+b") as file:  # in place: other links see it too
        file.write(content)
        if how == "cut":
            file.truncate(position)


@pytest.mark.timeout(600)
@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    how=st.sampled_from(["remove", "cut", "flip"]),
    which=st.integers(0, 10**6),
    where=st.floats(0, 1, exclude_max=True),
    step=st.sampled_from([8, 8, 6]),
)
def test_the_newest_good_checkpoint_is_continued_and_damage_named(job: Job, how: str, which: int, where: float, step: int) -> None:
    """Whatever file of a checkpoint is hit: what is loaded is what was saved, bit for bit, or nothing is touched and all is told."""
    job.put_back()
    files = job.files(step)
    path = files[which % len(files)]
    hit = job.hit(path) if how != "remove" else {step}
    harm(path, how, where)
    untouched = sorted(set(job.bits) - hit)
    before = {file: file.read_bytes() for file in job.folder.rglob("MANIFEST")}
    try:
        loop, found = job.resume()
    except DamagedCheckpointError as error:
        refusal = str(error)
        found = None
    if found is None:
        assert not untouched
        assert path.name in refusal
        assert all(f"step {one}: " in refusal for one in hit)
        assert {file: file.read_bytes() for file in job.folder.rglob("MANIFEST")} == before, "nothing may be changed"
        return
    try:
        assert found.state.step in (untouched[-1] if untouched else 8, 8)
        assert_equal_bits(fingerprints(loop), job.bits[found.state.step])
        skipped = [one for one in job.bits if one > found.state.step]
        assert len(found.notes) == len(skipped)
        for one, note in zip(skipped[::-1], found.notes, strict=True):
            assert f"checkpoint of step {one} is damaged" in note
            assert path.name in note
            assert (job.run_dir / "checkpoints" / f"step_{one:010d}.damaged").is_dir()
    finally:
        close_stores(loop)


@pytest.mark.parametrize("how", ["remove", "cut", "flip"])
@pytest.mark.parametrize("kind", [MANIFEST_NAME, "rank_0000.safetensors", "MANIFEST", ".seg"])
def test_a_fault_says_what_was_expected_and_what_was_found(job: Job, kind: str, how: str) -> None:
    job.put_back()
    path = [file for file in job.files(8) if file.name.endswith(kind)][-1]  # the newest segment is in no other snapshot
    harm(path, how, 0.998 if kind == ".seg" else 0.5)  # of a segment, its trailer
    loop, found = job.resume(reads_all=False)
    close_stores(loop)
    assert found.state.step == 6
    note = found.notes[0]
    assert "checkpoint of step 8 is damaged, was renamed to step_0000000008.damaged" in note
    assert str(path) in note or path.name in note
    assert any(word in note for word in ("expected", "missing", "no JSON", "no valid trailer")), note


def test_a_run_makes_the_damaged_checkpoint_again(job: Job) -> None:
    """The name of the damaged one, and that of its snapshots, must be free when the run gets to its step."""
    job.put_back()
    harm(job.files(8)[0], "cut", 0.5)
    loop, found = job.resume()
    assert found.state.step == 6
    loop.train(found.state)
    loop.sinks.close()
    assert_equal_bits(fingerprints(loop), job.bits[8])
    assert loop.checkpoints.steps() == [3, 6, 8]
    close_stores(loop)


def test_a_flipped_byte_of_a_row_is_found_by_reading_all_and_only_then(job: Job) -> None:
    """`checkpoint.verify=quick` leaves it to the read of the row, which refuses it too."""
    job.put_back()
    segment = next(file for file in job.files(8) if file.suffix == ".seg")
    content = segment.read_bytes()
    row = next(position for position in range(4096, len(content)) if content[position])  # the first page is the header
    harm(segment, "flip", (row + 0.5) / len(content))
    try:
        loop, found = job.resume()
        close_stores(loop)
        told = " ".join(found.notes)
    except DamagedCheckpointError as error:  # the older checkpoints share the segment
        told = str(error)
    assert re.search(rf"step 8.*{segment.name} at offset \d+: record checksum does not match", told), told
    job.put_back()
    for file in (file for file in job.files(8) if file.suffix == ".seg"):
        spoiled = bytearray(file.read_bytes())
        for position in range(4096, len(spoiled) - 4096, 64):  # the last page names the rows
            spoiled[position] ^= 1
        file.write_bytes(spoiled)
    loop, found = job.resume(reads_all=False)
    assert found.state.step == 8
    with pytest.raises(CorruptionError, match=r"seg-\w+\.seg"):
        fingerprints(loop)
    close_stores(loop)


@pytest.mark.parametrize("how", ["remove", "cut", "flip"])
def test_the_head_of_a_store_is_named(job: Job, how: str) -> None:
    """It is read when the store is opened, before checkpoints are looked at."""
    job.put_back()
    head = next((job.folder / "ssd").glob("*/rank-0/STORE"))
    harm(head, how, 0.5)
    with pytest.raises(StorageError, match=r"STORE.*put it back from a copy") as caught:
        job.resume()
    assert str(head.parent) in str(caught.value)
