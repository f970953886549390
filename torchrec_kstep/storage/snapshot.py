"""Snapshot: a committed state of a row store, read without a lock, also while another process trains on it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from torchrec_kstep.errors import CorruptionError, StorageError, StorageIOError
from torchrec_kstep.ops import _library
from torchrec_kstep.ops.batch import InitKind, TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import FieldType, RecordField
from torchrec_kstep.storage._errors import store_errors
from torchrec_kstep.storage.division import BYTES_PER_ELEMENT
from torchrec_kstep.storage.replay import ReplayState
from torchrec_kstep.storage.segments import SegmentInfo

DTYPES: dict[FieldType, torch.dtype] = {"f32": torch.float32, "i32": torch.int32}


@dataclass(frozen=True)
class VerifyReport:
    """What reading every byte of a snapshot found.

    Attributes:
        num_segments: files read.
        num_records: records, stale ones included.
        num_live_records: rows.
        file_bytes: bytes of the files.
        failures: damage, each with file and offset; empty for a sound snapshot.
    """

    num_segments: int
    num_records: int
    num_live_records: int
    file_bytes: int
    failures: tuple[str, ...]


@dataclass(frozen=True)
class StoredTable:
    """One table of a snapshot.

    Attributes:
        spec: as it was opened for training.
        fields: the record of a row.
        materialised_rows: rows that have a record; the others have their initial values.
        index_bytes: DRAM that finding them takes.
    """

    spec: TableSpec
    fields: tuple[RecordField, ...]
    materialised_rows: int
    index_bytes: int


class Snapshot:
    """Reads rows of a snapshot, checks it, or makes a row group for evaluation of it. Never writes.

    Deleting the snapshot while it is read makes later reads fail with `StorageError`. Calls may come from several threads.
    """

    def __init__(self, native: Any, paths: Sequence[str]) -> None:
        """Takes over an open native snapshot; use `open`."""
        self.paths = tuple(paths)
        self._native = native
        self.manifest: dict[str, Any] = json.loads(native.manifest())
        self.name: str = self.manifest["name"]
        self.tables = tuple(self._table(entry) for entry in self.manifest["tables"])

    @classmethod
    def open(cls, paths: Sequence[str | Path], name: str | None = None) -> "Snapshot":
        """Opens a snapshot of the store that lies on `paths`; None: the newest one.

        Raises:
            CorruptionError: its manifest or a file's footer is damaged.
            StorageError: there is no such snapshot or no store.
        """
        _library.load()
        texts = check_store(paths)
        if name is None:
            names = cls.names(texts)
            if not names:
                raise StorageError(f"the row store at {texts[0]} has no snapshot that can be read; only snapshots outlive a run")
            name = names[-1]
        with store_errors(texts):
            return cls(torch.classes.kstep.Snapshot.open(texts, name), texts)

    @staticmethod
    def names(paths: Sequence[str | Path]) -> list[str]:
        """Snapshots whose manifest is sound, newest last."""
        _library.load()
        texts = check_store(paths)
        with store_errors(texts):
            return list(torch.classes.kstep.Snapshot.names_by_age(texts))

    @staticmethod
    def all_names(paths: Sequence[str | Path]) -> list[str]:
        """Snapshots by name, those with a damaged manifest included."""
        _library.load()
        texts = check_store(paths)
        with store_errors(texts):
            return list(torch.classes.kstep.Snapshot.names(texts))

    @property
    def note(self) -> str:
        """What was given to `TieredTables.snapshot`."""
        return str(self._envelope().get("note", ""))

    @property
    def created_unix_s(self) -> float | None:
        """When it was made, where that is known."""
        created = self._envelope().get("created_unix_s")
        return None if created is None else float(created)

    @property
    def counters(self) -> dict[str, dict[str, float]]:
        """The store's counters when the snapshot was made, by table and name."""
        return dict(self._envelope().get("counters", {}))

    def table(self, name: str) -> StoredTable:
        """Returns a table by name.

        Raises:
            StorageError: there is none.
        """
        for table in self.tables:
            if table.spec.name == name:
                return table
        known = ", ".join(repr(table.spec.name) for table in self.tables)
        raise StorageError(f"snapshot {self.name!r} at {self.paths[0]} has no table {name!r}; it has {known}")

    def segments(self) -> list[SegmentInfo]:
        """Its files."""
        with store_errors(self.paths):
            return [SegmentInfo.of(dict(segment)) for segment in self._native.segments()]

    def verify(self) -> VerifyReport:
        """Reads every byte of every file and checks every checksum."""
        with store_errors(self.paths):
            counts, failures = self._native.verify()
        return VerifyReport(**dict(counts), failures=tuple(failures))

    def read(self, table: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns every field of `rows` (`[n]` int64): `[n, width]` each; rows without a record have their initial values.

        Where absent rows replay their L2, all rows are shown as they were when the snapshot was made.
        """
        fields = self.table(table).fields
        with store_errors(self.paths):
            payloads: torch.Tensor = self._native.read_rows(table, rows.contiguous())
        if self._replay is not None:
            index = next(index for index, stored in enumerate(self.tables) if stored.spec.name == table)
            self._replaying_group.catch_up(index, payloads)
        result, begin = {}, 0
        for field in fields:
            num_bytes = field.width * BYTES_PER_ELEMENT
            result[field.name] = payloads[:, begin : begin + num_bytes].contiguous().view(DTYPES[field.dtype])
            begin += num_bytes
        return result

    def scan(self, table: str, rows_per_chunk: int, with_untouched: bool = False) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Yields the rows of a table in ascending order, at most `rows_per_chunk` at a time: row ids `[n]` and their fields.

        Args:
            table: its name.
            rows_per_chunk: bounds the memory.
            with_untouched: also rows without a record, with their initial values.
        """
        num_rows = self.table(table).spec.num_rows
        if with_untouched:
            for begin in range(0, num_rows, rows_per_chunk):
                rows = torch.arange(begin, min(begin + rows_per_chunk, num_rows))
                yield rows, self.read(table, rows)
            return
        for window in range(0, num_rows, _ROWS_PER_WINDOW):
            with store_errors(self.paths):
                found: torch.Tensor = self._native.materialised_rows(table, window, min(window + _ROWS_PER_WINDOW, num_rows))
            for begin in range(0, found.numel(), rows_per_chunk):
                rows = found[begin : begin + rows_per_chunk]
                yield rows, self.read(table, rows)

    def group(self) -> RowGroup:
        """Makes a read-only row group for evaluation; needs no optimizer, and an update is refused."""
        replay = self._replay
        with store_errors(self.paths):
            group = RowGroup([table.spec for table in self.tables], None if replay is None else replay.optimizer, self._native.source())
        if replay is not None:
            replay.hand_over(group)
        return group

    @cached_property
    def _replay(self) -> ReplayState | None:
        return replay_state(self.manifest, f"snapshot {self.name!r} of the row store at {self.paths[0]}")

    @cached_property
    def _replaying_group(self) -> RowGroup:
        return self.group()

    def _table(self, entry: dict[str, Any]) -> StoredTable:
        init = entry["init"]
        spec = TableSpec(
            name=entry["name"],
            num_rows=int(entry["num_rows"]),
            dim=int(entry["dim"]),
            table_id=int(entry["table_id"]),
            seed=_signed(int(entry["seed"])),
            init=cast(InitKind, init["kind"]),
            init_a=float(init["a"]),
            init_b=float(init["b"]),
            first_column=int(entry["first_column"]),
        )
        fields = tuple(RecordField(field["name"], field["dtype"], int(field["width"])) for field in entry["fields"])
        counts = dict(self._native.table(spec.name))
        return StoredTable(spec, fields, counts["materialised_rows"], counts["index_bytes"])

    def _envelope(self) -> dict[str, Any]:
        return envelope_of(self.manifest)


_RECORD_TAIL_BYTES = 20  # docs/format.md
_ROWS_PER_WINDOW = 1 << 22  # row ids looked through at a time


def envelope_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `TieredTables.snapshot` put into the metadata of a manifest."""
    try:
        found = json.loads(manifest["metadata"])
    except json.JSONDecodeError:  # made by other means than TieredTables.snapshot
        return {"note": manifest["metadata"]}
    return found if isinstance(found, dict) else {"note": manifest["metadata"]}


def replay_state(manifest: Mapping[str, Any], where: str) -> ReplayState | None:
    """Returns what a snapshot says about L2 of absent rows; None where they stand still. `where` names it.

    Raises:
        CorruptionError: it cannot be read.
    """
    found = envelope_of(manifest).get("l2_replay")
    return None if found is None else ReplayState.from_json(found, where)


def read_manifest(paths: Sequence[str | Path], name: str) -> bytes:
    """Returns the manifest of a committed snapshot as it lies on the drive: one line of JSON and its checksum.

    Raises:
        StorageError: there is no such snapshot.
        StorageIOError: the drive refused.
    """
    path = snapshot_manifest(paths, name)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StorageError(f"the row store at {paths[0]} has no snapshot {name!r}") from None
    except OSError as error:
        raise StorageIOError(f"cannot read {path}: {error.strerror}") from error


def snapshot_manifest(paths: Sequence[str | Path], name: str) -> Path:
    """Returns the file that holds the manifest of a snapshot."""
    return Path(paths[0]) / "snapshots" / name / "MANIFEST"


def length_faults(paths: Sequence[str | Path], name: str, manifest: Mapping[str, Any]) -> list[str]:
    """Compares the files of a snapshot with the lengths in its manifest; says which are missing or have another one.

    Args:
        paths: of the store.
        name: of the snapshot.
        manifest: its manifest, e.g. `Snapshot.manifest`.
    """
    faults = []
    for log in manifest["logs"]:
        folder = Path("snapshots") / name / f"log-{int(log['payload_bytes']) + _RECORD_TAIL_BYTES}"
        for segment in log["segments"]:
            file = Path(paths[int(segment["path"])]) / folder / f"seg-{int(segment['id']):016x}.seg"
            num_bytes = int(segment["file_bytes"])
            if not file.is_file():
                faults.append(f"{file} is missing, expected {num_bytes} bytes")
            elif (found := file.stat().st_size) != num_bytes:
                faults.append(f"{file} has {found} bytes, expected {num_bytes}")
    return faults


def check_headers(paths: Sequence[str | Path]) -> None:
    """Makes sure that the header of each path that holds a store is sound, and that none was lost: a new one would hide all snapshots.

    Raises:
        CorruptionError: one is damaged or missing; says what to do.
    """
    for path in map(Path, paths):
        remedy = f"put it back from a copy; or name other folders, or remove {path}, to give up what is there and start anew"
        if (path / "STORE").exists():
            _header_of(str(path), remedy)
        folder = path / "snapshots"
        if not (path / "STORE").exists() and folder.is_dir() and any(folder.iterdir()):
            raise CorruptionError(
                f"{path / 'STORE'}, the header of a row store, is missing, although {len(list(folder.iterdir()))} snapshots lie beside it: "
                f"{remedy}"
            )


def _header_of(path: str, remedy: str) -> dict[str, int]:
    try:
        with store_errors([path]):
            return dict(torch.classes.kstep.Snapshot.header(path))
    except CorruptionError as error:
        raise CorruptionError(f"{error}: {remedy}") from error


def check_store(paths: Sequence[str | Path]) -> list[str]:
    """Returns `paths` as texts if they are all paths of one store, in its order.

    Raises:
        CorruptionError: a header is damaged.
        StorageError: a path holds no store, or some paths of the store are missing or in another order.
    """
    _library.load()
    texts = [str(path) for path in paths]
    for index, path in enumerate(texts):
        if not (Path(path) / "STORE").is_file():
            raise StorageError(f"{path} holds no row store: there is no file {path}/STORE")
        header = _header_of(path, "put it back from a copy")
        if (header["path_index"], header["num_paths"]) != (index, len(texts)):
            raise StorageError(
                f"{path} is path {header['path_index']} of {header['num_paths']} of its row store, but was given as path {index} of "
                f"{len(texts)}: name all paths of the store, in its order"
            )
    return texts


def _signed(seed: int) -> int:
    """Seeds are unsigned in the manifest and signed in tensors."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
