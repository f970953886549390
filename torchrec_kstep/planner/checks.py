"""What no plan may contain: requests and plans under which TorchRec or FBGEMM fail late or compute wrong results."""

from collections.abc import Mapping, Sequence

from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from torchrec_kstep.config.schema import PlannerConfig
from torchrec_kstep.errors import PlanError
from torchrec_kstep.planner.report import check_tiling, placed_shards
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL

SHARDINGS = (
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)
COLUMN_MULTIPLE = 4  # FBGEMM's kernels read rows in groups of four floats
_ROW_SHARDED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def check_tables(tables: Mapping[str, Sequence[EmbeddingBagConfig]], config: PlannerConfig) -> None:
    """Refuses requests that no plan can meet.

    Args:
        tables: configurations by path of the collection.
        config: what is asked for.

    Raises:
        PlanError: lists every finding: unknown type or table, a name used in two collections, columns that are no multiple of 4.
    """
    names = [table.name for configs in tables.values() for table in configs]
    findings = []
    if not names:
        findings.append("the task holds no EmbeddingBagCollection: there is nothing to shard")
    if config.sharding not in ("auto", *SHARDINGS):
        findings.append(f"planner.sharding={config.sharding!r}: expected auto or one of {', '.join(SHARDINGS)}")
    for table, sharding in config.tables.items():
        if sharding not in SHARDINGS:
            findings.append(f"planner.tables.{table}={sharding!r}: expected one of {', '.join(SHARDINGS)}")
        if table not in names:
            findings.append(f"planner.tables.{table}: there is no such table; the tables are {', '.join(names)}")
    findings += [
        f"table {name!r} appears in {names.count(name)} collections: a plan needs distinct names"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    findings += [
        f"table {table.name!r} has {table.embedding_dim} columns: FBGEMM's kernels need a multiple of {COLUMN_MULTIPLE}; "
        f"choose {max(COLUMN_MULTIPLE, round(table.embedding_dim / COLUMN_MULTIPLE) * COLUMN_MULTIPLE)}"
        for configs in tables.values()
        for table in configs
        if config.kernel != "tiered" and (table.embedding_dim % COLUMN_MULTIPLE or table.embedding_dim <= 0)
    ]
    if findings:
        raise PlanError("these tables cannot be sharded as asked:\n  " + "\n  ".join(findings))


def check_plan(plan: ShardingPlan, tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> None:
    """Refuses a plan that does not hold each table exactly once, or under which TorchRec would pool wrongly.

    Raises:
        PlanError: lists every finding.
    """
    findings = check_tiling(plan, tables) + _empty_shard_faults(plan, tables)
    for path, configs in tables.items():
        module_plan = plan.plan.get(path)
        is_stock = isinstance(module_plan, EmbeddingModuleShardingPlan) and not _has_tiered_table(module_plan)
        if is_stock:  # a collection with a tiered table takes its averages itself
            findings += _mean_pooling_faults(configs, {name: sharding.sharding_type for name, sharding in module_plan.items()})
    if findings:
        raise PlanError("the plan is not usable:\n  " + "\n  ".join(findings))


def check_kernels(plan: ShardingPlan, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    """Refuses tiered tables where none of the sharders has our kernel: TorchRec would fail on its name while it makes the model.

    Raises:
        PlanError: names the collection.
    """
    if not sharders or any(CUSTOMIZED_KERNEL in sharder.compute_kernels(ShardingType.TABLE_WISE.value, "cpu") for sharder in sharders):
        return
    for path, module_plan in plan.plan.items():
        if isinstance(module_plan, EmbeddingModuleShardingPlan) and _has_tiered_table(module_plan):
            raise PlanError(
                f"the tables of {path!r} are planned for the tiered kernel ({CUSTOMIZED_KERNEL!r}), which none of the sharders has: "
                f"{', '.join(type(sharder).__name__ for sharder in sharders)}. Give planner and DistributedModelParallel "
                "TieredEmbeddingBagCollectionSharder, or plan with Job(kernel='fused')"
            )


def check_tiers(
    plan: ShardingPlan, tables: Mapping[str, Sequence[EmbeddingBagConfig]], sharders: Sequence[ModuleSharder[nn.Module]], num_ranks: int
) -> None:
    """Asks the sharders that divide tiers over the row stores of a plan whether each store gets what it needs.

    Raises:
        PlanError: one does not.
    """
    for sharder in sharders:
        if hasattr(sharder, "check_plan"):
            sharder.check_plan(plan, tables, num_ranks)


def _has_tiered_table(module_plan: EmbeddingModuleShardingPlan) -> bool:
    return any(sharding.compute_kernel == CUSTOMIZED_KERNEL for sharding in module_plan.values())


def _empty_shard_faults(plan: ShardingPlan, tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> list[str]:
    """Finds fused shards without rows: FBGEMM's fused CPU kernels then update rows of another table, or fail."""
    ranks_by_table: dict[str, list[int]] = {}
    for shard in placed_shards(plan, tables):
        if not shard.num_rows and shard.kernel == "fused":
            ranks_by_table.setdefault(f"{shard.table!r} ({shard.sharding_type})", []).append(shard.rank)
    return [
        f"table {table} leaves rank {', '.join(map(str, ranks))} without a row, where FBGEMM's fused CPU kernels fail or update rows "
        "of another table: give it planner.tables.<table>=table_wise, or choose planner.kernel=dense"
        for table, ranks in ranks_by_table.items()
    ]


def leaves_empty_shards(num_rows: int, num_shards: int) -> bool:
    """Tells whether TorchRec's equal row blocks leave a shard without rows, e.g. 5 rows on 4 ranks: 2 + 2 + 1 + 0."""
    block_rows = -(-num_rows // num_shards)
    return -(-num_rows // block_rows) < num_shards


def _mean_pooling_faults(configs: Sequence[EmbeddingBagConfig], type_by_table: Mapping[str, str]) -> list[str]:
    """Finds the mixes whose averages TorchRec 1.8 gets wrong without a word.

    Row-sharded tables are pooled by sum, and where one of them averages, the whole output of the collection is divided by
    the bag sizes afterwards. Only features of row-sharded SUM tables are spared, by name of the feature. So tables of
    other types are divided although they must not be, and a feature of both a SUM and a MEAN table is not divided at all.
    """
    row_sharded = [table for table in configs if type_by_table.get(table.name) in _ROW_SHARDED]
    averaged = [table for table in row_sharded if table.pooling == PoolingType.MEAN]
    if not averaged:
        return []
    others = [table.name for table in configs if table not in row_sharded]
    findings = []
    if others:
        findings.append(
            f"table {averaged[0].name!r} is {type_by_table[averaged[0].name]} with MEAN pooling beside {', '.join(others[:5])} of other "
            "sharding types in one collection: TorchRec would divide those by their bag sizes too; shard all tables of the collection by "
            "rows, or none"
        )
    summed = {feature for table in row_sharded if table.pooling == PoolingType.SUM for feature in table.feature_names}
    findings += [
        f"feature {feature!r} is read by the row-sharded MEAN table {table.name!r} and by a row-sharded SUM table: TorchRec would not "
        "average it; give one of them another sharding type in a collection of its own"
        for table in averaged
        for feature in table.feature_names
        if feature in summed
    ]
    return findings
