"""How much DRAM and SSD the rows of tables may use: a value type, the same for every device.

Only values and their checks live here; no tensor library, no file is opened.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.units import MIB, format_bytes, parse_bandwidth, parse_bytes

IoBackend = Literal["auto", "uring", "threads"]
MAX_PATHS = 16
MAX_PREFETCH_DEPTH = 1024
MIN_SEGMENT_BYTES = 1 << 16
MAX_SEGMENT_BYTES = 1 << 30
MIN_SEGMENTS = 4  # fewer leave the cleaner no room to copy


@dataclass(frozen=True)
class TierConfig:
    """Sizes and places of the tiers of one host, divided over its ranks by `for_rank`.

    Sizes are texts with a unit (`"8GiB"`) or integers, which count bytes.

    Attributes:
        dram_bytes: DRAM for cached rows, with the cache's own bookkeeping; 0 works. The index of the rows on SSD and fixed
            I/O buffers come on top: `TieredTables.announcement` and `store estimate` say how much.
        ssd_paths: one folder per drive; at most 16. Each rank makes a folder of its own below each of them.
        ssd_bytes: hard quota over all paths, snapshots included; None: what the drives hold. Sharders divide it over the row stores
            of a plan: four segments for each, the least it needs, and the rest by the bytes of their rows.
        segment_bytes: size of the files in which rows are written.
        prefetch_depth: batches whose rows are brought up ahead of the one in use; 0 reads when rows are needed.
        lookahead: batches whose rows the cache may know ahead for choosing what to evict; at least `prefetch_depth`.
        io_backend: "uring" and "threads" insist on one way to read and write, "auto" probes for the faster one.
        space_factor: bytes on SSD, without those held by snapshots, over the bytes of current rows; the cleaner's bound.
        queue_depth: reads in flight.
        path_weights: part of the rows on each path, over their sum; None: equal parts. May differ from one opening to the next.
        path_limits: most bytes per second that one row store asks of each path, reads and writes together, "50MB/s" or a number;
            "" or 0: no bound. For drives that others use too, and to let a fast drive stand for a slow one. None: no bounds.
    """

    dram_bytes: str | int
    ssd_paths: Sequence[str | Path]
    ssd_bytes: str | int | None = None
    segment_bytes: str | int = 64 * MIB
    prefetch_depth: int = 2
    lookahead: int = 8
    io_backend: IoBackend = "auto"
    space_factor: float = 1.5
    queue_depth: int = 128
    path_weights: Sequence[float] | None = None
    path_limits: Sequence[str | float] | None = None

    def __post_init__(self) -> None:
        """Turns sizes into bytes and paths into texts, and collects every fault of the values."""
        faults: list[str] = []
        for name in ("dram_bytes", "ssd_bytes", "segment_bytes"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, parse_bytes(value) if isinstance(value, str) else value)
            except ConfigError as error:
                faults.append(f"{name}: {error}")
        try:
            limits = [parse_bandwidth(limit) if limit and isinstance(limit, str) else limit or 0.0 for limit in self.path_limits or ()]
            object.__setattr__(self, "path_limits", tuple(limits) or None)
        except ConfigError as error:
            faults.append(f"path_limits: {error}")
        if self.path_weights is not None:
            object.__setattr__(self, "path_weights", tuple(map(float, self.path_weights)))
        paths = (self.ssd_paths,) if isinstance(self.ssd_paths, str | Path) else self.ssd_paths
        object.__setattr__(self, "ssd_paths", tuple(str(path) for path in paths))
        faults += self._faults() if not faults else []
        if faults:
            raise ConfigError("TierConfig: " + "; ".join(faults))

    def _faults(self) -> list[str]:
        faults = []
        segment_bytes, ssd_bytes = self.num_segment_bytes, self.num_ssd_bytes
        if self.num_dram_bytes < 0:
            faults.append(f"dram_bytes is {self.dram_bytes}, expected 0 or more")
        if not 1 <= len(self.ssd_paths) <= MAX_PATHS:
            faults.append(f"{len(self.ssd_paths)} ssd_paths, expected 1 to {MAX_PATHS}")
        if len({Path(path).resolve() for path in self.ssd_paths}) < len(self.ssd_paths):
            faults.append(f"an ssd_path is given twice: {', '.join(map(str, self.ssd_paths))}")
        faults += self._path_faults()
        if not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
            expected = f"{format_bytes(MIN_SEGMENT_BYTES)} to {format_bytes(MAX_SEGMENT_BYTES)}"
            faults.append(f"segment_bytes is {format_bytes(segment_bytes)}, expected {expected}")
        if ssd_bytes is not None and ssd_bytes < MIN_SEGMENTS * segment_bytes:
            faults.append(
                f"ssd_bytes is {format_bytes(ssd_bytes)}, expected at least {MIN_SEGMENTS} segments of {format_bytes(segment_bytes)}"
            )
        if not 0 <= self.prefetch_depth <= MAX_PREFETCH_DEPTH:
            faults.append(f"prefetch_depth is {self.prefetch_depth}, expected 0 to {MAX_PREFETCH_DEPTH}")
        if not self.prefetch_depth <= self.lookahead <= MAX_PREFETCH_DEPTH:
            faults.append(f"lookahead is {self.lookahead}, expected prefetch_depth ({self.prefetch_depth}) to {MAX_PREFETCH_DEPTH}")
        if self.io_backend not in get_args(IoBackend):
            faults.append(f"io_backend is {self.io_backend!r}, expected {', '.join(get_args(IoBackend))}")
        if not self.space_factor >= 1.1:
            faults.append(f"space_factor is {self.space_factor}, expected at least 1.1")
        if not 1 <= self.queue_depth <= 1024:
            faults.append(f"queue_depth is {self.queue_depth}, expected 1 to 1024")
        return faults

    def _path_faults(self) -> list[str]:
        faults = []
        for name, values in (("path_weights", self.path_weights), ("path_limits", self.path_limits)):
            if values is not None and len(values) != len(self.ssd_paths):
                faults.append(f"{len(values)} {name} for {len(self.ssd_paths)} ssd_paths, expected one each")
        weights = self.path_weights
        if weights is not None and not (all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0):
            faults.append(f"path_weights are {', '.join(map(str, weights))}, expected none below 0 and one above")
        return faults

    @property
    def num_dram_bytes(self) -> int:
        """`dram_bytes` as a number."""
        assert isinstance(self.dram_bytes, int)
        return self.dram_bytes

    @property
    def num_ssd_bytes(self) -> int | None:
        """`ssd_bytes` as a number; None: no quota."""
        assert not isinstance(self.ssd_bytes, str)
        return self.ssd_bytes

    @property
    def num_segment_bytes(self) -> int:
        """`segment_bytes` as a number."""
        assert isinstance(self.segment_bytes, int)
        return self.segment_bytes

    def for_rank(self, local_rank: int, local_world_size: int) -> "RankTiers":
        """Returns the share of one rank of the host: an equal part of the bytes, and a folder of its own on each drive.

        Raises:
            ConfigError: there is no such rank, or its part of the quota is too small.
        """
        if not 0 <= local_rank < local_world_size:
            raise ConfigError(f"TierConfig: local rank {local_rank} of {local_world_size}")
        ssd_bytes = None if self.num_ssd_bytes is None else self.num_ssd_bytes // local_world_size
        if ssd_bytes is not None and ssd_bytes < MIN_SEGMENTS * self.num_segment_bytes:
            raise ConfigError(
                f"TierConfig: ssd_bytes divided over {local_world_size} ranks is {format_bytes(ssd_bytes)} each, expected at least "
                f"{MIN_SEGMENTS} segments of {format_bytes(self.num_segment_bytes)}: raise ssd_bytes or lower segment_bytes"
            )
        return RankTiers(
            dram_bytes=self.num_dram_bytes // local_world_size,
            ssd_paths=tuple(str(Path(path) / rank_folder(local_rank)) for path in self.ssd_paths),
            ssd_bytes=ssd_bytes,
        )


@dataclass(frozen=True)
class RankTiers:
    """What one rank may use.

    Attributes:
        dram_bytes: cache of the rank.
        ssd_paths: the rank's own folders, one per drive.
        ssd_bytes: the rank's quota; None: none.
    """

    dram_bytes: int
    ssd_paths: tuple[str, ...]
    ssd_bytes: int | None


def rank_folder(local_rank: int) -> str:
    """Name of a rank's folder below an `ssd_path`."""
    return f"rank-{local_rank}"
