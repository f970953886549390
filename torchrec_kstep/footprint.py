"""How much memory a host of a job needs, from the configuration alone, to ask a scheduler for it. No tensor library."""

import json
from pathlib import Path

from torchrec_kstep.config.schema import DataConfig, RunConfig
from torchrec_kstep.units import MIB, parse_bytes

PROCESS_BYTES = 600 * MIB  # a rank without large tables: 480 MiB at its peak on MovieLens-100K (measured), and a margin
HEADROOM = 1.25  # allocator slack, activations, gloo's buffers
ID_BYTES = 8
FLOAT_BYTES = 4
INDEX_BYTES = 16  # of a row on SSD, in DRAM: 13 measured, and a margin

# Values kept per weight, itself and its gradient counted, by optimizer of the tables.
STATES = {"adam": 4, "adagrad": 3, "rowwise_adagrad": 2, "sgd": 2}

# Rows of all tables together where neither the configuration nor a prepared set tells: published distinct values per set.
KNOWN_ROWS = {"movielens_100k": 6_000, "movielens_1m": 14_000, "frappe": 5_500, "criteo": 33_800_000, "avazu": 9_500_000}
KNOWN_FEATURES = {"movielens_100k": 8, "movielens_1m": 8, "frappe": 10, "criteo": 39, "avazu": 24}


def host_memory_bytes(config: RunConfig, num_hosts: int, ranks_per_host: int) -> int:
    """Estimates the peak memory of one host: its processes, its share of the tables, and the batches in flight.

    Tables are spread evenly over the hosts, except under `data_parallel`, where every rank has a copy. Of tables on SSD memory
    holds the cache, and the index of all rows.
    """
    num_rows, num_features = table_rows(config.data)
    weights_bytes = num_rows * config.model.embedding_dim * FLOAT_BYTES
    states_bytes = weights_bytes * STATES.get(config.optim.embedding, 4)
    copies_per_host = ranks_per_host if config.planner.sharding == "data_parallel" else 1 / num_hosts
    tables_bytes = states_bytes * copies_per_host
    if config.planner.kernel == "tiered" and config.tiers.name == "dram_ssd":
        tables_bytes = min(tables_bytes, parse_bytes(config.tiers.dram_bytes) + num_rows * INDEX_BYTES / num_hosts)
    rows_per_batch = max(config.train.batch_size, config.train.eval_batch_size)
    row_bytes = num_features * (ID_BYTES * 2 + config.model.embedding_dim * FLOAT_BYTES * 4)  # ids, pooled vectors, gradients, exchange
    batches_bytes = ranks_per_host * rows_per_batch * row_bytes * (config.data.prefetch_batches + 2)
    groups_bytes = ranks_per_host * config.data.shuffle_row_groups * config.data.rows_per_row_group * num_features * ID_BYTES * 2
    return int(HEADROOM * (ranks_per_host * PROCESS_BYTES + tables_bytes + batches_bytes + groups_bytes))


def table_rows(data: DataConfig) -> tuple[int, int]:
    """Returns the rows of all tables together and the number of columns.

    They come from the configuration (synthetic data, hashed ids), else from the manifest of the prepared set if this machine
    has it, else from what is known of the set.
    """
    if data.name == "synthetic":
        tables = data.synthetic.num_rows_per_table
        return sum(tables), (data.synthetic.num_dense + len(tables) * data.synthetic.max_ids_per_bag)
    manifest = Path(data.path) / "manifest.json"
    if manifest.is_file():
        content = json.loads(manifest.read_text(encoding="utf-8"))
        return sum(column["num_rows"] for column in content["sparse"]), len(content["dense"]) + len(content["sparse"])
    num_features = KNOWN_FEATURES.get(data.name, 0)
    return (num_features * data.num_hash_rows if data.encoding == "hash" else KNOWN_ROWS.get(data.name, 0)), num_features
