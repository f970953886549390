"""What KStepAdam asks of a sharded model: tables that can be merged, the plan, the buffers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim.clipping import ClipCovers
from torchrec_kstep.optim.period import Period
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding.plain import STATELESS, WITH_SUMS, FusedKernel, PlainKernel
from torchrec_kstep.sharding.tiered.kernel import TieredKernel
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.plain_kernel import fused_kernels
from torchrec_kstep.torchrec_seam.sharding import EmbeddingComputeKernel, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

_MERGED_KERNELS = (CUSTOMIZED_KERNEL, EmbeddingComputeKernel.DENSE.value, EmbeddingComputeKernel.FUSED.value)


def check_settings(variant: str, clip_covers: str, spec: MergeSpec, period: Period) -> None:
    """Refuses what contradicts itself; lists every finding."""
    findings = []
    if variant not in ("local", "frozen"):
        findings.append(f"variant is {variant!r}, expected 'local' or 'frozen'")
    if clip_covers not in get_args(ClipCovers):
        findings.append(f"clip_covers is {clip_covers!r}, expected 'dense' or 'all'")
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


def table_spec(given: AdamSpec, merge: MergeSpec, variant: str, is_amsgrad: bool) -> AdamSpec:
    """Returns the rule by which rows with the dense kernel are updated, with what rounds need beside it."""
    return replace(
        given,
        touches="count",
        num_trackers=merge.num_trackers,
        step_per_moment=given.bias_correction == "row" and merge.m_period_rounds != merge.v_period_rounds,
        frozen=variant == "frozen",
        amsgrad=variant == "frozen" and is_amsgrad,
    )


def check_replicated(tables: Iterable[str]) -> None:
    """Refuses tables whose gradients DDP averages over all ranks of the job; `tables` are their parameters' names."""
    if names := ", ".join(list(tables)[:3]):
        raise ConfigError(
            f"KStepAdam: tables {names} are sharded data_parallel: TorchRec averages their gradients over all ranks of the job in every "
            "step, not over those of a replica; choose another sharding"
        )


def check_clipping(dmp: DistributedModelParallel) -> None:
    """Refuses tables that step inside backward, where a bound on the norm of all gradients is to scale theirs too."""
    fused = [table.name for _, kernel in fused_kernels(dmp.module) for table in kernel.config.embedding_tables]
    if names := ", ".join(fused[:3]):
        raise ConfigError(
            f"KStepAdam: clip_covers='all' with tables {names} that FBGEMM steps inside backward, before the norm of all gradients is "
            f"known: choose clip_covers='dense', or give them compute_kernel={CUSTOMIZED_KERNEL!r} (planner.kernel=tiered) or 'dense'"
        )


def check_tables(dmp: DistributedModelParallel, kernels: Sequence[TieredKernel | PlainKernel], merge: MergeSpec, period: Period) -> None:
    """Refuses tables that cannot be merged; lists every finding."""
    findings = []
    for path, module in dmp.module.named_modules():
        if not isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            continue
        for table, sharding in module.module_sharding_plan.items():
            if sharding.compute_kernel not in _MERGED_KERNELS:
                findings.append(
                    f"table {table!r} of {path!r} has the kernel {sharding.compute_kernel!r}, whose rows are not ours to merge: give it "
                    f'compute_kernel="{CUSTOMIZED_KERNEL}" (planner.kernel=tiered), "dense", or "fused" with SGD'
                )
    for kernel in kernels:
        if isinstance(kernel, FusedKernel):
            findings += _fused_findings(kernel, merge, period)
            continue
        spec = kernel.group.optimizer
        names = ", ".join(table.name for table in kernel.group.tables[:3])
        if not isinstance(spec, AdamSpec):
            findings.append(f"tables {names} are stepped by {type(spec).__name__}: replicas are merged by the rules of Adam; give AdamSpec")
        elif period.largest > 1 and spec.touches == "none":
            findings.append(f'tables {names} do not count touches: give their sharder AdamSpec(..., touches="count")')
    if findings:
        raise ConfigError("KStepAdam with several replicas:\n  " + "\n  ".join(findings))


def _fused_findings(kernel: FusedKernel, merge: MergeSpec, period: Period) -> list[str]:
    """Says why replicas cannot merge tables that FBGEMM updates inside backward."""
    update = f"tables {', '.join(table.name for table in kernel.group.tables[:3])} are stepped by {kernel.optimizer} inside backward"
    instead = f'give them compute_kernel="{CUSTOMIZED_KERNEL}" (planner.kernel=tiered) or "dense"'
    findings = []
    if kernel.optimizer not in (*STATELESS, *WITH_SUMS):
        findings.append(f"{update}, of whose states nothing is known here: {instead}")
    elif kernel.optimizer in WITH_SUMS and merge.row_states != "weights":
        findings.append(f"{update}, whose sums no round merges: {instead}, or let each replica keep its own (row_states='weights')")
    if period.smallest == 1:
        findings.append(f"{update}, before replicas could average gradients, which k = {period} asks for: choose k > 1, or {instead}")
    return findings


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
