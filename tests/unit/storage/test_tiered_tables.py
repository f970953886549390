"""Layer 2, in process: what a tiered group does beside giving the bits of one in DRAM (tests/property/storage shows those)."""

import threading
import time
from pathlib import Path

import pytest
import torch

from tests.tiers import ADAM, assert_same_state, config, file_hashes, open_tiered, state_of, store_paths, train, uniform_table
from torchrec_kstep.errors import ConfigError, CorruptionError, DataError, StorageError, TierFullError
from torchrec_kstep.ops import kernels
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec, SgdSpec
from torchrec_kstep.storage.snapshot import Snapshot
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import KIB, MIB
from torchrec_kstep.world import World

CACHED_ROW = 128 + 48  # bytes: dim 8 with Adam


@pytest.mark.parametrize("num_cached", [0, 1, 8])
def test_a_batch_larger_than_the_cache(tmp_path: Path, num_cached: int) -> None:
    tables = [uniform_table()]
    expected = RowGroup.in_dram(tables, ADAM)
    with open_tiered(tmp_path, tables, dram_bytes=num_cached * CACHED_ROW) as group:
        for step in range(1, 4):
            rows = torch.randperm(1000, generator=torch.Generator().manual_seed(step))[:500]
            assert torch.equal(train(group, 0, rows, step), train(expected, 0, rows, step))
        assert_same_state(group, expected)


@pytest.mark.parametrize("order", [("ssd", "dram", "uncached"), ("dram", "uncached", "ssd"), ("uncached", "ssd", "dram")])
def test_tables_with_and_without_cache_side_by_side(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Groups in any order, with prefetch for all: none may take another's settings."""
    made: dict[str, RowGroup] = {}
    for kind in order:
        tables = [uniform_table(kind)]
        if kind == "dram":
            made[kind] = RowGroup.in_dram(tables, ADAM)
        else:
            made[kind] = open_tiered(tmp_path / kind, tables, dram_bytes=64 * KIB if kind == "ssd" else 0)
    expected = RowGroup.in_dram([uniform_table("e")], ADAM)
    for step in range(1, 5):
        rows = torch.arange(step, 900, 7)
        for group in made.values():
            group.prefetch(group.dedup(rows, torch.arange(rows.numel() + 1), [0]))
        outs = {kind: train(group, 0, rows, step) for kind, group in made.items()}
        expected_out = train(expected, 0, rows, step)
        assert all(torch.equal(out, expected_out) for out in outs.values())
    for group in made.values():
        assert torch.equal(group.read(0, torch.arange(1000)), expected.read(0, torch.arange(1000)))


def test_tables_of_several_sizes_share_one_store(tmp_path: Path) -> None:
    tables = [uniform_table("a", 500, 8, 0), uniform_table("b", 50, 16, 1), uniform_table("c", 700, 8, 2)]
    expected = RowGroup.in_dram(tables, ADAM)
    with open_tiered(tmp_path, tables, dram_bytes=10 * KIB) as group:
        for step in range(1, 6):
            for table, spec in enumerate(tables):
                rows = torch.arange(step % 3, spec.num_rows, 3)
                assert torch.equal(train(group, table, rows, step), train(expected, table, rows, step))
        assert_same_state(group, expected)
        assert {segment.payload_bytes for segment in group.segment_map()} == {96, 192}


def test_many_rows_through_a_small_cache(tmp_path: Path) -> None:
    """200,000 distinct rows in one call through a cache of 1,000."""
    num_rows = 200_000
    tables = [uniform_table(num_rows=num_rows, dim=4)]
    with open_tiered(tmp_path, tables, SgdSpec(lr=1.0), dram_bytes=1000 * (16 + 48), segment_bytes=4 * MIB) as group:
        values = torch.arange(num_rows * 4, dtype=torch.float32).view(num_rows, 4)
        group.write(0, torch.arange(num_rows), values)
        assert group.stats().tables["t"]["cache_slots_count"] == 1000
        assert torch.equal(group.read(0, torch.arange(num_rows)), values)
        group.flush()
        assert group.stats().tables["t"]["materialised_rows"] == num_rows


def test_evaluation_of_a_snapshot_needs_no_optimizer_and_writes_nothing(tmp_path: Path) -> None:
    tables = [uniform_table()]
    with open_tiered(tmp_path, tables, dram_bytes=2 * KIB) as group:
        train(group, 0, torch.arange(0, 1000, 2))
        expected = group.read(0, torch.arange(1000))
        group.snapshot("trained")
    before = file_hashes(tmp_path)
    for _ in range(2):
        evaluated = Snapshot.open(store_paths(tmp_path), "trained").group()
        rows, offsets = torch.arange(1000), torch.arange(1001)
        assert torch.equal(evaluated.pooled(rows, offsets, [0]).detach(), expected)
        evaluated.set_step(0.1, 1)
        with pytest.raises(DataError, match="optimizer"):
            evaluated.pooled(rows, offsets, [0]).sum().backward()
        with pytest.raises(DataError, match="read-only"):
            evaluated.write(0, rows[:1], expected[:1])
    assert file_hashes(tmp_path) == before


def test_evaluation_amid_training_writes_nothing_and_shows_initial_values(tmp_path: Path) -> None:
    tables = [uniform_table()]
    untouched = RowGroup.in_dram(tables, ADAM)
    with open_tiered(tmp_path, tables, dram_bytes=2 * KIB) as group:
        train(group, 0, torch.arange(0, 500))
        group.snapshot("trained")
        before = file_hashes(tmp_path)
        outs = [group.pooled(torch.arange(1000), torch.arange(1001), [0]).detach() for _ in range(2)]
        assert file_hashes(tmp_path) == before
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0][500:], untouched.read(0, torch.arange(500, 1000)))
        assert group.stats().tables["t"]["materialised_rows"] == 500


