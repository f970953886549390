"""The work of one shard of a table in one step, in bytes and counts: what has to be done, not how long it takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrec_kstep.cost.access import AccessCurve
from torchrec_kstep.cost.index_memory import index_memory_bytes
from torchrec_kstep.cost.round_misses import RoundMisses, round_misses

Tier = Literal["device", "dram", "ssd"]
Sharding = Literal["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"]
Kernel = Literal["dense", "fused", "tiered"]

# What a shard does to the rank that holds it. Exchanges are counted towards ONE other rank: all ranks have equal batches.
QUANTITIES = (
    "lookup_ids",  # ids looked up
    "lookup_bytes",  # rows pooled, and as many gradients handed out: those that come again are in a processor's caches
    "distinct_bytes",  # different rows brought up from the memory they are computed in
    "update_rows",  # different rows updated
    "update_bytes",  # records read and written
    "shards",  # 1
    "pooled_bytes",  # pooled rows made here for all ranks, and as many gradients read
    "id_bytes",  # ids that each rank sends here
    "output_bytes",  # pooled rows sent from here to each rank, and as many gradients back
    "summed_output_bytes",  # the same, summed over the shards of a table on their way
    "host_output_bytes",  # the same, summed, to ranks of this host only
    "lane_output_bytes",  # the same, to the rank of equal local rank on each other host only
    "all_reduce_bytes",  # gradients of a replicated table, summed over all ranks
    "fetch_bytes",  # rows that cross from DRAM to the device, and as many back
    "drive_reads",  # reads from drives
    "drive_read_bytes",
    "drive_write_bytes",
    "cache_rows",  # different rows looked up through a cache over a drive
    "tier_rows",  # rows admitted into and evicted from a cache over a drive
    "merge_bytes",  # sent to each other replica, per step on average
    "merge_rows",  # collected here for a merge round or changed by it, per step on average
    "merge_tier_rows",  # admitted into and evicted from a cache over a drive by merge rounds, per step on average
    "merge_reads",  # from drives for that
    "merge_read_bytes",
    "merge_write_bytes",
)
MEMORIES = (
    "device_bytes",
    "dram_bytes",  # all of a host
    "row_bytes",  # the part of it that rows take: tables in DRAM and caches, without indexes
    "ssd_bytes",
)

# One of these for each way to cut tables: TorchRec exchanges ids, outputs and gradients of each way by themselves.
EXCHANGES = ("output_bytes", "summed_output_bytes", "host_output_bytes")

ID_BYTES = 8
LENGTH_BYTES = 8
VALUE_BYTES = 4
RECORD_HEADER_BYTES = 20  # row_id, table_id, epoch and checksum of a record on a drive
SLOT_OVERHEAD_BYTES = 48  # of a cached row
MERGE_ROW_BYTES = 6.5  # row id and touches of a merged row, mean of both legs
PAGE_BYTES = 4096
MAX_PADDING = 0.15  # of a read unit
TOUCHED_MARGIN = 1.25  # rows that a job will touch are told by curves, which come from samples
SPACE_FACTOR = 1.2  # bytes on a drive over bytes of current rows at which a store can just work; with more it cleans less
WRITE_AMPLIFICATION = 1.5  # bytes written over bytes of evicted rows: the cleaner copies live rows

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """A table and how it is used.

    Attributes:
        name: of the table.
        num_rows: rows.
        dim: columns.
        curve: how often which rows are asked for.
        ids_per_sample: ids of all its features in one row of data.
        num_features: features that read it.
        state_bytes: optimizer state of one row, beside its weights.
    """

    name: str
    num_rows: int
    dim: int
    curve: AccessCurve = field(compare=False, repr=False)
    ids_per_sample: float = 1.0
    num_features: int = 1
    state_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Weights of one row."""
        return self.dim * VALUE_BYTES

    @property
    def record_bytes(self) -> int:
        """Weights and optimizer state of one row."""
        return self.row_bytes + self.state_bytes


