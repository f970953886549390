"""Checkpoints of a run: save, find, restore, and remove what is no longer needed."""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_kstep.checkpoint.agreement import agree, agree_at_length, on_all_ranks, sum_over_ranks
from torchrec_kstep.checkpoint.files import remove_folder, sync_folder, verify_file
from torchrec_kstep.checkpoint.manifest import MANIFEST_NAME, Manifest, Scalar, differences, read_manifest
from torchrec_kstep.checkpoint.state import Slot, TrainState, flatten, random_state, set_random_state
from torchrec_kstep.checkpoint.storage import JsonLoadPlanner, JsonSavePlanner, SnapshotReader, SnapshotWriter
from torchrec_kstep.checkpoint.stores import HOW_TO_CHANGE, RUN_ID_NAME, RunStores, StoreReference, agree_on_run_id, note_of
from torchrec_kstep.errors import CheckpointError, DamagedCheckpointError

_NAME = re.compile(r"step_(\d{10})")
_LEFTOVER = re.compile(r"step_\d{10}\.(tmp|deleted)")
_SHOWN_DIFFERENCES = 8


class CheckpointManager:
    """The checkpoints of one run, in one folder that all ranks see.

    A checkpoint is the folder `step_<10 digits>`: one safetensors file per rank and a JSON manifest with checksums. Tables
    are stored by global row and column, so another sharding or number of ranks reads them as well. Tables on SSD are the
    exception: their row stores take snapshots of their own, to which the manifest refers, unless whole tables are asked for.
    """

    def __init__(self, folder: Path, keep: int, contract: Mapping[str, Scalar], copies_stores: bool = False, writes: bool = True) -> None:
        """Looks at nothing yet.

        Args:
            folder: made when it is needed.
            keep: newest checkpoints that are not removed, at least 1; the best one is kept besides.
            contract: what a run must share with the one that saved, for its checkpoint to be continued.
            copies_stores: copy tables on SSD into the checkpoint as a whole, instead of leaving them to snapshots of their
                row stores.
            writes: whether this rank holds part of the copy that is written: with several replicas, those of the first. Row stores
                take snapshots on all ranks.
        """
        self._writes = writes
        self._folder = folder
        self._keep = max(keep, 1)
        self._contract = dict(contract)
        self._copies_stores = copies_stores

    def steps(self, only_whole: bool = True) -> list[int]:
        """Steps of the published checkpoints, ascending. Leftovers of interrupted saves do not count. Not collective.

        Args:
            only_whole: leave out those whose manifest was lost.
        """
        if not self._folder.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self._folder.iterdir() if (path / MANIFEST_NAME).exists() or not only_whole]
        return sorted(int(match.group(1)) for match in matches if match)

    def newest(self) -> int | None:
        """Step of the newest checkpoint as rank 0 sees it, or `None`. Collective."""
        return max(self._steps_of_rank_0(), default=None)

    def clean_up(self, dmp: DistributedModelParallel, optimizer: KeyedOptimizer) -> None:
        """Removes what interrupted saves left: half checkpoints, and snapshots of row stores to which none refers. Collective.

        Raises:
            CheckpointError: on all ranks: a row store holds checkpoints of another run, or of the folder of which this one is a copy.
        """
        if dist.get_rank() == 0 and self._folder.is_dir():
            self._remove_leftovers()
        stores = RunStores.find(_slots(dmp.state_dict(), optimizer.state_dict()))
        if stores.names and (run_id := agree_on_run_id(self._folder / RUN_ID_NAME, makes_one=False)) is not None:
            stores.refuse_copies(run_id, self._folder)
        self._remove_unused_snapshots(stores)

    def save(self, state: TrainState, dmp: DistributedModelParallel, optimizer: KeyedOptimizer) -> None:
        """Saves weights, optimizer states, `state` and every rank's random streams, then removes old checkpoints. Collective.

        It is all or nothing: the checkpoint gets its name when every byte of every rank is on the disk.

        Raises:
            CheckpointError: on all ranks, if any of them could not write; older checkpoints are intact.
        """
        slots = _slots(dmp.state_dict(), optimizer.state_dict())
        stores = RunStores.find(slots)
        slots = {**(slots if self._writes else {}), **_random_slots(dist.get_rank(), random_state())}
        references: tuple[StoreReference, ...] = ()
        if stores.names and not self._copies_stores:
            references = self._snapshot(stores, state.step)
            slots = {name: slot for name, slot in slots.items() if name not in stores.names}
        manifest = Manifest(state.step, asdict(state), self._contract, dist.get_world_size(), {}, {}, {}, references)
        writer = SnapshotWriter(self._folder, _name(state.step), manifest)
        values = {name: slot.value for name, slot in slots.items()}
        on_all_ranks("save", lambda: save(values, storage_writer=writer, planner=JsonSavePlanner()))
        if dist.get_rank() == 0:
            self._prune(state)
        self._remove_unused_snapshots(stores)

    def resume(self, dmp: DistributedModelParallel, optimizer: KeyedOptimizer, reads_all: bool = True) -> "Resumed | None":
        """Loads the newest good checkpoint in place, if there is any, and cleans up. Collective.

        Newer ones that are damaged are renamed to `<name>.damaged`: the run makes checkpoints of their steps again. Nothing is changed
        before a good one was found.

        Args:
            dmp: the model.
            optimizer: its optimizer.
            reads_all: read every byte of the snapshots of row stores; else a flipped byte of a row is noticed when the row is read.

        Raises:
            CheckpointError: on all ranks: every checkpoint is damaged (what is wrong with each), the newest is of another run, or the
                stores are another run's.
        """
        faults: dict[int, str] = {}
        checked = None
        begin_s = time.monotonic()
        for step in self._steps_of_rank_0(only_whole=False)[::-1]:
            try:
                checked = self._check(step, dmp, optimizer, reads_all)
                break
            except DamagedCheckpointError as error:
                faults[step] = str(error)
        seconds = time.monotonic() - begin_s
        if checked is None and faults:
            raise DamagedCheckpointError(
                f"no checkpoint in {self._folder} is whole, so there is none to resume from:\n  "
                + "\n  ".join(f"step {step}: {text}" for step, text in faults.items())
                + "\nput the files that are named back from a copy, or choose another run_dir (and other tiers.ssd_paths) to start anew"
            )
        if faults:
            agree(lambda: self._set_aside(faults))
        self.clean_up(dmp, optimizer)
        if checked is None:
            return None
        state, has_streams = self._load(checked)
        notes = [
            f"checkpoint of step {step} is damaged, was renamed to {_name(step)}.damaged, and can be removed: {text}"
            for step, text in faults.items()
        ]
        if (why := self._why_best_is_lost(state, dmp, optimizer)) is not None:
            notes.append(f"the best checkpoint so far, of step {state.best_step}, cannot be loaded, so the best is sought anew: {why}")
            state.best_auc, state.best_step = None, None
        return Resumed(state, has_streams, tuple(notes), sum_over_ranks(checked.num_bytes_read), seconds)

    def restore(self, step: int, dmp: DistributedModelParallel, optimizer: KeyedOptimizer) -> tuple[TrainState, bool]:
        """Loads the checkpoint of `step` in place. Collective.

        Returns:
            The saved state, and whether the random streams were restored: they are not where another number of ranks saved.

        Raises:
            DamagedCheckpointError: on all ranks: a file is missing or damaged (named).
            CheckpointError: on all ranks: the checkpoint is of another data set, model or optimizer (with what differs).
        """
        try:
            return self._load(self._check(step, dmp, optimizer, reads_all=False))
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"checkpoint of step {step}: {error}; put the file back from a copy, or start again: a run continues from its newest "
                "checkpoint that is whole"
            ) from error

    def _check(self, step: int, dmp: DistributedModelParallel, optimizer: KeyedOptimizer, reads_all: bool) -> "_Checked":
        """Makes sure that the checkpoint of `step` is whole and that of this run. Changes nothing. Collective."""
        folder = self._folder / _name(step)
        manifest = agree_at_length(lambda: self._open(folder), f"checking the files of {folder}")
        target = _Target(dmp, optimizer, dmp.state_dict(), optimizer.state_dict())
        slots = _slots(target.model_state, target.optimizer_state)
        stores = RunStores.find(slots) if manifest.stores else RunStores.none()
        num_bytes = agree_at_length(
            lambda: stores.check(folder, manifest.stores, reads_all), f"reading snapshots of {folder} (checkpoint.verify=quick reads less)"
        )
        slots = {name: slot for name, slot in slots.items() if name not in stores.names}
        self._check_shape(folder, manifest, slots)
        return _Checked(folder, manifest, target, stores, slots, num_bytes)

    def _load(self, checked: "_Checked") -> tuple[TrainState, bool]:
        """Loads what `_check` has found good. Collective."""
        manifest, target, slots = checked.manifest, checked.target, dict(checked.slots)
        checked.stores.restore(manifest.stores)
        own_random: dict[str, Any] = random_state() if manifest.world_size == dist.get_world_size() else {}
        slots |= _random_slots(dist.get_rank(), own_random)
        values = {name: slot.value for name, slot in slots.items()}
        reader = SnapshotReader(checked.folder, manifest)
        on_all_ranks("load", lambda: load(values, storage_reader=reader, planner=JsonLoadPlanner()))
        for name, slot in slots.items():  # tensors were loaded in place; values are put where they came from
            slot.container[slot.key] = values[name]
        target.dmp.load_state_dict(dict(target.model_state))  # a copy, because TorchRec renames keys in place
        target.optimizer.load_state_dict(target.optimizer_state)
        if own_random:
            set_random_state(own_random)
        return TrainState(**manifest.train_state), bool(own_random)

    def _why_best_is_lost(self, state: TrainState, dmp: DistributedModelParallel, optimizer: KeyedOptimizer) -> str | None:
        """Says why the best checkpoint cannot be loaded; None if it can, or is the one that was. Collective."""
        if state.best_step is None or state.best_step == state.step:
            return None
        try:
            self._check(state.best_step, dmp, optimizer, reads_all=False)
        except CheckpointError as error:
            return str(error)
        return None

    def _set_aside(self, steps: Iterable[int]) -> bool:
        """Gives up the names of damaged checkpoints; true on the rank that did, which is rank 0."""
        if dist.get_rank() != 0:
            return False
        for step in steps:
            aside = self._folder / f"{_name(step)}.damaged"
            remove_folder(aside)
            (self._folder / _name(step)).rename(aside)
        sync_folder(self._folder)
        return True

    def _open(self, folder: Path) -> Manifest:
        """Reads the manifest and verifies this rank's share of the files."""
        manifest = read_manifest(folder)
        if found := differences(manifest.contract, self._contract):
            raise CheckpointError(
                f"{folder} belongs to another run; differing are:\n  "
                + "\n  ".join(found[:_SHOWN_DIFFERENCES])
                + "\nset these back to continue it, or choose another run_dir to start anew"
            )
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if manifest.stores and manifest.world_size != world_size:
            raise CheckpointError(
                f"{folder} was saved by {_ranks(manifest.world_size)}, and its tables lie in the row stores of these; this run has "
                f"{world_size}: {HOW_TO_CHANGE}"
            )
        for number, (name, info) in enumerate(sorted(manifest.files.items())):
            if number % world_size == rank:
                verify_file(folder / name, info)
        return manifest

    def _check_shape(self, folder: Path, manifest: Manifest, slots: Mapping[str, Slot]) -> None:
        """Compares names, sizes and dtypes of the checkpoint with those of this run, over all ranks."""
        mine = {name: _shape(slot.value) for name, slot in slots.items()}
        gathered: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        current = {name: shape for part in gathered for name, shape in part.items()}
        saved = {name: f"{info.dtype} {list(info.size)}" for name, info in manifest.tensors.items()} | dict.fromkeys(
            manifest.values, "a value"
        )
        saved = {name: shape for name, shape in saved.items() if not name.startswith("random.")}
        if found := differences(saved, current):
            raise CheckpointError(
                f"{folder} holds another model or optimizer; {len(found)} of {len(current)} entries differ:\n  "
                + "\n  ".join(found[:_SHOWN_DIFFERENCES])
                + "\nset the model and optimizer back to continue it, or choose another run_dir to start anew"
            )

    def _steps_of_rank_0(self, only_whole: bool = True) -> list[int]:
        """`steps` as rank 0 sees them, alike on all ranks. Collective."""
        found: list[Any] = [self.steps(only_whole)]
        dist.broadcast_object_list(found, src=0)
        steps: list[int] = found[0]
        return steps

    def _snapshot(self, stores: RunStores, step: int) -> tuple[StoreReference, ...]:
        """Makes the snapshots of the row stores for the checkpoint of `step`. Collective."""
        if step in self._steps_of_rank_0():
            raise CheckpointError(f"{self._folder / _name(step)} exists already: a published checkpoint is never overwritten")
        self._remove_unused_snapshots(stores)  # one of this very step may be left over
        run_id = agree_on_run_id(self._folder / RUN_ID_NAME, makes_one=True)
        assert run_id is not None
        return stores.snapshot(run_id, step, note=note_of(step, self._folder))

    def _remove_unused_snapshots(self, stores: RunStores) -> None:
        """Removes the snapshots of row stores that belong to no published checkpoint. Collective."""
        if not stores.names:
            return
        run_id = agree_on_run_id(self._folder / RUN_ID_NAME, makes_one=not self._copies_stores)
        if run_id is not None:
            stores.remove_unused(run_id, self._steps_of_rank_0())

    def _prune(self, state: TrainState) -> None:
        """Removes leftovers, and checkpoints that are neither among the newest nor the best. On rank 0, after a publish."""
        self._remove_leftovers()
        for step in self.steps()[: -self._keep]:
            if step != state.best_step:
                doomed = self._folder / f"{_name(step)}.deleted"
                (self._folder / _name(step)).rename(doomed)  # half of a checkpoint must not look like one
                remove_folder(doomed)

    def _remove_leftovers(self) -> None:
        for path in self._folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                remove_folder(path)