def test_training_continues_from_a_snapshot_to_the_same_bits(tmp_path: Path) -> None:
    tables = [uniform_table("a", 800, 8, 0), uniform_table("b", 300, 24, 1)]
    steps = [torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(step)) for step in range(8)]
    expected = RowGroup.in_dram(tables, ADAM)
    for step, rows in enumerate(steps, 1):
        for table in range(2):
            train(expected, table, rows, step)
    with open_tiered(tmp_path, tables, dram_bytes=4 * KIB) as group:
        for step, rows in enumerate(steps[:4], 1):
            for table in range(2):
                train(group, table, rows, step)
        group.snapshot("step-4", note="lr 0.1")
        for step, rows in enumerate(steps[4:6], 5):
            train(group, 0, rows, step)  # lost with the process
    with open_tiered(tmp_path, tables, dram_bytes=20 * KIB, restore="step-4") as group:
        assert group.read_snapshot("step-4").note == "lr 0.1"
        for step, rows in enumerate(steps[4:], 5):
            for table in range(2):
                train(group, table, rows, step)
        assert_same_state(group, expected)
        group.snapshot("step-8")
        assert group.snapshots() == ["step-4", "step-8"]
        group.remove_snapshot("step-4")
        assert group.snapshots() == ["step-8"]


@pytest.mark.parametrize("is_deferred", [False, True])
def test_going_back_in_place_equals_opening_anew(tmp_path: Path, is_deferred: bool) -> None:
    """Whoever holds the group goes on with the rows of then; way of updating, rate and step stay."""
    tables = [uniform_table()]
    expected = RowGroup.in_dram(tables, ADAM)
    with open_tiered(tmp_path, tables) as group:
        for step in range(1, 4):
            rows = torch.arange(step, 900, 3)
            train(group, 0, rows, step)
            train(expected, 0, rows, step)
        group.snapshot("then")
        then = state_of(group)
        train(group, 0, torch.arange(1000), 4)
        group.set_deferred(is_deferred)
        group.pooled(torch.arange(5), torch.arange(6), [0]).sum().backward()
        assert group.num_pending == is_deferred
        group.prefetch(group.dedup(torch.arange(50), torch.arange(51), [0]))
        group.set_step(0.1, 4)
        group.restore("then")
        assert group.num_pending == 0
        assert all(torch.equal(values, then[name]) for name, values in state_of(group).items())
        expected.set_step(0.1, 4)
        for each in (group, expected):  # without naming rate and step again
            out = each.pooled(torch.arange(300), torch.arange(301), [0])
            out.backward(torch.full_like(out, 0.5))
        if is_deferred:
            group.apply(group.take_pending())
        assert_same_state(group, expected)
        with pytest.raises(StorageError, match="has no snapshot 'never'; it has then"):
            group.restore("never")
        assert_same_state(group, expected)


