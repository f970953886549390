"""Counters of the tiered tables of a model, summed over its row groups on this rank."""

from torch import nn

from torchrec_kstep.sharding.tiered.column_clip import ColumnClip
from torchrec_kstep.sharding.tiered.state import PrefetchesRows, kernels_of
from torchrec_kstep.storage.stats import StoreStats

_NOT_SUMMABLE = ("_ratio", "_mean")  # of one store each
PER_TABLE = ("hits_rows", "misses_rows", "first_touches_rows", "stall_s", "read_bytes", "written_bytes")  # of tables on SSD
MAX_CLIPPED_SHARE = 0.01  # CowClip fires on far fewer rows than this, unless gradients are sums where means were meant, or r < 1


def tier_scalars(model: nn.Module) -> dict[str, float]:
    """Returns counters by name since the tables were opened; empty for a model without tiered tables. Not collective.

    Rows on SSD add `hit_ratio`, rows found in the cache over rows asked for, and the counters of `PER_TABLE` for each table as
    `<counter>.<table>`, its column shards summed. Clipped tables add `clipped_share.<table>`, and those of them that are cut by
    columns `clip_exchange_bytes` and `clip_exchange_s`, what the norms of their rows have cost this rank.
    """
    sums: dict[str, float] = {}
    for module in model.modules():
        if not isinstance(module, PrefetchesRows):
            continue
        for kernel in kernels_of(module._lookups):
            stats = StoreStats.of(kernel.group.counters())
            for shard, counted in stats.tables.items():
                for name in PER_TABLE:
                    if name in counted:
                        key = f"{name}.{kernel.table_of_shard[shard]}"
                        sums[key] = sums.get(key, 0.0) + counted[name]
            for counters in (*stats.tables.values(), stats.store):
                for name, value in counters.items():
                    if not name.endswith(_NOT_SUMMABLE):
                        sums[name] = sums.get(name, 0.0) + value
    asked = sum(sums.get(name, 0.0) for name in ("hits_rows", "misses_rows", "first_touches_rows"))
    sums |= {"hit_ratio": sums["hits_rows"] / asked} if asked else {}
    for clip in column_clips(model):
        sums["clip_exchange_bytes"] = sums.get("clip_exchange_bytes", 0.0) + clip.num_bytes
        sums["clip_exchange_s"] = sums.get("clip_exchange_s", 0.0) + clip.seconds
    return sums | {f"clipped_share.{table}": share for table, share in clipped_shares(model).items()}


def column_clips(model: nn.Module) -> list[ColumnClip]:
    """Returns the clips of column-sharded tables of all collections."""
    collections = [module for module in model.modules() if isinstance(module, PrefetchesRows)]
    return [part for collection in collections for _, part in collection._optim.optimizers if isinstance(part, ColumnClip)]


def clipped_shares(model: nn.Module) -> dict[str, float]:
    """Returns, by table, the share of row updates on this rank that CowClip scaled down since the tables were opened. Not collective."""
    updated: dict[str, float] = {}
    clipped: dict[str, float] = {}
    for module in model.modules():
        if not isinstance(module, PrefetchesRows):
            continue
        for kernel in kernels_of(module._lookups):
            for shard, counters in kernel.group.counters().items():
                if "clipped_rows" in counters:
                    table = kernel.table_of_shard[shard]
                    updated[table] = updated.get(table, 0.0) + counters["updated_rows"]
                    clipped[table] = clipped.get(table, 0.0) + counters["clipped_rows"]
    return {table: clipped[table] / count for table, count in updated.items() if count}


def clip_warnings(model: nn.Module) -> list[str]:
    """Says which tables are clipped more than CowClip's own runs ever are. Not collective."""
    return [
        f"CowClip scaled down {share:.1%} of the updates of table {table!r}, expected at most {MAX_CLIPPED_SHARE:.0%}: is the loss a sum "
        "over rows instead of their mean, or optim.clip_ratio below 1?"
        for table, share in clipped_shares(model).items()
        if share > MAX_CLIPPED_SHARE
    ]
