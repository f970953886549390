"""TieredTables: a row group whose rows live on SSD, with a cache in DRAM that knows the next batches."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from torchrec_kstep.errors import StorageError, StorageIOError
from torchrec_kstep.ops import _library
from torchrec_kstep.ops.batch import Dedup, TableSpec
from torchrec_kstep.ops.row_group import RowGroup, table_arguments
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.storage._errors import store_errors
from torchrec_kstep.storage.division import RecordLayout, divide_dram, payload_bytes
from torchrec_kstep.storage.estimate import estimate
from torchrec_kstep.storage.replay import ReplayState
from torchrec_kstep.storage.segments import SegmentInfo, SpaceUsage
from torchrec_kstep.storage.snapshot import Snapshot, check_headers, read_manifest, replay_state
from torchrec_kstep.storage.stats import StoreStats
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import format_bytes
from torchrec_kstep.world import World

_USES_PER_STEP = 2  # the lookup and the update; each is a batch to the compiled store
_FOLDERS_HINT = "name folders in ssd_paths, one per drive, that this user may write and make folders in"
_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")


class TieredTables(RowGroup):
    """A `RowGroup` over a row store: the same results as `RowGroup.in_dram`, bit for bit, for any cache and prefetch.

    Example::

        config = TierConfig(dram_bytes="8GiB", ssd_paths=["/nvme0/run1"])
        with TieredTables.open(tables, AdamSpec(lr=1e-3), config) as group:
            for batch, dedup in group.lookahead(batches, lambda b: group.dedup(b.ids, b.offsets, features)):
                ...                                              # as with any RowGroup
            group.snapshot("step-1000")

    Only a snapshot survives the process: `close` writes nothing, and opening with `restore="step-1000"` continues from there.
    One store per rank; it is locked while it is open. Calls may come from several threads and then wait for one another.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: OptimizerSpec,
        open_store: Callable[[str], Any],
        restore: str,
        paths: tuple[str, ...],
        lookahead: int,
    ) -> None:
        """Opens a native store by `open_store`, which takes the snapshot to continue from ("": none); use `open`."""
        self._store = open_store(restore)
        super().__init__(tables, optimizer, self._store.source())
        self.paths = paths
        self.announcement = ""
        self._open_native = open_store
        self._num_lookahead_batches = lookahead
        self._is_deferred = False
        self._is_tracking = True
        self._lr_and_step: tuple[float, int] | None = None
        if restore:
            self._resume_replay(restore)

    @classmethod
    def open(
        cls,
        tables: Sequence[TableSpec],
        optimizer: OptimizerSpec,
        config: TierConfig,
        restore: str | None = None,
        world: World | None = None,
    ) -> Self:
        """Opens the store of this rank, making its folders where there are none, and logs what memory it will take.

        Args:
            tables: at least one; `name` unique, and `table_id` unique except for column shards, which differ in `first_column`.
            optimizer: how rows are updated, which says what a row's record holds.
            config: sizes and places of the host.
            restore: snapshot to continue from; None: no row has a record yet (snapshots on the paths are kept).
            world: which rank of the host this is; None: the only one.

        Raises:
            ConfigError: a table differs from the snapshot's, or the paths are not those of one store.
            CorruptionError: the snapshot is damaged, or a header is damaged or lost.
            StorageError: another process has the store open, there is no such snapshot, or the medium fails.
        """
        _library.load()
        world = world or World()
        tiers = config.for_rank(world.local_rank, world.local_world_size)
        for path in tiers.ssd_paths:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageIOError(f"cannot make the folder for the row store at {path}: {error}; {_FOLDERS_HINT}") from error
        check_headers(tiers.ssd_paths)
        layouts = [RecordLayout.of(payload_bytes(table, optimizer), config.num_segment_bytes) for table in tables]
        cache_bytes = divide_dram(tables, [layout.slot_bytes for layout in layouts], tiers.dram_bytes)
        options = native_options(config, tiers.ssd_bytes)

        def open_store(snapshot: str) -> Any:
            return torch.classes.kstep.TieredStore.open(
                *table_arguments(tables, optimizer), list(tiers.ssd_paths), cache_bytes, snapshot, config.io_backend, options
            )

        with store_errors(tiers.ssd_paths):
            group = cls(tables, optimizer, open_store, restore or "", tiers.ssd_paths, config.lookahead)
        group.announcement = (
            f"row store at {', '.join(group.paths)} ({group.io_backend}): "
            f"{estimate(tables, optimizer, tiers.dram_bytes, config).describe_memory()}"
            + ("" if tiers.ssd_bytes is None else f"; at most {format_bytes(tiers.ssd_bytes)} on SSD")
        )
        _log.info(group.announcement)
        return group

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Closes the store."""
        self.close()

    def prefetch(self, batch: Dedup) -> None:
        """Says that `batch` will be looked up soon and, where gradients are recorded, updated after that; never changes a result.

        A step needs the rows of a batch twice. They are kept from the lookup to the update, so that the update never waits.
        """
        for _ in range(_USES_PER_STEP if torch.is_grad_enabled() else 1):
            super().prefetch(batch)

    def lookahead(
        self, batches: Iterable[_Item], dedup: Callable[[_Item], Dedup], num_batches: int | None = None
    ) -> Iterator[tuple[_Item, Dedup]]:
        """Yields every batch with its unique rows, having told the store of the next ones; never changes a result.

        Args:
            batches: in the order in which they are looked up.
            dedup: gives the unique rows of a batch, e.g. by `RowGroup.dedup`.
            num_batches: how many batches are known ahead; None: `lookahead` of the configuration.
        """
        ahead = self._num_lookahead_batches if num_batches is None else min(num_batches, self._num_lookahead_batches)
        source = iter(batches)
        known: deque[tuple[_Item, Dedup]] = deque()
        is_exhausted = False
        try:
            while True:
                while not is_exhausted and len(known) <= ahead:
                    try:
                        item = next(source)
                    except StopIteration:
                        is_exhausted = True
                        break
                    unique = dedup(item)
                    if ahead > 0:
                        self.prefetch(unique)
                    known.append((item, unique))
                if not known:
                    return
                yield known.popleft()
        finally:
            # Left early, or the last batch was not updated: what is still waited for will not come.
            self.cancel_prefetch()

    def cancel_prefetch(self) -> None:
        """Forgets every batch that was told ahead and not looked up yet; does nothing once closed."""
        if self._store is not None:
            self._store.cancel_prefetch()

    def replay(self, batch: Dedup) -> None:
        """Brings up the rows of a batch and marks them as changed, without computing anything: a step as the store sees it.

        For measuring the store alone, and for warming the cache. Rows without a record get one, with their initial values.
        """
        with store_errors(self.paths):
            self._open_store().replay(batch.unique_rows, batch.table_offsets)

    def snapshot(self, name: str, note: str = "") -> None:
        """Makes the present state of all rows durable under a name; costs what changed since the last snapshot.

        Args:
            name: 1 to 64 letters, digits, `_`, `-`, `.`; not used yet.
            note: kept with the snapshot and returned by `Snapshot.note`.

        Raises:
            ConfigError: the name is taken or malformed.
            StorageError: gradients are pending, another thread is amid an update, or the medium fails; earlier snapshots stay good.
        """
        if self.num_pending:
            raise StorageError(
                f"snapshot {name!r} of the row store at {self.paths[0]}: gradients of {self.num_pending} backwards are "
                "pending; apply them first"
            )
        envelope = {"note": note, "created_unix_s": time.time(), "counters": self.counters()}
        replay = ReplayState.of(self, 1 if self._lr_and_step is None else self._lr_and_step[1])
        if replay is not None:
            envelope["l2_replay"] = replay.as_json()
        with store_errors(self.paths):
            self._open_store().snapshot(name, json.dumps(envelope))

    def restore(self, name: str) -> None:
        """Goes back to a snapshot in place: whoever holds this group finds the rows as they were then.

        Rows changed since the last snapshot, pending gradients and batches told ahead are forgotten; counters start anew.
        Lookups made before must not be sent backward afterwards.

        Raises:
            StorageError: there is no such snapshot, and nothing was changed; or the medium fails, and the store is closed.
            CorruptionError: the snapshot is damaged; the store is closed.
        """
        if name not in self.snapshots():
            raise StorageError(f"the row store at {self.paths[0]} has no snapshot {name!r}; it has {', '.join(self.snapshots()) or 'none'}")
        tracked = dict(self._tracked)
        self.close()
        with store_errors(self.paths):
            store = self._open_native(name)
            self._take_source(store.source())
        self._store = store
        for (table, tracker), fields in tracked.items():
            self.track(tracker, fields, [table])
        if not self._is_tracking:
            self.set_tracking(False)
        self.set_deferred(self._is_deferred)
        if self._lr_and_step is not None:
            self.set_step(*self._lr_and_step)
        self._resume_replay(name)

    def _resume_replay(self, name: str) -> None:
        """Where absent rows replay their L2: goes on at the step at which the snapshot was made."""
        if self.optimizer is None or not self.optimizer.replays_l2:
            return
        with store_errors(self.paths):
            manifest = json.loads(read_manifest(self.paths, name).partition(b"\n")[0])
        state = replay_state(manifest, f"snapshot {name!r} of the row store at {self.paths[0]}")
        if state is not None:
            state.hand_over(self)

    def set_step(self, lr: float, step: int) -> None:
        """As in `RowGroup`."""
        super().set_step(lr, step)
        self._lr_and_step = (lr, step)

    def set_tracking(self, is_tracking: bool) -> None:
        """As in `RowGroup`."""
        super().set_tracking(is_tracking)
        self._is_tracking = is_tracking

    def set_deferred(self, is_deferred: bool) -> None:
        """As in `RowGroup`."""
        super().set_deferred(is_deferred)
        self._is_deferred = is_deferred

    def remove_snapshot(self, name: str) -> None:
        """Deletes a snapshot; the space of what only it held is free afterwards."""
        with store_errors(self.paths):
            self._open_store().remove_snapshot(name)

    def snapshots(self) -> list[str]:
        """Names of the snapshots that can be restored, newest last."""
        with store_errors(self.paths):
            return list(self._open_store().snapshots())

    def read_snapshot(self, name: str) -> Snapshot:
        """Opens a snapshot for reading while training goes on."""
        return Snapshot.open(self.paths, name)

    def usage(self) -> SpaceUsage:
        """Where the bytes are."""
        with store_errors(self.paths):
            return SpaceUsage(**dict(self._open_store().usage()))

    def segment_map(self) -> list[SegmentInfo]:
        """Every segment of the live log."""
        with store_errors(self.paths):
            return [SegmentInfo.of(dict(segment)) for segment in self._open_store().segment_map()]

    def stats(self) -> StoreStats:
        """Counters by table and by name since the store was opened."""
        return StoreStats.of(self.counters())

    @property
    def io_backend(self) -> str:
        """Which way of reading and writing was chosen: "io_uring" or "threads"."""
        with store_errors(self.paths):
            return str(self._open_store().io_backend())

    @property
    def cache_memory_bytes(self) -> int:
        """DRAM of the cache as it is now, overflow of batches larger than it included."""
        with store_errors(self.paths):
            return int(self._open_store().cache_memory_bytes())

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._store is None

    def close(self) -> None:
        """Ends the store and gives its lock back; rows changed since the last snapshot are gone. Closing twice is fine.

        Raises:
            StorageError: a lookup or an update is running in another thread.
        """
        if self._store is None:
            return
        with store_errors(self.paths):
            self._store.close()
        self._store = None

    def _open_store(self) -> Any:
        if self._store is None:
            raise StorageError(f"row store at {self.paths[0]} is closed; open it again to use its rows")
        return self._store


def _normal(weights: Sequence[float] | None) -> list[float]:
    """Weights over the largest of them."""
    return [weight / max(weights) for weight in weights] if weights else []


def native_options(config: TierConfig, ssd_bytes: int | None) -> dict[str, int]:
    """Options of the compiled store, by name."""
    weights = {f"path_weight_{path}": round(weight * 10_000) for path, weight in enumerate(_normal(config.path_weights))}
    limits = {f"path_bytes_per_s_{path}": math.ceil(float(limit)) for path, limit in enumerate(config.path_limits or ())}
    return {
        **weights,
        **limits,
        "quota_bytes": ssd_bytes or 0,
        "segment_bytes": config.num_segment_bytes,
        "space_percent": round(config.space_factor * 100),
        "queue_depth": config.queue_depth,
        "prefetch_depth": config.prefetch_depth * _USES_PER_STEP,
        "lookahead": (config.lookahead + 1) * _USES_PER_STEP,  # the batch in use is among those known
    }