def test_going_back_in_place_keeps_counting_touches_and_keeping_bases(tmp_path: Path) -> None:
    """Otherwise rows touched after resuming would silently never be merged with those of other replicas."""
    optimizer = AdamSpec(lr=0.1, touches="count")
    with open_tiered(tmp_path, [uniform_table()], optimizer) as group:
        group.track(0, ("weight", "m", "v"))
        train(group, 0, torch.arange(10), 1)
        group.clear_touched(0)
        group.snapshot("then")
        train(group, 0, torch.arange(20), 2)
        group.restore("then")
        assert group.tracked_fields(0) == ("weight", "m", "v")
        assert group.touched_rows(0).tolist() == []
        train(group, 0, torch.tensor([3, 5]), 2)
        assert group.touched_rows(0).tolist() == [3, 5]
        assert group.base_bytes > 0
        group.clear_touched(0)
        group.set_tracking(False)
        group.restore("then")
        train(group, 0, torch.tensor([3, 5]), 2)
        assert group.touched_rows(0).tolist() == []


def test_a_snapshot_can_be_read_while_training_goes_on(tmp_path: Path) -> None:
    with open_tiered(tmp_path, [uniform_table()], dram_bytes=2 * KIB) as group:
        train(group, 0, torch.arange(1000))
        expected = state_of(group)
        group.snapshot("early")
        early = group.read_snapshot("early")
        for step in range(2, 30):
            train(group, 0, torch.arange(1000), step)
        fields = early.read("t", torch.arange(1000))
        assert all(torch.equal(fields[name.removeprefix("t.")], values) for name, values in expected.items())
        assert not early.verify().failures


@pytest.mark.parametrize(
    ("tables", "optimizer", "message"),
    [
        ([uniform_table(dim=16)], ADAM, "field 'weight' is weight:f32"),
        ([uniform_table()], SgdSpec(lr=0.1), "field 'm' is absent here"),
        ([uniform_table()], AdamSpec(lr=0.1, bias_correction="row"), "field 'step'"),
        ([uniform_table(num_rows=999)], ADAM, "num_rows is 999 here, but 1000"),
        ([uniform_table()._replace(first_column=8)], ADAM, "first_column is 8 here, but 0"),
        ([uniform_table()._replace(init_b=0.4)], ADAM, "initial value"),
        ([uniform_table()._replace(seed=8)], ADAM, "seed is 8 here, but 7"),
        ([uniform_table("u")], ADAM, "'t'.*not in this configuration"),
    ],
)
def test_a_snapshot_of_other_tables_is_refused_by_name(
    tmp_path: Path, tables: list[TableSpec], optimizer: AdamSpec | SgdSpec, message: str
) -> None:
    with open_tiered(tmp_path, [uniform_table()]) as group:
        train(group, 0, torch.arange(10))
        group.snapshot("s")
    with pytest.raises(ConfigError, match=message) as caught:
        open_tiered(tmp_path, tables, optimizer, restore="s")
    assert store_paths(tmp_path)[0] in str(caught.value)


def test_a_store_belongs_to_one_owner(tmp_path: Path) -> None:
    with open_tiered(tmp_path, [uniform_table()]), pytest.raises(StorageError, match="LOCK"):
        open_tiered(tmp_path, [uniform_table()])
    open_tiered(tmp_path, [uniform_table()]).close()


def test_ranks_of_a_host_have_stores_of_their_own(tmp_path: Path) -> None:
    groups = [TieredTables.open([uniform_table()], ADAM, config(tmp_path), world=World(rank, 2, rank, 2)) for rank in range(2)]
    assert groups[0].paths != groups[1].paths
    for group in groups:
        group.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    group = open_tiered(tmp_path, [uniform_table()])
    group.close()
    group.close()
    assert group.is_closed
    for use in (group.snapshots, group.usage, group.segment_map, group.flush, lambda: group.read(0, torch.arange(1))):
        with pytest.raises(StorageError, match="is closed"):
            use()


def test_the_files_are_released_with_the_group(tmp_path: Path) -> None:
    group = open_tiered(tmp_path, [uniform_table()])
    del group
    open_tiered(tmp_path, [uniform_table()]).close()


