"""Layer 2, in process: the estimate of memory and disk against stores that really hold the rows."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.tiers import open_tiered, store_paths, uniform_table
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec, RowwiseAdagradSpec, SgdSpec
from torchrec_kstep.storage.estimate import estimate
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB, MIB

CASES = {
    "all rows, dim 16": ([uniform_table("a", 80_000, 16, 0)], [80_000], AdamSpec(lr=1), "4MiB"),
    "a tenth of the rows": ([uniform_table("a", 1_000_000, 8, 0)], [100_000], SgdSpec(lr=1), "2MiB"),
    "very few rows of many": ([uniform_table("a", 40_000_000, 4, 0)], [30_000], SgdSpec(lr=1), "1MiB"),
    "two sizes": ([uniform_table("a", 30_000, 64, 0), uniform_table("b", 90_000, 16, 1)], [30_000, 20_000], AdamSpec(lr=1), "16MiB"),
    "three tables in one log": ([uniform_table(name, 50_000, 12, index) for index, name in enumerate("abc")], [50_000] * 3,
                                RowwiseAdagradSpec(lr=1), "4MiB"),
    "wide rows": ([uniform_table("a", 3000, 1000, 0)], [3000], AdamSpec(lr=1), "4MiB"),
}  # fmt: skip


def evenly(num_rows: int, touched: int) -> torch.Tensor:
    """Random distinct rows, as hashed ids are."""
    generator = torch.Generator().manual_seed(5)
    if touched == num_rows:
        return torch.arange(num_rows)
    drawn = torch.randint(0, num_rows, (2 * touched,), generator=generator).unique()
    return drawn[torch.randperm(drawn.numel(), generator=generator)[:touched]].sort().values


@pytest.mark.parametrize("name", CASES)
def test_within_ten_percent_of_what_a_store_uses(name: str, tmp_path: Path) -> None:
    tables: list[TableSpec]
    optimizer: OptimizerSpec
    tables, touched, optimizer, dram = CASES[name]
    config = TierConfig(dram, [tmp_path], segment_bytes=4 * MIB, queue_depth=16)
    expected = estimate(tables, optimizer, config.num_dram_bytes, config, touched)
    with open_tiered(tmp_path, tables, optimizer, dram_bytes=dram, segment_bytes=4 * MIB) as group:

        def write(table: int, rows: torch.Tensor) -> None:
            for batch in rows.split(100 if tables[table].dim > 100 else 4000):  # fits into the cache: nothing overflows
                group.write(table, batch, torch.ones(batch.numel(), tables[table].dim))

        for table, num_touched in enumerate(touched):
            write(table, evenly(tables[table].num_rows, num_touched))
        group.flush()
        disk_bytes = group.usage().total_bytes
        files = sum(path.stat().st_size for path in Path(store_paths(tmp_path)[0]).glob("log-*/*"))
        assert files == disk_bytes
        assert expected.cache_bytes == pytest.approx(group.cache_memory_bytes, rel=0.1)
        stats = group.stats()
        assert expected.index_bytes == pytest.approx(stats.total("index_bytes"), rel=0.1)
        for table in expected.tables:
            assert table.index_bytes == pytest.approx(stats.tables[table.name]["index_bytes"], rel=0.1), table.name
        assert expected.disk_bytes == pytest.approx(disk_bytes, rel=0.1)
        assert disk_bytes <= expected.max_disk_bytes
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for table, num_touched in enumerate(touched):
                again = evenly(tables[table].num_rows, num_touched)
                write(table, again[torch.randperm(num_touched, generator=generator)[: num_touched // 2]])
            group.flush()
            assert group.usage().total_bytes <= expected.max_disk_bytes * 1.1


def test_more_rows_never_take_less(tmp_path: Path) -> None:
    config = TierConfig("1MiB", [tmp_path], segment_bytes=256 * KIB)
    tables = [uniform_table(num_rows=10_000_000)]
    steps = [0, 1, 100, 10_000, 100_000, 1_000_000, 9_000_000, 10_000_000]
    sizes = [estimate(tables, AdamSpec(lr=1), MIB, config, [touched]) for touched in steps]
    for smaller, larger in itertools.pairwise(sizes):
        assert smaller.index_bytes <= larger.index_bytes
        assert smaller.disk_bytes <= larger.disk_bytes <= larger.max_disk_bytes