@dataclass(frozen=True)
class StepSetup:
    """What a step is, the same for all tables.

    Attributes:
        batch_size: rows of data per rank.
        world_size: ranks that share one replica of the model.
        local_world_size: of them, on one host.
        kernel: how rows are updated.
        dense_passes: times that a dense kernel's update goes over a whole table, gradients included.
        dense_copies: values that a dense kernel keeps per weight.
        k: steps between merge rounds; 0 where there is one replica.
        num_replicas: whole copies of the model.
        merge_weight_bytes: sent per weight in a merge round: 4 for weights alone in fp32, 12 with both moments.
        num_steps: of the whole job, which tell how many rows will ever be touched; 0: without end.
        dense_parameters: of the dense layers.
        flops_per_sample: of the dense layers, forward and backward.
        activations_per_sample: values that go into and come out of dense layers, forward.
        num_features: of all tables, which every rank takes apart and puts together.
        prefetch: whether rows come up from drives, and across to devices, while earlier steps compute.
    """

    batch_size: int
    world_size: int = 1
    local_world_size: int = 1
    kernel: Kernel = "tiered"
    dense_passes: int = 8
    dense_copies: int = 4
    k: int = 0
    num_replicas: int = 1
    merge_weight_bytes: float = 4.0
    num_steps: int = 0
    dense_parameters: int = 0
    flops_per_sample: float = 0.0
    activations_per_sample: float = 0.0
    num_features: int = 0
    prefetch: bool = True

    @property
    def num_hosts(self) -> int:
        """Hosts of one replica."""
        return self.world_size // self.local_world_size


@dataclass(frozen=True)
class ShardWork:
    """One shard in one step. All shards of a table are alike.

    Attributes:
        quantities: by the names of `QUANTITIES`; those left out are 0.
        memory: by the names of `MEMORIES`; those left out are 0. `index_bytes` is the part of `dram_bytes` that finds rows on drives.
        touched_rows: that it will ever hold on a drive.
        num_missed_rows: rows per step that its cache did not hold.
        num_distinct_rows: different rows per step.
    """

    quantities: Mapping[str, float]
    memory: Mapping[str, float]
    num_missed_rows: float = 0.0
    num_distinct_rows: float = 0.0
    touched_rows: float = 0.0

    @cached_property
    def vector(self) -> Vector:
        """`[QUANTITIES]`."""
        return np.array([self.quantities.get(name, 0.0) for name in QUANTITIES])

    @cached_property
    def memory_vector(self) -> Vector:
        """`[MEMORIES]`."""
        return np.array([self.memory.get(name, 0.0) for name in MEMORIES])


def shard_work(
    table: Table, setup: StepSetup, sharding: Sharding, num_shards: int, tier: Tier, cached_rows: float, on_device: bool
) -> ShardWork:
    """The work of one of `num_shards` shards.

    Hot rows are taken to be spread evenly over row shards, as hashed ids are.

    Args:
        table: the table.
        setup: the step.
        sharding: how the table is cut.
        num_shards: into how many parts; for a replicated table, on how many ranks.
        tier: where its rows rest.
        cached_rows: rows of the whole table that the tier above holds; without meaning for the highest tier.
        on_device: whether the rank computes on a device; else on cores.
    """
    is_cut_by_rows = sharding in ("row_wise", "table_row_wise")
    is_replica = sharding == "data_parallel"
    rows_share = 1 / num_shards if is_cut_by_rows else 1.0
    columns_share = 1 / num_shards if sharding == "column_wise" else 1.0
    samples = setup.batch_size * (1 if is_replica else setup.world_size)
    draws = samples * table.ids_per_sample
    distinct = table.curve.distinct_rows(draws) * rows_share
    row_bytes, record_bytes = table.row_bytes * columns_share, table.record_bytes * columns_share
    ids = draws * rows_share
    quantities: dict[str, float] = {
        "lookup_ids": ids,
        "lookup_bytes": ids * row_bytes,
        "distinct_bytes": distinct * row_bytes,
        "update_rows": distinct,
        "update_bytes": _update_bytes(table, setup, distinct, record_bytes, rows_share * columns_share, is_replica),
        "shards": 1.0,
        "pooled_bytes": samples * table.num_features * row_bytes,
        **_exchange_bytes(table, setup, sharding, row_bytes, rows_share),
    }
    misses = RoundMisses(0.0, 0.0)
    if _has_cache(tier, on_device):
        misses = _misses(table, setup, tier, draws, cached_rows)
        read_share = _read_share(table, setup, draws, misses)
        quantities |= tier_quantities(tier, misses.per_step * rows_share, distinct, record_bytes, on_device, read_share)
    if setup.k and setup.num_replicas > 1:
        touched, union = merged_rows(table, setup, draws)
        row_values = row_bytes / VALUE_BYTES * setup.merge_weight_bytes + MERGE_ROW_BYTES
        quantities["merge_rows"] = (touched + union) * rows_share / setup.k
        quantities["merge_bytes"] = quantities["merge_rows"] * row_values / setup.num_replicas
        if tier == "ssd":
            quantities |= merge_tier_quantities(misses.per_round * rows_share / setup.k, record_bytes, read_share)
    touched_rows = touched_share(table, setup, draws) * table.num_rows * rows_share
    memory = memory_bytes(table, setup, tier, cached_rows * rows_share, touched_rows, rows_share, columns_share, on_device)
    return ShardWork(quantities, memory, misses.per_step * rows_share, distinct, touched_rows)


