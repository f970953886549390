"""What KStepAdam asks of a sharded model: tables that can be merged, the plan, the buffers."""

from collections.abc import Sequence

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim.period import Period
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding.tiered.kernel import TieredKernel
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.sharding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection


def check_settings(variant: str, spec: MergeSpec, period: Period) -> None:
    """Refuses what contradicts itself; lists every finding."""
    findings = []
    if variant not in ("local", "frozen"):
        findings.append(f"variant is {variant!r}, expected 'local' or 'frozen'")
    if variant == "frozen" and spec.overlap_steps:
        findings.append(
            f"variant='frozen' with overlap_steps={spec.overlap_steps}: replicas are not equal when a late round ends, so no second moment "
            "is common; choose overlap_steps=0"
        )
    if spec.row_states != "all" and period.returns_to_one:
        findings.append(
            f"row_states={spec.row_states!r} with k = {period}: synchronous steps need equal moments, which replicas keep to themselves; "
            "choose row_states='all', or no k = 1 after a larger one"
        )
    if findings:
        raise ConfigError("KStepAdam: " + "; ".join(findings))


def check_tables(dmp: DistributedModelParallel, kernels: Sequence[TieredKernel], merges_rows: bool) -> None:
    """Refuses tables that cannot be merged; lists every finding."""
    findings = []
    for path, module in dmp.module.named_modules():
        if not isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            continue
        for table, sharding in module.module_sharding_plan.items():
            if sharding.compute_kernel != CUSTOMIZED_KERNEL:
                findings.append(
                    f"table {table!r} of {path!r} has the kernel {sharding.compute_kernel!r}, whose touched rows and states are not ours "
                    f'to merge: give it compute_kernel="{CUSTOMIZED_KERNEL}" (planner.kernel=tiered)'
                )
    for kernel in kernels:
        spec = kernel.group.optimizer
        names = ", ".join(table.name for table in kernel.group.tables[:3])
        if not isinstance(spec, AdamSpec):
            findings.append(f"tables {names} are stepped by {type(spec).__name__}: replicas are merged by the rules of Adam; give AdamSpec")
        elif merges_rows and spec.touches == "none":
            findings.append(f'tables {names} do not count touches: give their sharder AdamSpec(..., touches="count")')
    if findings:
        raise ConfigError("KStepAdam with several replicas:\n  " + "\n  ".join(findings))


def counts_touches(group: RowGroup) -> bool:
    """Whether the rows of a group can count their updates."""
    return group.optimizer is not None and group.optimizer.touches != "none"


def plan_of(dmp: DistributedModelParallel) -> ShardingPlan:
    """Returns the plan by which the tables of a model are sharded."""
    return ShardingPlan(
        {
            path: module.module_sharding_plan
            for path, module in dmp.module.named_modules()
            if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
        }
    )


def buffers_of(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Returns the buffers outside of sharded collections."""
    prefixes = tuple(
        f"{path}."
        for path, module in dmp.module.named_modules()
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
    )
    return {name: buffer for name, buffer in dmp.module.named_buffers() if not name.startswith(prefixes)}