def test_a_missing_snapshot_and_a_bad_name_are_told(tmp_path: Path) -> None:
    with open_tiered(tmp_path, [uniform_table()]) as group:
        with pytest.raises(ConfigError, match="expected 1 to 64 letters"):
            group.snapshot("../out")
        group.snapshot("s")
        with pytest.raises(ConfigError, match="exists already"):
            group.snapshot("s")
        with pytest.raises(StorageError, match="nothing"):
            group.remove_snapshot("nothing")
    with pytest.raises(StorageError, match="nothing"):
        open_tiered(tmp_path, [uniform_table()], restore="nothing")


def test_no_snapshot_while_gradients_are_pending(tmp_path: Path) -> None:
    with open_tiered(tmp_path, [uniform_table()]) as group:
        group.set_deferred(True)
        train(group, 0, torch.arange(5))
        with pytest.raises(StorageError, match="gradients of 1 backwards are pending"):
            group.snapshot("s")
        group.apply(group.take_pending())
        group.snapshot("s")


def test_damage_names_file_and_offset_and_spares_other_rows(tmp_path: Path) -> None:
    with open_tiered(tmp_path, [uniform_table()]) as group:
        train(group, 0, torch.arange(1000))
        group.snapshot("s")
    segment = next(Path(store_paths(tmp_path)[0]).glob("snapshots/s/log-*/seg-*.seg"))
    with segment.open("r+b") as file:
        file.seek(4096 + 116 + 7)  # in the payload of the second record
        file.write(b"\xff")
    report = Snapshot.open(store_paths(tmp_path), "s").verify()
    assert f"{segment} at offset {4096 + 116}" in report.failures[0]
    with open_tiered(tmp_path, [uniform_table()], restore="s") as group:
        with pytest.raises(CorruptionError, match=r"table 't' of the row store at .*offset"):
            train(group, 0, torch.arange(1000))
        assert torch.equal(group.read(0, torch.tensor([999])), group.read(0, torch.tensor([999])))


def test_the_quota_is_kept_and_space_comes_back(tmp_path: Path) -> None:
    """A full tier fails before anything changed; once snapshots are deleted the same step works."""
    table = uniform_table(num_rows=20_000, dim=16)
    expected = RowGroup.in_dram([table], ADAM)
    with open_tiered(tmp_path, [table], dram_bytes=0, segment_bytes=64 * KIB, ssd_bytes=4 * MIB) as group:

        def steps(first: int, last: int) -> None:
            for number in range(first, last + 1):
                train(group, 0, torch.arange(0, 6000), number)
                group.snapshot(f"s{number}")

        steps(1, 1)
        train(expected, 0, torch.arange(0, 6000), 1)
        with pytest.raises(TierFullError, match=r"of the quota of 4194304.*delete snapshots or raise ssd_bytes"):
            steps(2, 20)
        assert group.usage().total_bytes <= 4 * MIB
        assert not Snapshot.open(store_paths(tmp_path), "s1").verify().failures
    with open_tiered(tmp_path, [table], dram_bytes=0, segment_bytes=64 * KIB, ssd_bytes=4 * MIB, restore="s1") as group:
        for name in group.snapshots()[1:]:
            group.remove_snapshot(name)
        assert_same_state(group, expected)
        train(group, 0, torch.arange(0, 6000), 2)
        train(expected, 0, torch.arange(0, 6000), 2)
        assert_same_state(group, expected)


def test_lookahead_left_early_forgets_its_hints(tmp_path: Path) -> None:
    with open_tiered(tmp_path, [uniform_table()], prefetch_depth=4) as group:
        batches = [torch.arange(start, 1000, 9) for start in range(9)]
        ahead = group.lookahead(batches, lambda rows: group.dedup(rows, torch.arange(rows.numel() + 1), [0]))
        for rows, dedup in ahead:
            group.pooled_of(dedup, torch.arange(rows.numel() + 1), [0])
            break
        ahead.close()
        group.flush()
        expected = RowGroup.in_dram([uniform_table()], ADAM)
        assert torch.equal(train(group, 0, batches[5]), train(expected, 0, batches[5]))


def test_replaying_a_batch_changes_no_value(tmp_path: Path) -> None:
    """It moves rows as a step does, and gives rows without a record one with their initial values."""
    expected = RowGroup.in_dram([uniform_table()], ADAM)
    train(expected, 0, torch.arange(0, 500))
    with open_tiered(tmp_path, [uniform_table()], dram_bytes=10 * CACHED_ROW) as group:
        train(group, 0, torch.arange(0, 500))
        rows = torch.arange(400, 900)
        group.replay(group.dedup(rows, torch.arange(rows.numel() + 1), [0]))
        group.flush()
        assert group.stats().total("materialised_rows") == 900
        assert_same_state(group, expected)
        other = RowGroup.in_dram([uniform_table("a"), uniform_table("b")], ADAM)
        with pytest.raises(ConfigError, match="another group"):
            group.replay(other.dedup(rows, torch.tensor([0, 500]), [0]))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("num_cached", [30, 300])
