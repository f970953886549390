"""One optimizer for a sharded task: dense parameters, tables with gradients, tables that step inside backward."""

from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_kstep.config.schema import OptimConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim.accumulate import AccumulatingOptimizer
from torchrec_kstep.optim.clipping import GlobalNormClipping
from torchrec_kstep.optim.keyed import OPTIMIZERS, TorchOptimizer, torch_optimizer
from torchrec_kstep.optim.schedule import IS_TABLE
from torchrec_kstep.torchrec_seam.optim import DeferredUpdate, ShardedTensor
from torchrec_kstep.torchrec_seam.sharding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection


def build_optimizer(dmp: DistributedModelParallel, config: OptimConfig, accumulation: int = 1) -> KeyedOptimizer:
    """Joins the optimizers of a sharded task into one. Not collective.

    - Dense parameters: `config.dense` with `lr` and `weight_decay`. With `clip_norm` > 0 their gradient is scaled down so
      that its norm over all dense parameters is at most that. `clip_covers` = "dense", the default, neither counts tables in
      the norm nor scales them: a fused table has stepped already when the norm is known, and so the bound means the same for
      all kernels. With "all" the norm is that of dense parameters and tables together, and all are scaled.
    - Tables with the dense kernel: `config.embedding` with `embedding_lr` and `embedding_l2`; every row steps every time.
    - Tables with the fused kernel: stepped by FBGEMM inside backward, as given to their sharder; their groups are here so
      that schedules reach them and their states are saved.
    - Tiered tables: likewise stepped as given to their sharder, inside backward or, deferred, by `step`.

    Args:
        dmp: the sharded task.
        config: optimizers and rates.
        accumulation: micro-batches per step; above 1 `zero_grad` and `step` act once per global batch only.

    Returns:
        A keyed optimizer whose state is complete, so that it can be saved and loaded before the first step.

    Raises:
        ConfigError: an unknown optimizer, or accumulation or a bound on the norm over tables that step inside backward.
    """
    _check(config, accumulation, _tables_stepped_in_backward(dmp))
    parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = []
    dense, embedding = split_parameters(dmp)
    betas = (config.beta1, config.beta2)
    if dense:
        inner = torch_optimizer(config.dense, list(dense.values()), config.lr, betas, config.eps, config.weight_decay)
        optimizer: KeyedOptimizer = TorchOptimizer(dense, inner)
        if config.clip_norm and config.clip_covers == "dense":
            optimizer = GradientClippingOptimizer(optimizer, GradientClipping.NORM, config.clip_norm)
        parts.append(optimizer)
    if embedding:
        inner = torch_optimizer(config.embedding, list(embedding.values()), config.embedding_lr, betas, config.eps, config.embedding_l2)
        sharded = {name: value for name, value in dmp.state_dict().items() if isinstance(value, ShardedTensor)}
        parts.append(TorchOptimizer(embedding, inner, sharded))
        mark_tables(inner)
    parts.append(dmp.fused_optimizer)
    mark_tables(dmp.fused_optimizer)
    combined: KeyedOptimizer = CombinedOptimizer(parts)
    if config.clip_norm and config.clip_covers == "all":
        combined = GlobalNormClipping(combined, *_by_place(dmp, dense, embedding), config.clip_norm)
    return AccumulatingOptimizer(combined, accumulation) if accumulation > 1 else combined


def mark_tables(optimizer: Optimizer) -> None:
    """Marks parameter groups as those of tables, for schedules that tell them from the dense parameters."""
    for group in optimizer.param_groups:
        group[IS_TABLE] = True


def _tables_stepped_in_backward(dmp: DistributedModelParallel) -> set[str]:
    """Names the tables whose gradients cannot be added up over several backwards."""
    return {
        name
        for name, param in in_backward_optimizer_filter(dmp.named_parameters(), include=True)
        if not all(isinstance(optimizer, DeferredUpdate) for optimizer in param._in_backward_optimizers)
    }


def split_parameters(dmp: DistributedModelParallel) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Returns (dense parameters, local parts of tables with the dense kernel) by name; fused tables are in neither.

    A rank without any part of a table has an empty parameter in its name. It is left out: it never gets a gradient, and
    its step count of zero would compete with that of the other ranks in a checkpoint.
    """
    prefixes = tuple(
        f"{path}."
        for path, module in dmp.module.named_modules()
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)
    )
    dense: dict[str, nn.Parameter] = {}
    embedding: dict[str, nn.Parameter] = {}
    for name, param in in_backward_optimizer_filter(dmp.named_parameters()):
        if not name.startswith(prefixes):
            dense[name] = param
        elif param.numel():
            embedding[name] = param
    return dense, embedding


def _by_place(
    dmp: DistributedModelParallel, dense: dict[str, nn.Parameter], embedding: dict[str, nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns (parameters that are whole on every rank, parts of those that are divided over the ranks)."""
    shared_by_all = {
        f"{path}.embedding_bags.{table}.weight"
        for path, module in dmp.module.named_modules()
        if isinstance(module, ShardedEmbeddingBagCollection)
        for table, sharding in module.module_sharding_plan.items()
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value
    }
    replicated = [*dense.values(), *(param for name, param in embedding.items() if name in shared_by_all)]
    return replicated, [param for name, param in embedding.items() if name not in shared_by_all]


def _check(config: OptimConfig, accumulation: int, fused: set[str]) -> None:
    """Refuses unknown optimizers, and what needs the gradients of tables that step inside backward."""
    findings = []
    if config.dense not in OPTIMIZERS:
        findings.append(f"optim.dense={config.dense!r}: expected one of {', '.join(OPTIMIZERS)}")
    if accumulation < 1:
        findings.append(f"train.accumulation={accumulation}: expected at least 1")
    if accumulation > 1 and fused:
        findings.append(
            f"train.accumulation={accumulation} with planner.kernel=fused: {len(fused)} tables ({', '.join(sorted(fused)[:3])}, ...) "
            "step inside every backward, so their micro-batches would be steps of their own; choose planner.kernel=dense or accumulation=1"
        )
    if config.clip_norm and config.clip_covers == "all" and fused:
        findings.append(
            f"optim.clip_covers=all with {len(fused)} tables ({', '.join(sorted(fused)[:3])}, ...) that step inside backward, before the "
            "norm of the gradient is known; choose planner.kernel=dense, deferred tiered tables, or optim.clip_covers=dense"
        )
    if findings:
        raise ConfigError("the optimizer cannot be built:\n  " + "\n  ".join(findings))
