"""The sharder of embedding tables, and the fused optimizers that it hands to FBGEMM's kernels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_kstep.config.schema import KStepConfig, OptimConfig, PlannerConfig, TiersConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.merge_spec import RECIPES
from torchrec_kstep.ops.row_group import DramLayout
from torchrec_kstep.optim_spec import AdamSpec, CowClip, OptimizerSpec, RowwiseAdagradSpec, SgdSpec
from torchrec_kstep.sharding.tiered import TieredEmbeddingBagCollectionSharder
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.torchrec_seam.sharding import EmbeddingBagCollectionSharder, EmbeddingComputeKernel, EmbOptimType
from torchrec_kstep.world import World

KERNELS = ("dense", "fused", "tiered")
TIERED_OPTIMIZERS = ("adam", "sgd", "rowwise_adagrad")
FUSED_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
DENSE_COPIES = {"sgd": 2, "adagrad": 3, "adam": 4}  # weight, gradient, then one sum, or two moments


class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # torchrec has no type information
    """TorchRec's sharder of `EmbeddingBagCollection`, with the types and kernels that gloo ranks can run.

    Upstream offers neither row-wise sharding nor the dense kernel on CPU. Both work there: gloo has the collectives they
    need, and the dense kernel leaves gradients to a `torch.optim` optimizer.

    Attributes:
        copies_per_weight: values kept per weight, itself, its gradient and optimizer states counted; the planner divides
            memory by it, because TorchRec's own estimate counts none of those.
    """

    def __init__(self, fused_params: dict[str, Any] | None = None, copies_per_weight: int = 1, can_replicate: bool = True) -> None:
        """Keeps the parameters of the fused kernels (none for dense kernels), the memory factor, and whether tables may be replicated."""
        super().__init__(fused_params=fused_params)
        self.copies_per_weight = copies_per_weight
        self._can_replicate = can_replicate

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the types that a plan may use; the device does not matter."""
        del compute_device_type
        replicated = [ShardingType.DATA_PARALLEL.value] if self._can_replicate else []
        return [
            *replicated,
            ShardingType.TABLE_WISE.value,
            ShardingType.ROW_WISE.value,
            ShardingType.COLUMN_WISE.value,
            ShardingType.TABLE_ROW_WISE.value,
        ]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernels that a plan may use: a replicated table is summed over ranks by DDP, so it is never fused."""
        del compute_device_type
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [EmbeddingComputeKernel.DENSE.value]
        return [EmbeddingComputeKernel.DENSE.value, EmbeddingComputeKernel.FUSED.value]


def build_sharders(
    planner: PlannerConfig,
    optim: OptimConfig,
    tiers: TiersConfig | None = None,
    accumulation: int = 1,
    world: World | None = None,
    kstep: KStepConfig | None = None,
    num_replicas: int = 1,
    path_weights: Sequence[float] = (),
) -> list[ModuleSharder[nn.Module]]:
    """Makes the sharders for the chosen kernel and, where that updates rows itself, the optimizer inside it. Not collective.

    Args:
        planner: the kernel.
        optim: the optimizer of the tables.
        tiers: where the rows of tiered tables live; by default in DRAM.
        accumulation: micro-batches per step; above 1, or where the norm of their gradients or of rows cut by columns is to be
            bounded, tiered tables are updated in `step` instead of inside backward.
        world: this rank's position, which tells its part of the tiers; by default torchrun's.
        kstep: how replicas are merged; None without replicas.
        num_replicas: with several, rows count what touched them since the last round.
        path_weights: part of this rank's rows on each of `tiers.ssd_paths`, over their sum; none: equal parts.

    Raises:
        ConfigError: lists every unsupported combination.
    """
    check_kernel(planner, optim)
    if planner.kernel == "tiered":
        is_deferred = accumulation > 1 or clips_tables(optim) or clips_column_shards(planner, optim)
        return [
            TieredEmbeddingBagCollectionSharder(
                row_optimizer(optim, kstep, num_replicas),
                tier_config(tiers or TiersConfig(), path_weights),
                world=world,
                deferred=is_deferred,
                dram_layout=cast(DramLayout, tiers.dram_layout) if tiers else "auto",
            )
        ]
    if planner.kernel == "dense":
        # TorchRec averages the gradients of replicated tables over all ranks of a job, not over those of a replica.
        return [BagSharder(copies_per_weight=DENSE_COPIES.get(optim.embedding, 2), can_replicate=kstep is None)]
    fused_params: dict[str, Any] = {
        "optimizer": FUSED_OPTIMIZERS[optim.embedding],
        "learning_rate": optim.embedding_lr,
        "eps": optim.eps,
    }
    return [BagSharder(fused_params, copies_per_weight=2 if optim.embedding == "adagrad" else 1)]


def clips_tables(optim: OptimConfig) -> bool:
    """Whether the bound on the norm of the gradient counts and scales that of tables."""
    return optim.clip_norm > 0 and optim.clip_covers == "all"


def clips_column_shards(planner: PlannerConfig, optim: OptimConfig) -> bool:
    """Whether rows are clipped by their norm while ranks hold only some of their columns."""
    return optim.clip == "cowclip" and "column_wise" in (planner.sharding, *planner.tables.values())


def row_optimizer(optim: OptimConfig, kstep: KStepConfig | None = None, num_replicas: int = 1) -> OptimizerSpec:
    """Translates the optimizer of the tables into that of their rows: the same rule, for the rows of a batch only.

    With `kstep` it has the bias correction that goes with the way to merge, and rows of several replicas count their updates.
    """
    spec = _row_rule(optim)
    spec = replace(
        spec,
        l2=optim.embedding_l2,
        clip=CowClip(optim.clip_ratio, optim.clip_zeta, tuple(optim.clip_exempt)) if optim.clip == "cowclip" else None,
        l2_absent_rows="replay" if optim.l2_absent_rows == "replay" else "skip",
        l2_replay_max_steps=optim.l2_replay_max_steps,
    )
    return _mergeable(spec, kstep, num_replicas) if kstep is not None and isinstance(spec, AdamSpec) else spec


def _row_rule(optim: OptimConfig) -> OptimizerSpec:
    if optim.embedding == "adam":
        return AdamSpec(lr=optim.embedding_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    if optim.embedding == "rowwise_adagrad":
        return RowwiseAdagradSpec(lr=optim.embedding_lr, eps=optim.eps)
    return SgdSpec(lr=optim.embedding_lr)


def _mergeable(adam: AdamSpec, kstep: KStepConfig, num_replicas: int) -> AdamSpec:
    recipe = RECIPES["paper" if kstep.recipe == "paper" else "default"]
    bias = recipe.bias_correction if kstep.bias_correction == "recipe" else kstep.bias_correction
    adam = replace(adam, bias_correction="row" if bias == "row" else "global")
    if num_replicas == 1:
        return adam
    return replace(
        adam,
        touches="count",
        num_trackers=len({1, kstep.m_period_rounds, kstep.v_period_rounds}),
        step_per_moment=bias == "row" and kstep.m_period_rounds != kstep.v_period_rounds,
        frozen=kstep.variant == "frozen",
        amsgrad=kstep.is_amsgrad,
    )


def tier_config(tiers: TiersConfig, path_weights: Sequence[float] = ()) -> TierConfig | None:
    """Returns the sizes and places of SSD tiers; None for rows in DRAM. `path_weights` as in `build_sharders`.

    Raises:
        ConfigError: lists every fault of the values.
    """
    if tiers.name == "dram":
        return None
    return TierConfig(
        dram_bytes=tiers.dram_bytes,
        ssd_paths=list(tiers.ssd_paths),
        ssd_bytes=tiers.ssd_bytes or None,
        segment_bytes=tiers.segment_bytes,
        prefetch_depth=tiers.prefetch_depth,
        lookahead=tiers.lookahead,
        path_weights=tuple(path_weights) or None,
        path_limits=tuple(tiers.ssd_limits) or None,
    )


def check_kernel(planner: PlannerConfig, optim: OptimConfig) -> None:
    """Refuses combinations of kernel, optimizer and sharding that TorchRec or FBGEMM cannot run, before any rank starts.

    Raises:
        ConfigError: lists every finding.
    """
    findings = []
    if planner.kernel not in KERNELS:
        findings.append(f"planner.kernel={planner.kernel!r}: expected one of {', '.join(KERNELS)}")
    if planner.kernel == "fused":
        if optim.embedding == "adam":
            findings.append(
                "planner.kernel=fused with optim.embedding=adam: FBGEMM has no Adam on CPU; choose planner.kernel=dense for Adam, "
                f"or a fused optimizer out of {', '.join(FUSED_OPTIMIZERS)}"
            )
        elif optim.embedding not in FUSED_OPTIMIZERS:
            findings.append(f"optim.embedding={optim.embedding!r} with planner.kernel=fused: expected one of {', '.join(FUSED_OPTIMIZERS)}")
        if optim.embedding_l2:
            findings.append(
                f"optim.embedding_l2={optim.embedding_l2} with planner.kernel=fused: the fused kernels see touched rows only and "
                "would not apply it to the others; set it to 0 or choose planner.kernel=dense"
            )
        replicated = sorted(table for table, sharding in planner.tables.items() if sharding == "data_parallel")
        if planner.sharding == "data_parallel":
            replicated.insert(0, "planner.sharding")
        if replicated:
            findings.append(
                f"planner.kernel=fused with data_parallel ({', '.join(replicated)}): the gradient of a replicated table is summed over "
                "ranks after backward, when a fused kernel has already stepped; choose another sharding or planner.kernel=dense"
            )
    if planner.kernel == "tiered":
        if optim.embedding not in TIERED_OPTIMIZERS:
            findings.append(
                f"optim.embedding={optim.embedding!r} with planner.kernel=tiered: expected one of {', '.join(TIERED_OPTIMIZERS)}"
            )
        replicated = [name for name, sharding in (("sharding", planner.sharding), *planner.tables.items()) if sharding == "data_parallel"]
        if replicated:
            findings.append(
                f"planner.kernel=tiered with data_parallel ({', '.join(replicated)}): rows in tiers have one owner; choose another sharding"
            )
    if planner.kernel == "dense" and optim.embedding == "rowwise_adagrad":
        findings.append(
            "optim.embedding=rowwise_adagrad with planner.kernel=dense: it exists as a fused kernel only; choose planner.kernel=fused"
        )
    if findings:
        raise ConfigError("these settings do not go together:\n  " + "\n  ".join(findings))
