"""Tables on SSD in a checkpoint: each rank's row store takes a snapshot of its own, and the manifest refers to it.

Such a snapshot costs what changed since the last one, where copying whole tables would cost all of their bytes. It stays
in the row store, so a checkpoint that refers to one is read on the host that wrote it. Its name holds the identity of the
run, so that a store in which another run keeps its snapshots is known.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_kstep.checkpoint.agreement import agree
from torchrec_kstep.checkpoint.files import sync_folder, write_text
from torchrec_kstep.checkpoint.state import Slot
from torchrec_kstep.errors import CheckpointError, DamagedCheckpointError, StorageError
from torchrec_kstep.ops.row_group import record_fields
from torchrec_kstep.sharding.tiered.rows_tensor import RowBlock, RowsTensor
from torchrec_kstep.storage.snapshot import Snapshot, length_faults, read_manifest, snapshot_manifest
from torchrec_kstep.storage.tiered_tables import TieredTables

SNAPSHOT_NAME = re.compile(r"checkpoint-([0-9a-f]{12})-(\d{10})")
RUN_ID_NAME = "run_id"  # of the file beside checkpoints
_RUN_ID = re.compile(r"[0-9a-f]{12}")
_NOTE = re.compile(r"step \d+ of (.+)")
_NUM_READERS = 4  # snapshots of a rank that are checked at a time
_SHOWN_PARTS = 3  # of the checkpoint and of the run, each


@dataclass(frozen=True)
class StoredField:
    """A field of the record of a row: its name, `f32` or `i32`, and how many of them."""

    name: str
    dtype: str
    width: int


@dataclass(frozen=True)
class StoredPart:
    """What a store holds of one table: a rectangle, and what a row's record is made of. Row ids are those of the whole table.

    Attributes:
        weight: name of the table's weights in the state, e.g. `model.ebc.embedding_bags.user.weight`.
        table: name of the table in the store.
        table_id: number of the table in the store.
        first_row: row id of the first row.
        num_rows: rows.
        first_column: column of the whole table that is the first one here.
        num_columns: columns.
        size: rows and columns of the whole table.
        fields: the record, in its order.
    """

    weight: str
    table: str
    table_id: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    size: tuple[int, int]
    fields: tuple[StoredField, ...]


@dataclass(frozen=True)
class StoreReference:
    """A snapshot of one row store.

    Attributes:
        rank: whose store it is.
        folder: where the store lies below each of `tiers.ssd_paths`.
        snapshot: name of the snapshot.
        manifest_sha256: of the snapshot's own manifest, which holds the checksums of everything in it.
        parts: what it holds of which table.
    """

    rank: int
    folder: str
    snapshot: str
    manifest_sha256: str
    parts: tuple[StoredPart, ...]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "StoreReference":
        """Reads it from the JSON of a manifest."""
        parts = tuple(
            StoredPart(**{**part, "size": tuple(part["size"]), "fields": tuple(StoredField(**field) for field in part["fields"])})
            for part in body["parts"]
        )
        return cls(body["rank"], body["folder"], body["snapshot"], body["manifest_sha256"], parts)


@dataclass(frozen=True)
class RunStores:
    """The row stores of this rank, and which entries of the state live in them.

    Attributes:
        names: entries of the state that are in row stores, on any rank.
        groups: this rank's stores by folder below `tiers.ssd_paths`.
        parts: what each holds, by the same folder.
    """

    names: frozenset[str]
    groups: Mapping[str, TieredTables]
    parts: Mapping[str, tuple[StoredPart, ...]]

    @classmethod
    def none(cls) -> "RunStores":
        """Stands for a state without row stores."""
        return cls(frozenset(), {}, {})

    @classmethod
    def find(cls, slots: Mapping[str, Slot]) -> "RunStores":
        """Looks for tables on SSD among all entries of the state. Collective."""
        mine: set[str] = set()
        groups: dict[str, TieredTables] = {}
        parts: dict[str, list[StoredPart]] = {}
        for name, slot in slots.items():
            for group, block, offsets in _blocks_on_ssd(slot.value):
                mine.add(name)
                if block.field == "weight":
                    folder = _folder_of(group)
                    groups[folder] = group
                    parts.setdefault(folder, []).append(_part(name, block, offsets, tuple(slot.value.size())))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sorted(mine))
        names = frozenset(name for of_rank in everyone for name in of_rank)
        return cls(names, groups, {folder: tuple(found) for folder, found in parts.items()})

    def snapshot(self, run_id: str, step: int, note: str) -> tuple[StoreReference, ...]:
        """Makes a snapshot of every store of every rank, durable when this returns. Collective.

        Returns:
            References to those of all ranks.

        Raises:
            CheckpointError: on all ranks, if a store of any refuses; what the others have made is removed by `remove_unused`.
        """
        name = snapshot_name(run_id, step)
        mine = agree(lambda: [self._snapshot_one(folder, name, note) for folder in sorted(self.groups)])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return tuple(reference for of_rank in everyone for reference in of_rank)

    def _snapshot_one(self, folder: str, name: str, note: str) -> StoreReference:
        group = self.groups[folder]
        group.snapshot(name, note)
        digest = hashlib.sha256(read_manifest(group.paths, name)).hexdigest()
        return StoreReference(dist.get_rank(), folder, name, digest, self.parts[folder])

    def check(self, checkpoint: Path, references: Sequence[StoreReference], reads_all: bool) -> int:
        """Compares what a checkpoint refers to with the stores of this rank, before anything is changed. Not collective.

        Args:
            checkpoint: its folder, for messages.
            references: of the checkpoint, to stores of all ranks.
            reads_all: read every byte of the snapshots; else manifests, and of each file what tells that it is whole.

        Returns:
            Bytes of the snapshots that were read.

        Raises:
            DamagedCheckpointError: a snapshot is missing or damaged; names its file.
            CheckpointError: the tables lie otherwise, or the stores hold nothing of this run.
        """
        mine = {reference.folder: reference for reference in references if reference.rank == dist.get_rank()}
        self._check_tables(checkpoint, mine)
        for folder, reference in mine.items():
            self._check_presence(checkpoint, self.groups[folder], reference)
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            checks = [pool.submit(check_snapshot, self.groups[folder].paths, mine[folder], reads_all) for folder in sorted(mine)]
        try:
            return sum(check.result() for check in checks)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"rank {dist.get_rank()}: {checkpoint} cannot be restored: {error}") from error

    def _check_presence(self, checkpoint: Path, group: TieredTables, reference: StoreReference) -> None:
        found = Snapshot.all_names(group.paths)
        if reference.snapshot in found:
            return
        text = (
            f"rank {dist.get_rank()}: {checkpoint} needs snapshot {reference.snapshot!r} of the row store at {group.paths[0]}, "
            f"which has {_described(found, reference.snapshot)}"
        )
        if _is_of_same_run(found, reference.snapshot):
            raise DamagedCheckpointError(text)
        raise CheckpointError(
            f"{text}: set tiers.ssd_paths to the folders of the run that saved; where they are lost, choose another run_dir to start anew"
        )

    def _check_tables(self, checkpoint: Path, mine: Mapping[str, StoreReference]) -> None:
        theirs = {part for reference in mine.values() for part in _placed(reference.folder, reference.parts)}
        ours = {part for folder, parts in self.parts.items() for part in _placed(folder, parts)}
        if theirs == ours:
            return
        saved = [f"checkpoint has {_shown(part)}" for part in sorted(theirs - ours, key=_by_table)]
        found = [f"this run has {_shown(part)}" for part in sorted(ours - theirs, key=_by_table)]
        lines = [*saved[:_SHOWN_PARTS], *found[:_SHOWN_PARTS]]
        more = [f"and {num} more"] if (num := len(saved) + len(found) - len(lines)) else []
        raise CheckpointError(
            f"rank {dist.get_rank()}: {checkpoint} keeps its tables in row stores that lie otherwise than those of this run:\n  "
            + "\n  ".join(lines + more)
            + "\nWhere tables lie follows from tiers.name, planner.*, kstep.k and optim.*: set those as they were saved. "
            + HOW_TO_CHANGE
        )

    def restore(self, references: Sequence[StoreReference]) -> None:
        """Goes back to the snapshots, which `check` has found good, in place. Collective.

        Raises:
            CheckpointError: on all ranks: a snapshot is damaged.
        """

        def work() -> bool:
            for reference in references:
                if reference.rank == dist.get_rank():
                    self.groups[reference.folder].restore(reference.snapshot)
            return True

        agree(work)

    def remove_unused(self, run_id: str, steps: Collection[int]) -> None:
        """Removes the snapshots of this run that belong to no checkpoint, i.e. to none of `steps`. Collective.

        Raises:
            CheckpointError: on all ranks: another run keeps its snapshots in a store of this one.
        """
        used = {snapshot_name(run_id, step) for step in steps}

        def work() -> bool:
            for group in self.groups.values():
                self._refuse_other_runs(group, run_id)
                for name in group.snapshots():
                    if SNAPSHOT_NAME.fullmatch(name) and name not in used:
                        group.remove_snapshot(name)
            return True

        agree(work)

    def refuse_copies(self, run_id: str, checkpoints: Path) -> None:
        """Makes sure that no other folder of checkpoints, which was copied with its identity, relies on these stores. Collective.

        Raises:
            CheckpointError: on all ranks: the folder that made a snapshot is still there, and it is not `checkpoints`.
        """

        def work() -> bool:
            for group in self.groups.values():
                for name in group.snapshots():
                    match = SNAPSHOT_NAME.fullmatch(name)
                    owner = _NOTE.fullmatch(_note(group, name)) if match and match.group(1) == run_id else None
                    if owner and _is_same_run(Path(owner.group(1)), checkpoints, run_id):
                        raise CheckpointError(
                            f"rank {dist.get_rank()}: the row store at {group.paths[0]} belongs to the checkpoints in {owner.group(1)}, of "
                            f"which {checkpoints} is a copy: going on would delete snapshots that those need. Continue there, or remove "
                            "that folder, or copy the folders of tiers.ssd_paths too and name the copies"
                        )
            return True

        agree(work)

    def _refuse_other_runs(self, group: TieredTables, run_id: str) -> None:
        for name in group.snapshots():
            match = SNAPSHOT_NAME.fullmatch(name)
            if match and match.group(1) != run_id:
                raise CheckpointError(
                    f"rank {dist.get_rank()}: the row store at {group.paths[0]} holds checkpoints of another run: {_note(group, name)}; "
                    "give each run folders of its own in tiers.ssd_paths, or remove these folders if that run is no longer needed"
                )


def check_snapshot(paths: Sequence[str], reference: StoreReference, reads_all: bool) -> int:
    """Makes sure that a snapshot is the one that a checkpoint refers to, and whole. Not collective; safe in any thread.

    Returns:
        Bytes that were read of its files.

    Raises:
        DamagedCheckpointError: it is not; names the file, and what was expected.
    """
    where = f"snapshot {reference.snapshot!r} of the row store at {paths[0]}"
    manifest = snapshot_manifest(paths, reference.snapshot)
    if not manifest.is_file():
        raise DamagedCheckpointError(f"{where}: {manifest} is missing, expected one with sha256 {reference.manifest_sha256[:16]}...")
    try:
        content = read_manifest(paths, reference.snapshot)
        found = hashlib.sha256(content).hexdigest()
        if found != reference.manifest_sha256:
            raise DamagedCheckpointError(
                f"{where}: {manifest} does not match its checksum: expected sha256 {reference.manifest_sha256[:16]}..., got {found[:16]}..."
            )
        if lost := length_faults(paths, reference.snapshot, json.loads(content.splitlines()[0])):
            raise DamagedCheckpointError(f"{where}: {_first_of(lost)}")
        snapshot = Snapshot.open(paths, reference.snapshot)
        failures = snapshot.verify().failures if reads_all else ()
        num_bytes = sum(segment.file_bytes for segment in snapshot.segments())
    except StorageError as error:
        raise DamagedCheckpointError(f"{where}: {error}") from error
    if failures:
        raise DamagedCheckpointError(f"{where}: {_first_of(failures)}")
    return num_bytes


def _first_of(faults: Sequence[str]) -> str:
    more = len(faults) - 1
    return faults[0] + (f"; and {more} more {'fault' if more == 1 else 'faults'}" if more else "")


HOW_TO_CHANGE = (
    "continue with the ranks, the plan and the tiers that saved it. To change them, save one more checkpoint there with "
    "checkpoint.tables=full: any number of ranks, any plan and tiers=dram read that. `python -m torchrec_kstep.store export` "
    "writes the tables as files"
)


def note_of(step: int, checkpoints: Path) -> str:
    """Says, in a snapshot, which checkpoint it is for."""
    return f"step {step} of {checkpoints.absolute()}"


def _is_same_run(other: Path, checkpoints: Path, run_id: str) -> bool:
    """Whether `other` is another folder with the checkpoints of the same run."""
    mark = other / RUN_ID_NAME
    return mark.is_file() and not other.samefile(checkpoints) and mark.read_text(encoding="utf-8").strip() == run_id


def _by_table(placed: tuple[str, StoredPart]) -> tuple[str, int, int]:
    return placed[1].weight, placed[1].first_row, placed[1].first_column


def snapshot_name(run_id: str, step: int) -> str:
    """Names the snapshot that a checkpoint of `step` refers to."""
    return f"checkpoint-{run_id}-{step:010d}"


def agree_on_run_id(path: Path, makes_one: bool) -> str | None:
    """Returns the identity of the run that `path` holds, as rank 0 sees it. Collective.

    Args:
        path: a file beside the checkpoints.
        makes_one: make an identity where there is none, instead of returning None.

    Raises:
        CheckpointError: on all ranks: the file cannot be written, or holds something else.
    """
    found = [agree(lambda: _run_id(path, makes_one) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _run_id(path: Path, makes_one: bool) -> str | None:
    if not path.exists():
        if not makes_one:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        write_text(partial, uuid.uuid4().hex[:12])
        partial.rename(path)
        sync_folder(path.parent)
    run_id = path.read_text(encoding="utf-8").strip()
    if not _RUN_ID.fullmatch(run_id):
        raise CheckpointError(
            f"{path} holds {run_id[:40]!r}, expected 12 hexadecimal digits: it was changed; they are those in the names of snapshots in "
            "any manifest beside it"
        )
    return run_id


def _blocks_on_ssd(value: Any) -> Iterator[tuple[TieredTables, RowBlock, tuple[int, ...]]]:
    """Yields the local shards of a sharded tensor that are rows of a row store: the store, and where they begin in the whole."""
    for shard in value.local_shards() if hasattr(value, "local_shards") else ():
        if isinstance(shard.tensor, RowsTensor) and isinstance(shard.tensor.block.group, TieredTables):
            yield shard.tensor.block.group, shard.tensor.block, tuple(shard.metadata.shard_offsets)


def _folder_of(group: TieredTables) -> str:
    """The last two parts of a store's path: what `OpenOnSsd` and the rank add to `tiers.ssd_paths`."""
    path = Path(group.paths[0])
    return f"{path.parent.name}/{path.name}"


