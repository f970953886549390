"""The manifest: what a checkpoint holds and where, as versioned JSON with a checksum of its own."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrec_kstep.checkpoint.files import DTYPES, FileInfo, check_file_name
from torchrec_kstep.checkpoint.stores import SNAPSHOT_NAME, StoreReference
from torchrec_kstep.errors import CheckpointError, DamagedCheckpointError

FORMAT = "torchrec_kstep.checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"

Scalar = str | int | float | bool


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins, how large it is, and the file and key that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorInfo:
    """A tensor by its global size; its chunks tile it."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its numbers.

    Attributes:
        step: optimizer steps done.
        train_state: position in the data and in early stopping, see `state.TrainState`.
        contract: what a run must share with the one that saved to continue it: data, model, seeds, global batch.
        world_size: ranks that saved.
        tensors: by name.
        values: JSON values by name: the (file, key) of their text.
        files: by name.
        stores: snapshots of row stores that hold what `tensors` does not: the rows of tables on SSD.
    """

    step: int
    train_state: dict[str, Any]
    contract: dict[str, Scalar]
    world_size: int
    tensors: dict[str, TensorInfo]
    values: dict[str, tuple[str, str]]
    files: dict[str, FileInfo]
    stores: tuple[StoreReference, ...] = ()

    def dumps(self) -> str:
        """The JSON text."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint folder; the other files are not looked at.

    Raises:
        DamagedCheckpointError: it is missing or damaged.
        CheckpointError: it cannot be read, is of another version, or names a file outside its folder.
    """
    path = folder / MANIFEST_NAME
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing: {folder} is no complete checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is no JSON, as it was written: {error}") from None
    if not isinstance(body, dict):
        raise DamagedCheckpointError(f"{path} is no checkpoint manifest: expected a JSON object, got {type(body).__name__}")
    checksum = body.pop("sha256", None)
    if checksum != (found := _digest(body)):
        raise DamagedCheckpointError(f"{path} does not match its checksum: expected sha256 {str(checksum)[:16]}..., got {found[:16]}...")
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint manifest: expected format {FORMAT!r}, got {body.get('format')!r}")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {body.get('version')!r}, this release reads version {VERSION}: continue with the release that saved it"
        )
    manifest = Manifest(
        step=body["step"],
        train_state=body["train_state"],
        contract=body["contract"],
        world_size=body["world_size"],
        tensors={name: _tensor_info(info) for name, info in body["tensors"].items()},
        values={name: (file, key) for name, (file, key) in body["values"].items()},
        files={name: FileInfo(**info) for name, info in body["files"].items()},
        stores=tuple(StoreReference.of(reference) for reference in body.get("stores", ())),
    )
    _check_names(manifest, path)
    return manifest


def differences(saved: Mapping[str, Scalar], current: Mapping[str, Scalar]) -> list[str]:
    """What differs between two contracts, one line per entry."""
    missing = object()
    lines = []
    for name in sorted(saved.keys() | current.keys()):
        then, now = saved.get(name, missing), current.get(name, missing)
        if then != now:
            shown = ["has none" if value is missing else repr(value) for value in (then, now)]
            lines.append(f"{name}: checkpoint {shown[0]}, this run {shown[1]}")
    return lines


def _tensor_info(info: Mapping[str, Any]) -> TensorInfo:
    chunks = tuple(Chunk(tuple(c["offsets"]), tuple(c["sizes"]), c["file"], c["key"]) for c in info["chunks"])
    return TensorInfo(info["dtype"], tuple(info["size"]), chunks)


def _check_names(manifest: Manifest, path: Path) -> None:
    used = {chunk.file for info in manifest.tensors.values() for chunk in info.chunks} | {file for file, _ in manifest.values.values()}
    for name in used | manifest.files.keys():
        check_file_name(name, path)
    if lost := sorted(used - manifest.files.keys()):
        raise CheckpointError(f"{path} reads from {lost[0]} but holds no checksum of it: the manifest is inconsistent")
    for reference in manifest.stores:
        if not SNAPSHOT_NAME.fullmatch(reference.snapshot):
            raise CheckpointError(f"{path} refers to the snapshot {reference.snapshot!r}, which is none of ours: the manifest was changed")
    for name, info in manifest.tensors.items():
        if info.dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {info.dtype!r}")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
