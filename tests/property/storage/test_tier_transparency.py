"""Layer 2, in process: tables behind a cache and a row store give the bits of tables in DRAM, whatever the tiers' sizes.

What breaks otherwise: a row read before it was written down, a prefetched row that misses an update of the batch before, an
evicted row that comes back with an older value. Lookups, gradients' effects and every field of every row are compared.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.ops.batches import BagBatch, batches, optimizers, tables
from tests.tiers import assert_same_state
from torchrec_kstep.ops.batch import Dedup, TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import OptimizerSpec
from torchrec_kstep.storage.division import RecordLayout, payload_bytes
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB

CACHES = ("nothing", "one row", "a few rows", "5 %", "everything")
QUICK = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
LONG = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def cache_bytes(cache: str, group: list[TableSpec], optimizer: OptimizerSpec) -> int:
    slots = [RecordLayout.of(payload_bytes(table, optimizer), 256 * KIB).slot_bytes for table in group]
    everything = sum(table.num_rows * slot for table, slot in zip(group, slots, strict=True))
    return {
        "nothing": 0,
        "one row": sum(slots),
        "a few rows": 5 * sum(slots),
        "5 %": everything // 20,
        "everything": everything,
    }[cache]


def step(group: RowGroup, batch: BagBatch, dedup: Dedup, is_deferred: bool, number: int, pooling: str) -> torch.Tensor:
    group.set_step(0.1 / number, number)
    group.set_deferred(is_deferred)
    weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
    out = group.pooled_of(dedup, batch.offsets, batch.table_of_feature, weights, pooling)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(number)))
    if is_deferred:
        group.apply(group.take_pending())
    return out.detach() if weights is None else torch.cat([out.detach().flatten(), weights.grad])


def check_transparent(data: st.DataObject, cache: str, depth: int, backend: str, is_deferred: bool, pooling: str) -> None:
    group_tables = data.draw(tables())
    optimizer = data.draw(optimizers())
    steps = [data.draw(batches(group_tables)) for _ in range(data.draw(st.integers(1, 5)))]
    restart_after = data.draw(st.one_of(st.none(), st.integers(0, len(steps) - 1)), label="snapshot and restart after step")
    flush_after = data.draw(st.sets(st.integers(0, len(steps) - 1)), label="flush after steps")
    expected = RowGroup.in_dram(group_tables, optimizer)
    has_restarted = False
    with tempfile.TemporaryDirectory(prefix="kstep-test-") as folder:

        def open_store(restore: str | None = None) -> TieredTables:
            config = TierConfig(
                cache_bytes(cache, group_tables, optimizer),
                [Path(folder) / "a", Path(folder) / "b"],
                segment_bytes=256 * KIB,
                prefetch_depth=depth,
                lookahead=depth + 2,
                io_backend=backend,
                queue_depth=8,
            )
            return TieredTables.open(group_tables, optimizer, config, restore)

        group = open_store()
        index = 0
        while index < len(steps):  # once, and once more after a restart: looking ahead ends with its store
            dedup_in = group.dedup
            ahead = group.lookahead(steps[index:], lambda batch, dedup=dedup_in: dedup(batch.ids, batch.offsets, batch.table_of_feature))
            for batch, dedup in ahead:
                actual_out = step(group, batch, dedup, is_deferred, index + 1, pooling)
                expected_out = step(expected, batch, dedup, is_deferred, index + 1, pooling)
                assert torch.equal(actual_out, expected_out), f"step {index + 1}"
                if index in flush_after:
                    group.flush()
                index += 1
                if index - 1 == restart_after:
                    break
            ahead.close()
            if index - 1 == restart_after:
                group.snapshot("here")
                group.close()
                group = open_store("here")
                restart_after = None
                has_restarted = True
        assert_same_state(group, expected, optimizer)
        for table in range(len(group_tables)):
            if optimizer.touches != "none" and not has_restarted:
                assert torch.equal(group.touched_rows(table), expected.touched_rows(table))
        group.close()


ARGUMENTS = {
    "data": st.data(),
    "cache": st.sampled_from(CACHES),
    "depth": st.integers(0, 4),
    "backend": st.sampled_from(("uring", "threads")),
    "is_deferred": st.booleans(),
    "pooling": st.sampled_from(("sum", "mean")),
}


@given(**ARGUMENTS)
@QUICK
def test_tiers_do_not_show(data: st.DataObject, cache: str, depth: int, backend: str, is_deferred: bool, pooling: str) -> None:
    check_transparent(data, cache, depth, backend, is_deferred, pooling)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(**ARGUMENTS)
@LONG
def test_tiers_do_not_show_in_many_cases(
    data: st.DataObject, cache: str, depth: int, backend: str, is_deferred: bool, pooling: str
) -> None:
    check_transparent(data, cache, depth, backend, is_deferred, pooling)
