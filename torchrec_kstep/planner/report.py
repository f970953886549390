"""A plan for people and for tests: every shard with its rank, rows, columns and bytes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_dtype

from torchrec_kstep.units import format_bytes


@dataclass(frozen=True)
class PlacedShard:
    """One rectangle of one table on one rank.

    Attributes:
        path: path of the collection inside the task.
        table: name of the table.
        sharding_type: TorchRec's name of the sharding type.
        kernel: TorchRec's name of the compute kernel.
        rank: global rank that holds it.
        row_start: first row.
        num_rows: rows held; 0 where a table has fewer rows than ranks.
        column_start: first column.
        num_columns: columns held.
        weight_bytes: bytes of the weights, optimizer states not counted.
        is_replica: whether every rank holds this same rectangle (data_parallel).
    """

    path: str
    table: str
    sharding_type: str
    kernel: str
    rank: int
    row_start: int
    num_rows: int
    column_start: int
    num_columns: int
    weight_bytes: int
    is_replica: bool


def placed_shards(plan: ShardingPlan, tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> list[PlacedShard]:
    """Lists every shard of every planned table, in the order of `tables`, then by rank.

    Args:
        plan: as `make_plan` returns it.
        tables: configurations by path of the collection.
    """
    shards = []
    for path, configs in tables.items():
        module_plan = plan.plan.get(path)
        if not isinstance(module_plan, EmbeddingModuleShardingPlan):
            continue
        for table in configs:
            if table.name in module_plan:
                shards += _shards_of(path, table, module_plan)
    return shards


def _shards_of(path: str, table: EmbeddingBagConfig, module_plan: EmbeddingModuleShardingPlan) -> list[PlacedShard]:
    """Lists the shards of one table by rank."""
    sharding = module_plan[table.name]
    ranks = sharding.ranks or []
    spec = sharding.sharding_spec
    if spec is None:
        rectangles = [(rank, 0, table.num_embeddings, 0, table.embedding_dim) for rank in ranks]
    else:
        rectangles = [
            (shard.placement.rank(), shard.shard_offsets[0], shard.shard_sizes[0], shard.shard_offsets[1], shard.shard_sizes[1])
            for shard in spec.shards
        ]
    element_bytes = data_type_to_dtype(table.data_type).itemsize
    return [
        PlacedShard(
            path=path,
            table=table.name,
            sharding_type=sharding.sharding_type,
            kernel=sharding.compute_kernel,
            rank=rank,
            row_start=row_start,
            num_rows=num_rows,
            column_start=column_start,
            num_columns=num_columns,
            weight_bytes=num_rows * num_columns * element_bytes,
            is_replica=spec is None,
        )
        for rank, row_start, num_rows, column_start, num_columns in sorted(rectangles)
    ]


def check_tiling(plan: ShardingPlan, tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> list[str]:
    """Checks that the shards of each table cover every element exactly once (a replicated table: once on each of its ranks).

    Returns:
        One finding per fault, each naming the table; an empty list where all is well.
    """
    by_table: dict[tuple[str, str], list[PlacedShard]] = {}
    for shard in placed_shards(plan, tables):
        by_table.setdefault((shard.path, shard.table), []).append(shard)
    findings = []
    for path, configs in tables.items():
        for table in configs:
            own = by_table.get((path, table.name), [])
            if not own:
                findings.append(f"table {table.name!r} of {path!r} is missing from the plan")
            elif own[0].is_replica:
                ranks = [shard.rank for shard in own]
                if len(set(ranks)) < len(ranks):
                    findings.append(f"table {table.name!r} is replicated on ranks {ranks}: a rank appears twice")
            else:
                findings += _tiling_faults(table, [shard for shard in own if shard.num_rows and shard.num_columns])
    return findings


def _tiling_faults(table: EmbeddingBagConfig, shards: Sequence[PlacedShard]) -> list[str]:
    """Finds overlaps, gaps and overhang of non-empty rectangles."""
    faults = []
    shards = sorted(shards, key=lambda shard: shard.row_start)
    for index, a in enumerate(shards):
        is_within_rows = 0 <= a.row_start <= a.row_start + a.num_rows <= table.num_embeddings
        is_within_columns = 0 <= a.column_start <= a.column_start + a.num_columns <= table.embedding_dim
        if not (is_within_rows and is_within_columns):
            extent = f"{table.num_embeddings} x {table.embedding_dim}"
            faults.append(f"table {table.name!r}: the shard of rank {a.rank} reaches outside of its {extent} elements")
        for b in itertools.islice(shards, index + 1, None):
            if b.row_start >= a.row_start + a.num_rows:
                break  # and so do all behind it, which begin no earlier
            if a.column_start < b.column_start + b.num_columns and b.column_start < a.column_start + a.num_columns:
                faults.append(f"table {table.name!r}: the shards of ranks {a.rank} and {b.rank} overlap")
    covered = sum(shard.num_rows * shard.num_columns for shard in shards)
    expected = table.num_embeddings * table.embedding_dim
    if not faults and covered != expected:
        faults.append(f"table {table.name!r}: the shards cover {covered} of {expected} elements")
    return faults


def format_plan(plan: ShardingPlan, tables: Mapping[str, Sequence[EmbeddingBagConfig]]) -> str:
    """Draws the plan as a text table, one line per shard (replicated tables: one line), then the bytes of each rank."""
    header = ("table", "sharding", "kernel", "rank", "rows", "columns", "weights")
    lines = [header]
    bytes_by_rank: dict[int, int] = {}
    for shard in placed_shards(plan, tables):
        bytes_by_rank[shard.rank] = bytes_by_rank.get(shard.rank, 0) + shard.weight_bytes
        line = (
            shard.table,
            shard.sharding_type,
            shard.kernel,
            "all" if shard.is_replica else str(shard.rank),
            f"{shard.row_start}..{shard.row_start + shard.num_rows}",
            f"{shard.column_start}..{shard.column_start + shard.num_columns}",
            format_bytes(shard.weight_bytes),
        )
        if line != lines[-1]:
            lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    totals = ", ".join(f"rank {rank} {format_bytes(num_bytes)}" for rank, num_bytes in sorted(bytes_by_rank.items()))
    return "\n".join([*text, f"weights per rank: {totals}"])