def _has_cache(tier: Tier, on_device: bool) -> bool:
    return tier == "ssd" or (tier == "dram" and on_device)


def _misses(table: Table, setup: StepSetup, tier: Tier, draws: float, cached_rows: float) -> RoundMisses:
    """Rows that its cache does not hold. Rounds pass through caches over drives, and leave them to their own rows."""
    if tier == "ssd" and setup.k and setup.num_replicas > 1:
        return round_misses(table.curve, draws, setup.k, setup.num_replicas, cached_rows)
    return RoundMisses(table.curve.missed_rows(draws, cached_rows), 0.0)


def _read_share(table: Table, setup: StepSetup, draws: float, misses: RoundMisses) -> float:
    """Part of the missed rows that are read: those that the job touches for the first time are made, not read."""
    missed = misses.per_step + misses.per_round / max(setup.k, 1)
    if not setup.num_steps or missed <= 0:
        return 1.0
    first_touches = table.curve.distinct_rows(draws * setup.num_steps * max(setup.num_replicas, 1)) / setup.num_steps
    return max(1 - first_touches / missed, 0.0)


def _exchange_bytes(table: Table, setup: StepSetup, sharding: Sharding, row_bytes: float, rows_share: float) -> dict[str, float]:
    """Ids towards this shard, pooled rows away from it; gradients come back the way that pooled rows went.

    Row-wise shards send partial sums of every bag, so that together they send as often as there are shards: `summed_output_bytes`,
    as the way out is a reduce-scatter. Over several hosts, `table_row_wise` sums inside the host first (`host_output_bytes`) and sends
    the sums along lanes of equal local rank.
    """
    if sharding == "data_parallel":
        return {"all_reduce_bytes": float(table.num_rows * table.row_bytes)}
    bags = setup.batch_size * table.num_features
    ids = setup.batch_size * table.ids_per_sample * rows_share * ID_BYTES + bags * LENGTH_BYTES
    pooled = bags * row_bytes
    if sharding == "table_row_wise" and setup.num_hosts > 1:
        return {"id_bytes": ids, "host_output_bytes": pooled * setup.num_hosts, "lane_output_bytes": pooled}
    return {"id_bytes": ids, "summed_output_bytes" if sharding in ("row_wise", "table_row_wise") else "output_bytes": pooled}


def _update_bytes(table: Table, setup: StepSetup, distinct: float, record_bytes: float, share: float, is_replica: bool) -> float:
    """Memory traffic of the optimizer, beside gradients.

    Dense kernels go over the whole shard several times in every step; the others read and write the records of the rows that were met.
    """
    if setup.kernel == "dense" or is_replica:
        return table.num_rows * table.row_bytes * share * setup.dense_passes
    return 2 * distinct * record_bytes


