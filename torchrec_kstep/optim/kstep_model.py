"""What KStepAdam asks of a sharded model: tables that can be merged, the plan, the buffers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_modules import ManagedCollisionModule

from torchrec_kstep.errors import CheckpointError, ConfigError
from torchrec_kstep.merge_spec import RECIPES, MergeSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim.clipping import ClipCovers
from torchrec_kstep.optim.period import Period
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec
from torchrec_kstep.sharding.plain import STATELESS, WITH_SUMS, FusedKernel, PlainKernel
from torchrec_kstep.sharding.tiered.kernel import TieredKernel
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL
from torchrec_kstep.torchrec_seam.plain_kernel import dense_kernels, fused_kernels
from torchrec_kstep.torchrec_seam.sharding import EmbeddingComputeKernel, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

_MERGED_KERNELS = (CUSTOMIZED_KERNEL, EmbeddingComputeKernel.DENSE.value, EmbeddingComputeKernel.FUSED.value)


def check_settings(
    variant: str, is_amsgrad: bool, clip_covers: str, numbers: Mapping[str, float], lr_factor: float, spec: MergeSpec, period: Period
) -> None:
    """Refuses what contradicts itself; lists every finding. `numbers`: by name, those that must not be negative."""
    findings = [
        f"{name} is {value!r}, expected a number of at least 0"
        for name, value in numbers.items()
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0)
    ]
    if variant not in ("local", "frozen"):
        findings.append(f"variant is {variant!r}, expected 'local' or 'frozen'")
    if clip_covers not in get_args(ClipCovers):
        findings.append(f"clip_covers is {clip_covers!r}, expected 'dense' or 'all'")
    if is_amsgrad and variant == "local":
        findings.append("is_amsgrad=True with variant='local', which shares no second moment that could fall; choose variant='frozen'")
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
    if not (math.isfinite(lr_factor) and lr_factor > 0):
        findings.append(f"lr_factor is {lr_factor}, expected a number above 0")
    if findings:
        raise ConfigError("KStepAdam: " + "; ".join(findings))


def check_recipe(recipe: str, merge: MergeSpec | None) -> None:
    """Refuses a recipe beside a way to merge that is not the recipe's; `merge` would win without a word."""
    if merge is not None and not isinstance(merge, MergeSpec):
        raise ConfigError(f"KStepAdam: merge is {merge!r}, expected a MergeSpec; a recipe is named by recipe=")
    if recipe not in RECIPES:
        raise ConfigError(f"KStepAdam: recipe is {recipe!r}, expected one of {', '.join(RECIPES)}")
    named = RECIPES[recipe]
    if merge is None or recipe == "default" or (merge.row_merge, merge.moments) == (named.row_merge, named.moments):
        return
    raise ConfigError(
        f"KStepAdam: recipe={recipe!r}, which is row_merge={named.row_merge!r} and moments={named.moments!r}, with a merge of "
        f"row_merge={merge.row_merge!r} and moments={merge.moments!r}: give merge=MergeSpec.of_recipe({recipe!r}, ...), or no recipe"
    )


def check_table_rule(dmp: DistributedModelParallel, given: AdamSpec) -> None:
    """Refuses a rule that tables with the dense kernel cannot follow, by their names."""
    names = [table.name for _, kernel in dense_kernels(dmp.module) for table in kernel.config.embedding_tables]
    if given.replays_l2 and names:
        raise ConfigError(
            f"KStepAdam: table_adam with l2_absent_rows='replay' for tables {', '.join(names[:3])} with the dense kernel, whose lookups "
            f"show rows without the steps they missed: choose l2_absent_rows='skip', or compute_kernel={CUSTOMIZED_KERNEL!r}"
        )


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


def check_state(own: Mapping[str, Mapping[str, object]], given: Mapping[str, Mapping[str, object]]) -> None:
    """Refuses a state of other parameters, or of the same with other moments; `own` and `given` by parameter."""
    differing = [name for name in {**own, **given} if set(own.get(name, ())) != set(given.get(name, ()))]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"the state to be loaded differs from this optimizer's in {len(differing)} of {len(own)} parameters: {name!r} has "
            f"{sorted(given.get(name, ())) or 'no state'} there and {sorted(own.get(name, ())) or 'no state'} here; load it with the "
            "model, variant and AdamSpec that saved it"
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
        if isinstance(module, ManagedCollisionModule):
            findings.append(
                f"{path!r} assigns rows to ids as they come, in every replica others, so that rounds would merge rows of different ids: "
                "hash ids to rows instead"
            )
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
        elif period.largest > 1 and spec.frozen and merge.row_states == "weights":
            findings.append(
                f"tables {names} have AdamSpec(frozen=True) with row_states='weights': no round merges their second moments, so nothing "
                "would ever be frozen; choose row_states='all', or frozen=False"
            )
    if findings:
        raise ConfigError("KStepAdam with several replicas:\n  " + "\n  ".join(findings))


def check_data_parallel(dmp: DistributedModelParallel, replica_ranks: Sequence[int]) -> None:
    """Refuses dense parameters whose gradients DDP averages over ranks of other replicas too, so that no step would be local."""
    for path, module in dmp.named_modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            if not set(ranks) <= set(replica_ranks):
                raise ConfigError(
                    f"KStepAdam: gradients of dense parameters in {path or 'the model'!r} are averaged over ranks {ranks} in every step, "
                    f"not over those of a replica ({list(replica_ranks)}): make DistributedModelParallel(..., **env.dmp_kwargs())"
                )


def variant_warnings(specs: Sequence[OptimizerSpec | None], variant: str, is_amsgrad: bool) -> list[str]:
    """Says where tables are stepped by another variant than dense parameters."""
    adams = [spec for spec in specs if isinstance(spec, AdamSpec)]
    wanted = (variant == "frozen", variant == "frozen" and is_amsgrad)
    found = dict.fromkeys((spec.frozen, spec.amsgrad) for spec in adams if (spec.frozen, spec.amsgrad) != wanted)
    return [
        f"variant={variant!r}, is_amsgrad={is_amsgrad} holds for dense parameters only: there are tables with AdamSpec(frozen={frozen}, "
        f"amsgrad={amsgrad}), which goes its own way; give their sharder AdamSpec(..., frozen={wanted[0]}, amsgrad={wanted[1]})"
        for frozen, amsgrad in found
    ]


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