@dataclass(frozen=True)
class Resumed:
    """What `CheckpointManager.resume` found.

    Attributes:
        state: as it was saved.
        has_streams: whether the random streams were restored: they are not where another number of ranks saved.
        notes: what a user should know: damaged checkpoints, and what is wrong with them.
        num_bytes_read: of snapshots of row stores, on all ranks.
        check_s: seconds that looking for damage took.
    """

    state: TrainState
    has_streams: bool
    notes: tuple[str, ...]
    num_bytes_read: int
    check_s: float


@dataclass(frozen=True)
class _Target:
    """Where a checkpoint is loaded."""

    dmp: DistributedModelParallel
    optimizer: KeyedOptimizer
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]


@dataclass(frozen=True)
class _Checked:
    """A checkpoint that is whole and fits; `slots` are the entries of the state that are not in row stores."""

    folder: Path
    manifest: Manifest
    target: _Target
    stores: RunStores
    slots: Mapping[str, Slot]
    num_bytes_read: int


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _name(step: int) -> str:
    return f"step_{step:010d}"


def _slots(model_state: dict[str, Any], optimizer_state: dict[str, Any]) -> dict[str, Slot]:
    return {**flatten("model", model_state), **flatten("optimizer", optimizer_state)}


def _random_slots(rank: int, states: dict[str, Any]) -> dict[str, Slot]:
    return {f"random.{rank}.{name}": Slot(value, states, name) for name, value in states.items()}


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor) or hasattr(value, "local_shards"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.size())}"
    return "a value"