def tier_quantities(
    tier: Tier, missed_rows: float, distinct_rows: float, record_bytes: float, on_device: bool, read_share: float = 1.0
) -> dict[str, float]:
    """Traffic between the tiers: each missed row comes up, and as many changed ones go down in exchange.

    A table on SSD has its cache in DRAM, so that every row of a batch crosses to the device and back. Of the rows that its cache misses
    `read_share` are read; the others were never touched before.
    """
    quantities: dict[str, float] = {}
    if on_device:
        quantities["fetch_bytes"] = (missed_rows if tier == "dram" else distinct_rows) * record_bytes
    if tier == "ssd":
        names = ("tier_rows", "drive_reads", "drive_read_bytes", "drive_write_bytes")
        quantities |= zip(names, _drive_traffic(missed_rows, record_bytes, read_share), strict=True)
        quantities["cache_rows"] = distinct_rows
    return quantities


def merge_tier_quantities(missed_rows: float, record_bytes: float, read_share: float) -> dict[str, float]:
    """Traffic of merge rounds between a cache and its drive; each row that they bring up displaces one that they changed."""
    names = ("merge_tier_rows", "merge_reads", "merge_read_bytes", "merge_write_bytes")
    return dict(zip(names, _drive_traffic(missed_rows, record_bytes, read_share), strict=True))


def _drive_traffic(missed_rows: float, record_bytes: float, read_share: float) -> tuple[float, float, float, float]:
    """Rows that a cache over a drive misses; reads for them, bytes of these, and bytes written for the rows that make room."""
    stored = record_bytes + RECORD_HEADER_BYTES
    reads = missed_rows * read_share
    return missed_rows, reads, reads * read_unit_bytes(stored), missed_rows * stored * WRITE_AMPLIFICATION


def read_unit_bytes(stored_bytes: float) -> int:
    """What one read fetches: the fewest pages that records of this size fill up to 15 %."""
    size = math.ceil(stored_bytes)
    for num_pages in range(1, 65):
        unit = num_pages * PAGE_BYTES
        num_records = unit // size
        if num_records and unit - num_records * size <= MAX_PADDING * unit:
            return unit
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def merged_rows(table: Table, setup: StepSetup, draws: float) -> tuple[float, float]:
    """Rows that one replica touches from one merge round to the next, and those that any replica does.

    A replica sends its touched rows to owners spread over all replicas, 1/N of them to each; owners send the union of what all
    replicas touched to each.
    """
    return table.curve.distinct_rows(draws * setup.k), table.curve.distinct_rows(draws * setup.k * setup.num_replicas)


def touched_share(table: Table, setup: StepSetup, draws: float) -> float:
    """Part of a table's rows that the whole job will touch: what is never touched takes no room on a drive."""
    if not setup.num_steps:
        return 1.0
    expected = table.curve.distinct_rows(draws * setup.num_steps * max(setup.num_replicas, 1))
    return min(TOUCHED_MARGIN * expected / table.num_rows, 1.0)


def memory_bytes(
    table: Table,
    setup: StepSetup,
    tier: Tier,
    cached_rows: float,
    touched_rows: float,
    rows_share: float,
    columns_share: float,
    on_device: bool,
) -> dict[str, float]:
    """Bytes that the shard takes in each tier; on drives and in their index, once all rows were touched that will be."""
    rows = table.num_rows * rows_share
    record = table.record_bytes * columns_share
    if setup.kernel == "dense":
        whole = rows * table.row_bytes * columns_share * setup.dense_copies
        return {"device_bytes": whole} if on_device else {"dram_bytes": whole, "row_bytes": whole}
    slots = min(cached_rows, rows) * (record + SLOT_OVERHEAD_BYTES)
    if tier == "device":
        return {"device_bytes": rows * record}
    if tier == "dram":
        held = rows * (record + (SLOT_OVERHEAD_BYTES if setup.kernel == "tiered" else 0))
        return {"dram_bytes": held, "row_bytes": held} | ({"device_bytes": slots} if on_device else {})
    stored = touched_rows * (record + RECORD_HEADER_BYTES) * SPACE_FACTOR
    index = index_memory_bytes(max(round(rows), 1), min(touched_rows, rows))
    return {"ssd_bytes": stored, "dram_bytes": slots + index, "row_bytes": slots, "index_bytes": float(index)}