def test_prefetched_rows_are_used(tmp_path: Path, is_training: bool, num_cached: int) -> None:
    """Every lookup and every update finds its prefetch; where the cache holds a batch, an update reads nothing."""
    batches = [torch.randint(0, 1000, (60,), generator=torch.Generator().manual_seed(seed)).unique() for seed in range(12)]
    with open_tiered(tmp_path, [uniform_table()], dram_bytes=num_cached * CACHED_ROW) as group, torch.set_grad_enabled(is_training):
        group.replay(group.dedup(torch.arange(1000), torch.arange(1001), [0]))
        group.flush()
        group.set_step(0.1, 1)
        begin = group.stats()
        for rows, dedup in group.lookahead(batches, lambda rows: group.dedup(rows, torch.arange(rows.numel() + 1), [0])):
            out = group.pooled_of(dedup, torch.arange(rows.numel() + 1), [0])
            if is_training:
                out.sum().backward()
        seen = group.stats().since(begin)
        assert seen.tables["t"]["prefetched_pins_count"] == (24 if is_training else 12)
        assert seen.tables["t"]["unprefetched_pins_count"] == 0
        if num_cached > 60:
            assert seen.total("misses_rows") <= sum(rows.numel() for rows in batches)
        assert 0 < seen.hit_ratio < 1


def test_the_interpreter_runs_while_the_store_works(tmp_path: Path) -> None:
    with open_tiered(tmp_path, [uniform_table(num_rows=60_000, dim=64)], dram_bytes=0, segment_bytes=4 * MIB) as group:
        ticks: list[float] = []
        is_done = threading.Event()

        def tick() -> None:
            while not is_done.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.001)

        other = threading.Thread(target=tick)
        other.start()
        begin = time.perf_counter()
        kernels.write_rows(group.handle, 0, torch.arange(60_000), "weight", torch.ones(60_000, 64))
        middle = time.perf_counter()
        group.snapshot("s")
        end = time.perf_counter()
        is_done.set()
        other.join(timeout=10)
    assert sum(begin < moment < middle for moment in ticks) >= 2, f"{middle - begin} s without a tick in an op"
    assert sum(middle < moment < end for moment in ticks) >= 1, f"{end - middle} s without a tick in a snapshot"


def test_another_thread_may_watch(tmp_path: Path) -> None:
    tables = [uniform_table()]
    expected = RowGroup.in_dram(tables, ADAM)
    is_done = threading.Event()
    seen: list[float] = []
    with open_tiered(tmp_path, tables, dram_bytes=20 * CACHED_ROW) as group:

        def watch() -> None:
            while not is_done.is_set():
                seen.append(group.stats().accesses_rows + group.usage().total_bytes + len(group.segment_map()))
                group.snapshots()
            seen.append(-1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for step in range(1, 30):
            rows = torch.randperm(1000, generator=torch.Generator().manual_seed(step))[:300]
            assert torch.equal(train(group, 0, rows, step), train(expected, 0, rows, step))
        is_done.set()
        watcher.join(timeout=30)
        assert seen[-1] == -1
        assert len(seen) > 2
        assert_same_state(group, expected)


def test_the_backend_is_reported_and_can_be_insisted_on(tmp_path: Path) -> None:
    with open_tiered(tmp_path / "threads", [uniform_table()], io_backend="threads") as group:
        assert group.io_backend == "threads"
        assert "threads" in group.announcement
    with open_tiered(tmp_path / "auto", [uniform_table()]) as group:
        assert group.io_backend in ("io_uring", "threads")


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=str(tmp_path / "file")):
        TieredTables.open([uniform_table()], ADAM, TierConfig(0, [tmp_path / "file"]))
    two = TierConfig(0, [tmp_path / "a", tmp_path / "b"])
    TieredTables.open([uniform_table()], ADAM, two).close()
    with pytest.raises(ConfigError, match="same paths in the same order"):
        TieredTables.open([uniform_table()], ADAM, TierConfig(0, [tmp_path / "b", tmp_path / "a"]))