def _part(name: str, block: RowBlock, offsets: tuple[int, ...], size: tuple[int, ...]) -> StoredPart:
    spec = block.group.tables[block.table]
    fields = tuple(StoredField(field.name, field.dtype, field.width) for field in record_fields(spec, block.group.optimizer))
    return StoredPart(
        name, spec.name, spec.table_id, block.first_row, block.num_rows, offsets[1], block.num_columns, (size[0], size[1]), fields
    )


def _placed(folder: str, parts: Sequence[StoredPart]) -> set[tuple[str, StoredPart]]:
    return {(folder, part) for part in parts}


def _shown(placed: tuple[str, StoredPart]) -> str:
    folder, part = placed
    rows = f"rows {part.first_row} to {part.first_row + part.num_rows - 1}" if part.num_rows else "no rows"
    fields = "+".join(f"{field.name}[{field.width}]" for field in part.fields)
    return f"{part.weight}, {rows}, {part.num_columns} columns from {part.first_column}, {fields}, in {folder}"


def _is_of_same_run(found: Sequence[str], wanted: str) -> bool:
    """Whether a store has another snapshot of the run that `wanted` belongs to."""
    match = SNAPSHOT_NAME.fullmatch(wanted)
    return match is not None and any(match.group(1) in name for name in found)


def _described(found: Sequence[str], wanted: str) -> str:
    """Says which snapshots a store has, when the wanted one is missing."""
    if not found:
        return "none"
    kind = "" if _is_of_same_run(found, wanted) else " of another run"
    return f"only {', '.join(found[-3:])}{kind}"


def _note(group: TieredTables, name: str) -> str:
    """What was noted down with a snapshot of another run; its name where nothing can be read."""
    try:
        metadata = json.loads(read_manifest(group.paths, name).splitlines()[0])["metadata"]
        return str(json.loads(metadata)["note"])
    except (ValueError, KeyError, IndexError, TypeError):
        return name
