"""Counters of a row store by table and by name; never by position."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_kstep.units import format_bytes, format_seconds

# Counters of the whole store; the compiled library repeats them in every table.
STORE_COUNTERS = frozenset(
    {
        "device_written_bytes",
        "write_amplification_ratio",
        "cleaner_read_bytes",
        "cleaner_written_bytes",
        "cleaner_share_ratio",
        "cleaner_s",
        "cleaner_stall_s",
        "queue_depth_mean",
        "live_unit_bytes",
        "unheld_bytes",
        "snapshot_bytes",
        "snapshot_only_bytes",
        "open_files_count",
        "dropped_hints_count",
        "failed_prefetches_count",
    }
)
PER_PATH = ("path_read_bytes_", "path_written_bytes_")  # counters of the whole store too, followed by the index of the path
# States, not sums over time: a difference of two of them means nothing.
_GAUGES = frozenset(
    {
        "live_unit_bytes",
        "unheld_bytes",
        "snapshot_bytes",
        "snapshot_only_bytes",
        "open_files_count",
        "materialised_rows",
        "index_bytes",
        "cache_slots_count",
    }
)


@dataclass(frozen=True)
class StoreStats:
    """Counters at one moment.

    Attributes:
        tables: counters of each table, e.g. `tables["user"]["hits_rows"]`. `hits_rows` were in the cache, `misses_rows` were
            read from SSD, `first_touches_rows` had no record yet and were computed; `stall_s` is the time lookups waited.
        store: counters of the whole store, e.g. `store["write_amplification_ratio"]`.
    """

    tables: Mapping[str, Mapping[str, float]]
    store: Mapping[str, float]

    @classmethod
    def of(cls, counters: Mapping[str, Mapping[str, float]]) -> "StoreStats":
        """Splits counters by table, as a row group returns them."""
        tables = {table: {name: value for name, value in values.items() if not _is_of_store(name)} for table, values in counters.items()}
        first = next(iter(counters.values()), {})
        return cls(tables, {name: value for name, value in first.items() if _is_of_store(name)})

    def total(self, name: str) -> float:
        """Sum of a counter over the tables."""
        return sum(values[name] for values in self.tables.values())

    @property
    def accesses_rows(self) -> float:
        """Rows asked for: hits, misses and first touches."""
        return self.total("hits_rows") + self.total("misses_rows") + self.total("first_touches_rows")

    @property
    def hit_ratio(self) -> float:
        """Rows found in the cache over rows asked for; 0 before the first."""
        return self.total("hits_rows") / self.accesses_rows if self.accesses_rows else 0.0

    @property
    def clairvoyant_ratio(self) -> float:
        """Hits over those of a cache that knows the future, over the tables where enough was seen to say; 0 for none."""
        known = [values for values in self.tables.values() if values.get("clairvoyant_ratio", 0.0) > 0]
        hits = sum(values["hits_rows"] for values in known)
        return sum(values["clairvoyant_ratio"] * values["hits_rows"] for values in known) / hits if hits else 0.0

    @property
    def index_bytes_per_row(self) -> float:
        """DRAM of the index over rows that have a record; 0 while there is none."""
        rows = self.total("materialised_rows")
        return self.total("index_bytes") / rows if rows else 0.0

    def since(self, earlier: "StoreStats") -> "StoreStats":
        """Counts between two moments; what is a state or a ratio is that of the later one."""
        tables = {table: _difference(values, earlier.tables.get(table, {})) for table, values in self.tables.items()}
        return StoreStats(tables, _difference(self.store, earlier.store))

    def describe(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.accesses_rows:,.0f} rows asked for, {self.hit_ratio:.1%} from the cache"
            + (f" ({self.clairvoyant_ratio:.0%} of what a cache knowing the future reaches)" if self.clairvoyant_ratio else "")
            + f", {self.total('misses_rows'):,.0f} read, {self.total('first_touches_rows'):,.0f} computed; "
            f"waited {format_seconds(self.total('stall_s'))}",
            f"{self.total('materialised_rows'):,.0f} rows have a record; index {format_bytes(self.total('index_bytes'))}"
            f" ({self.index_bytes_per_row:.1f} bytes a row)",
        ]
        if self.store:
            lines.append(
                f"read {format_bytes(self.total('read_bytes'))}, wrote {format_bytes(self.store['device_written_bytes'])} "
                f"(write amplification {self.store['write_amplification_ratio']:.2f}, cleaner {self.store['cleaner_share_ratio']:.0%}), "
                f"mean queue depth {self.store['queue_depth_mean']:.1f}"
            )
        return "\n".join(lines)


def _is_of_store(name: str) -> bool:
    return name in STORE_COUNTERS or name.startswith(PER_PATH)


def _difference(later: Mapping[str, float], earlier: Mapping[str, float]) -> dict[str, float]:
    def is_state(name: str) -> bool:
        return name in _GAUGES or name.endswith(("_ratio", "_mean"))

    return {name: value if is_state(name) else value - earlier.get(name, 0.0) for name, value in later.items()}
