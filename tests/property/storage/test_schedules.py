"""Layer 2, in process: any order of training, evaluation, prefetch, flush, snapshot, deletion and restart against rows in DRAM.

What breaks otherwise: a restart that brings back a row of another moment, a hint for a batch that never comes and pins its rows,
a deleted snapshot whose files another one needs, a cleaned segment that still held a current row.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.tiers import ADAM, assert_same_state, open_tiered, state_of, uniform_table
from torchrec_kstep.ops.row_group import RowGroup, record_fields
from torchrec_kstep.storage.snapshot import Snapshot
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.units import KIB

TABLES = [uniform_table("a", 3000, 8, 0), uniform_table("b", 40, 16, 1), uniform_table("c", 700, 8, 2)]
CACHES = (0, 2 * KIB, 64 * KIB, 2000 * KIB)

Rows = tuple[int, int, int]  # seed, how many ids, of how many different rows
rows_of_batch = st.tuples(st.integers(0, 5), st.integers(0, 900), st.sampled_from((1, 30, 3000)))


def batch_of(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the three tables, one per bag, and their offsets."""
    seed, count, spread = rows
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, min(spread, table.num_rows), (count,), generator=generator) for table in TABLES])
    return ids, torch.arange(ids.numel() + 1)


class Schedules(RuleBasedStateMachine):
    """The store and its model take the same steps."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kstep-test-"))
        self.cache = 2 * KIB
        self.group: TieredTables = open_tiered(self.folder, TABLES, dram_bytes=self.cache)
        self.model = RowGroup.in_dram(TABLES, ADAM)
        self.saved: dict[str, dict[str, torch.Tensor]] = {}
        self.step = 0

    @rule(rows=rows_of_batch, deferred=st.booleans())
    def train(self, rows: Rows, deferred: bool) -> None:
        self.step += 1
        ids, offsets = batch_of(rows)
        outs = []
        for group in (self.group, self.model):
            group.set_step(0.1, self.step)
            group.set_deferred(deferred)
            out = group.pooled(ids, offsets, [0, 1, 2])
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(self.step)))
            if deferred:
                group.apply(group.take_pending())
            outs.append(out.detach())
        assert torch.equal(*outs)

    @rule(rows=rows_of_batch)
    def evaluate(self, rows: Rows) -> None:
        ids, offsets = batch_of(rows)
        assert torch.equal(*(group.pooled(ids, offsets, [0, 1, 2]).detach() for group in (self.group, self.model)))

    @rule(rows=rows_of_batch)
    def prefetch(self, rows: Rows) -> None:
        ids, offsets = batch_of(rows)
        self.group.prefetch(self.group.dedup(ids, offsets, [0, 1, 2]))

    @rule()
    def cancel_prefetch(self) -> None:
        self.group.cancel_prefetch()

    @rule()
    def flush(self) -> None:
        self.group.flush()

    @precondition(lambda self: len(self.saved) < 4)
    @rule()
    def snapshot(self) -> None:
        name = f"s{self.step}-{len(self.saved)}"
        if name in self.saved:
            return
        self.group.snapshot(name)
        self.saved[name] = state_of(self.model)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def remove_snapshot(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self.group.remove_snapshot(name)
        del self.saved[name]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def read_snapshot(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        snapshot = Snapshot.open(self.group.paths, name)
        assert not snapshot.verify().failures
        for table in TABLES:
            for field, values in snapshot.read(table.name, torch.arange(table.num_rows)).items():
                assert torch.equal(values, self.saved[name][f"{table.name}.{field}"]), f"{name} {table.name}.{field}"

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), cache=st.sampled_from(CACHES), depth=st.integers(0, 4), backend=st.sampled_from(("uring", "threads")))
    def restart(self, data: st.DataObject, cache: int, depth: int, backend: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self.group.close()
        self.group = open_tiered(self.folder, TABLES, dram_bytes=cache, restore=name, prefetch_depth=depth, io_backend=backend)
        self.model = RowGroup.in_dram(TABLES, ADAM)
        for index, table in enumerate(TABLES):
            for field in record_fields(table, ADAM):
                self.model.write(index, torch.arange(table.num_rows), self.saved[name][f"{table.name}.{field.name}"], field.name)

    @invariant()
    def the_same_snapshots_are_listed(self) -> None:
        assert set(self.group.snapshots()) == set(self.saved)

    def teardown(self) -> None:
        try:
            assert_same_state(self.group, self.model)
        finally:
            self.group.close()
            shutil.rmtree(self.folder)


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]


def test_any_schedule() -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=20, stateful_step_count=20, suppress_health_check=HEALTH))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_schedule_in_many_cases() -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=200, stateful_step_count=50, suppress_health_check=HEALTH))
