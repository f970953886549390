"""Counters of the tiered tables of a model, summed over its row groups on this rank."""

from torch import nn

from torchrec_kstep.sharding.tiered.state import PrefetchesRows, kernels_of
from torchrec_kstep.storage.stats import StoreStats

_NOT_SUMMABLE = ("_ratio", "_mean")  # of one store each


def tier_scalars(model: nn.Module) -> dict[str, float]:
    """Returns counters by name since the tables were opened; empty for a model without tiered tables. Not collective.

    Rows on SSD add `hit_ratio`, rows found in the cache over rows asked for.
    """
    sums: dict[str, float] = {}
    for module in model.modules():
        if not isinstance(module, PrefetchesRows):
            continue
        for kernel in kernels_of(module._lookups):
            stats = StoreStats.of(kernel.group.counters())
            for counters in (*stats.tables.values(), stats.store):
                for name, value in counters.items():
                    if not name.endswith(_NOT_SUMMABLE):
                        sums[name] = sums.get(name, 0.0) + value
    asked = sum(sums.get(name, 0.0) for name in ("hits_rows", "misses_rows", "first_touches_rows"))
    return sums | {"hit_ratio": sums["hits_rows"] / asked} if asked else sums
