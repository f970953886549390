"""What is known of the tables of a task: where they are, what their optimizer keeps, what a plan may do with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.cost import Tier
from torchrec_kstep.cost.work import VALUE_BYTES, Sharding
from torchrec_kstep.errors import PlanError
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.planner.checks import SHARDINGS, leaves_empty_shards
from torchrec_kstep.planner.emit import KERNELS
from torchrec_kstep.planner.options import Wishes

_ROW_SHARDED = ("row_wise", "table_row_wise")


def find_tables(task: nn.Module) -> dict[str, list[EmbeddingBagConfig]]:
    """Returns the tables of every `EmbeddingBagCollection` inside `task` by the module's path."""
    return {path: module.embedding_bag_configs() for path, module in task.named_modules() if type(module) is EmbeddingBagCollection}


@dataclass(frozen=True)
class Fusion:
    """What the sharders say about optimizers.

    Attributes:
        copies_per_weight: values that a dense or fused kernel keeps per weight.
        optimizer: of tiered rows; None for other kernels.
        kernel: of the configuration.
    """

    copies_per_weight: int
    optimizer: OptimizerSpec | None
    kernel: str

    def state_bytes(self, dim: int) -> int:
        """Optimizer state of one row beside its weights."""
        if self.optimizer is not None:
            return VALUE_BYTES * (sum(field.width for field in self.optimizer.record_fields(dim)) - dim)
        return VALUE_BYTES * dim * (self.copies_per_weight - 1) if self.kernel == "fused" else 0


def fusion_of(sharders: Sequence[ModuleSharder[nn.Module]], kernel: str) -> Fusion:
    """Asks the sharders."""
    copies = max((getattr(sharder, "copies_per_weight", 1) for sharder in sharders), default=1)
    optimizer = next((sharder.optimizer for sharder in sharders if hasattr(sharder, "optimizer")), None) if kernel == "tiered" else None
    return Fusion(copies, optimizer, kernel)


def wishes_of(
    config: EmbeddingBagConfig,
    constraint: ParameterConstraints | None,
    collection: Sequence[EmbeddingBagConfig],
    sharders: Iterable[ModuleSharder[nn.Module]],
    *,
    kernel: str,
    on_device: bool,
    has_drives: bool,
    world_size: int,
    local_world_size: int,
) -> Wishes:
    """Joins what a user allows for a table with what kernels, sharders and TorchRec can do.

    Args:
        config: the table.
        constraint: of the user, if any.
        collection: all tables beside it, whose pooling limits what it may be.
        sharders: what they offer; without any, every type.
        kernel: of the configuration.
        on_device: whether ranks compute on devices.
        has_drives: whether rows may rest on SSD.
        world_size: ranks of a replica.
        local_world_size: of them, on one host.

    Raises:
        PlanError: nothing is left, or a constraint asks for what is not offered; it is named.
    """
    asked = constraint or ParameterConstraints()
    for name in ("batch_sizes", "key_value_params", "use_virtual_table"):
        if getattr(asked, name):
            raise PlanError(f"table {config.name!r}: the constraint {name} is not supported; drop it, or plan with planner.engine=torchrec")
    if asked.device_group is not None and asked.device_group != ("cuda" if on_device else "cpu"):
        raise PlanError(f"table {config.name!r}: the constraint device_group={asked.device_group!r} names a kind of rank that is not there")
    if asked.compute_kernels and not {KERNELS[kernel], "dense" if "data_parallel" in (asked.sharding_types or ()) else ""} & set(
        asked.compute_kernels
    ):
        raise PlanError(
            f"table {config.name!r} may have the kernels {', '.join(asked.compute_kernels)}, but tables are planned for "
            f"{KERNELS[kernel]!r}: allow it, or choose another planner.kernel"
        )
    offered = [set(sharder.sharding_types("cuda" if on_device else "cpu")) for sharder in sharders]
    usable = [name for name in SHARDINGS if not offered or any(name in types for types in offered)]
    wanted = asked.sharding_types or _sensible(config, collection, kernel, world_size, local_world_size)
    allowed = tuple(name for name in usable if name in wanted and not (name == "table_row_wise" and local_world_size > world_size))
    if not allowed:
        raise PlanError(
            f"no sharding type is left for table {config.name!r}: its constraints allow {', '.join(wanted)}, the sharders offer "
            f"{', '.join(usable) or 'none'}"
        )
    factor = asked.cache_params.load_factor if asked.cache_params is not None else None
    return Wishes(
        shardings=_typed(allowed),
        tiers=_tiers(kernel, on_device, has_drives),
        min_columns=asked.min_partition,
        cached_rows=None if factor is None else factor * config.num_embeddings,
    )


def _typed(names: Sequence[str]) -> tuple[Sharding, ...]:
    return tuple(names)  # type: ignore[arg-type]  # members of SHARDINGS


def _tiers(kernel: str, on_device: bool, has_drives: bool) -> tuple[Tier, ...]:
    if kernel != "tiered":
        return ("device", "dram") if on_device and kernel == "fused" else ("device",) if on_device else ("dram",)
    tiers: tuple[Tier, ...] = ("device", "dram") if on_device else ("dram",)
    return (*tiers, "ssd") if has_drives else tiers


def _sensible(
    config: EmbeddingBagConfig, collection: Sequence[EmbeddingBagConfig], kernel: str, world_size: int, local_world_size: int
) -> list[str]:
    """The types that need no second thought: all but those under which TorchRec or FBGEMM compute wrongly or fail."""
    several_hosts = ["table_row_wise"] if world_size > local_world_size else []
    if kernel == "tiered":  # column shards would look up and store every row once per shard
        return ["table_wise", "row_wise", *several_hosts]
    types = ["table_wise", "column_wise", *(["data_parallel"] if kernel == "dense" else [])]
    has_mean = any(table.pooling == PoolingType.MEAN for table in collection)
    for name, num_shards in (("row_wise", world_size), *((name, local_world_size) for name in several_hosts)):
        if not has_mean and not (kernel == "fused" and leaves_empty_shards(config.num_embeddings, num_shards)):
            types.append(name)
    return types
