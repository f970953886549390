"""Storage for `torch.distributed.checkpoint`: safetensors and a JSON manifest in place of its pickles.

Every rank writes one file into `<name>.tmp`; the coordinator writes the manifest when all are durable, and renames the
folder to `<name>`. A folder with that name is therefore complete, and one that ends in `.tmp` never is.
"""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchrec_kstep.checkpoint.files import DTYPES, Entry, FileInfo, remove_folder, row_blocks, sync_folder, write_safetensors, write_text
from torchrec_kstep.checkpoint.manifest import MANIFEST_NAME, Chunk, Manifest, TensorInfo
from torchrec_kstep.errors import CheckpointError

TMP_SUFFIX = ".tmp"


class JsonSavePlanner(DefaultSavePlanner):
    """Plans a flat state; what is no tensor becomes JSON text."""

    def __init__(self) -> None:
        """Takes the state as it is: flat, shards not nested."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Encodes values; leaves tensors."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return object


class JsonLoadPlanner(DefaultLoadPlanner):
    """The other half of `JsonSavePlanner`."""

    def __init__(self) -> None:
        """Expects a flat state."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decodes a value into the state."""
        self.state_dict[read_item.dest_index.fqn] = json.loads(value.getvalue())


@dataclasses.dataclass(frozen=True)
class _Written:
    """Where an item went, sent to the coordinator."""

    file: str
    key: str
    info: FileInfo


class SnapshotWriter(StorageWriter):
    """Writes one checkpoint `<folder>/<name>` and publishes it by a rename."""

    def __init__(self, folder: Path, name: str, manifest: Manifest) -> None:
        """`manifest` holds all but tensors, values and files, which the coordinator fills in."""
        self._folder = folder / f"{name}{TMP_SUFFIX}"
        self._target = folder / name
        self._manifest = manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset: a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        """Makes an empty folder, on the coordinator."""
        if not is_coordinator:
            return
        if self._target.exists():
            raise CheckpointError(f"{self._target} exists already: a published checkpoint is never overwritten")
        try:
            remove_folder(self._folder)  # left over from a save that was interrupted
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {self._folder}: {error.strerror}") from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leaves the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names one file per rank."""
        return [dataclasses.replace(plan, storage_data=f"rank_{rank:04d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file."""
        file: str = plan.storage_data
        entries = {item.index: _entry(item, planner) for item in plan.items}
        future: Future[list[WriteResult]] = Future()
        if not entries:
            future.set_result([])
            return future
        info = write_safetensors(self._folder / file, entries.values())
        future.set_result([WriteResult(index, entry.num_bytes, _Written(file, entry.key, info)) for index, entry in entries.items()])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest and publishes the folder. On the coordinator, when all ranks have written."""
        where = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors, values = {}, {}
        for name, info in metadata.state_dict_metadata.items():
            if isinstance(info, TensorStorageMetadata):
                tensors[name] = _describe(name, info, where)
            else:
                written = where[MetadataIndex(name)]
                values[name] = (written.file, written.key)
        files = {written.file: written.info for written in where.values()}
        manifest = dataclasses.replace(self._manifest, tensors=tensors, values=values, files=dict(sorted(files.items())))
        write_text(self._folder / MANIFEST_NAME, manifest.dumps())
        sync_folder(self._folder)
        self._folder.rename(self._target)
        sync_folder(self._target.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Ids are not used to choose a storage."""
        del checkpoint_id
        return False


def _entry(item: WriteItem, planner: SavePlanner) -> Entry:
    """What to write for a planned item; tensors are fetched when their turn comes."""
    if item.type == WriteItemType.BYTE_IO:
        text = planner.resolve_data(item)
        assert isinstance(text, io.BytesIO)
        data = torch.frombuffer(bytearray(text.getvalue()), dtype=torch.uint8)
        return Entry(item.index.fqn, torch.uint8, data.size(), lambda: data)

    def fetch() -> torch.Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    key = f"{item.index.fqn}@{'x'.join(map(str, chunk.offsets))}"
    return Entry(key, item.tensor_data.properties.dtype, chunk.sizes, fetch)


def _describe(name: str, info: TensorStorageMetadata, where: dict[MetadataIndex, _Written]) -> TensorInfo:
    chunks = []
    for chunk in info.chunks:
        written = where[MetadataIndex(name, chunk.offsets)]
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), written.file, written.key))
    return TensorInfo(str(info.properties.dtype).removeprefix("torch."), tuple(info.size), tuple(chunks))


class SnapshotReader(StorageReader):
    """Reads from a published checkpoint whose manifest was checked already."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Files are opened when they are read, each rank only those that hold its shards."""
        self._folder = folder
        self._manifest = manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset: a reader serves one checkpoint."""

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Translates the manifest."""
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = dict.fromkeys(self._manifest.values, BytesStorageMetadata())
        where = {MetadataIndex(name): location for name, location in self._manifest.values.items()}
        for name, info in self._manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in info.chunks]
            described[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[info.dtype]), torch.Size(info.size), chunks)
            where |= {MetadataIndex(name, chunk.offsets): (chunk.file, chunk.key) for chunk in info.chunks}
        return Metadata(state_dict_metadata=described, storage_data=where)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        """Takes over where everything lies."""
        del is_coordinator
        self._where: dict[MetadataIndex, tuple[str, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leaves the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leaves the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what this rank asked for into its tensors; only those parts of a file are read."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._where[item.storage_index][0], []).append(item)
        for file, items in by_file.items():
            with safe_open(str(self._folder / file), framework="pt") as opened:
                for item in items:
                    self._read_item(opened, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, opened: Any, item: ReadItem, planner: LoadPlanner) -> None:
        key = self._where[item.storage_index][1]
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(opened.get_tensor(key).numpy().tobytes()))
            return
        target = planner.resolve_tensor(item).detach()
        assert target.size() == item.lengths
        if not target.ndim:
            target.copy_(opened.get_tensor(key))
        else:
            source = opened.get_slice(key)
            first, *others = [slice(offset, offset + length) for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
            for rows in row_blocks(target.size(), target.dtype):
                target[rows].copy_(source[(slice(first.start + rows.start, first.start + rows.stop), *others)])
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Ids are not used to choose a storage."""
        del checkpoint_id
        return False
