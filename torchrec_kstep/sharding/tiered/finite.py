"""Tells which tiered tables hold values that are no numbers."""

from torch import nn

from torchrec_kstep.sharding.tiered.state import PrefetchesRows, kernels_of


def tables_not_finite(model: nn.Module) -> list[str]:
    """Names the tiered tables of which a row that this rank looked up last holds NaN or infinity. Not collective."""
    collections = [module for module in model.modules() if isinstance(module, PrefetchesRows)]
    tables = [table for module in collections for kernel in kernels_of(module._lookups) for table in kernel.tables_not_finite()]
    return list(dict.fromkeys(tables))
