"""What holds for every round: replicas end equal, order and buckets do not matter, one replica is left alone."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.merging import ADAM, TABLES, assert_same_rows, dram_group, random_steps, rows_of, touch
from torchrec_kstep.errors import ConfigError, DivergenceError, MergeError
from torchrec_kstep.merge.in_process import InProcessMerger, answers, run_in_lockstep
from torchrec_kstep.merge.replica import ReplicaRows
from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.merge.transport import Exchange, Rounds, Wait
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec, RowwiseAdagradSpec, SgdSpec

EVERY_WAY = [
    {"row_merge": row_merge, "moments": moments, "wire": wire}
    for row_merge, moments, wire in itertools.product(("union", "touched", "mean"), ("renew", "delta"), ("fp32", "bf16", "int8"))
]


def replicas(
    spec: MergeSpec, num_replicas: int, optimizer: OptimizerSpec = ADAM, tables: Sequence[TableSpec] = TABLES
) -> tuple[list[RowGroup], InProcessMerger]:
    groups = [dram_group(optimizer, tables) for _ in range(num_replicas)]
    return groups, InProcessMerger([[group] for group in groups], spec)


def run(groups: Sequence[RowGroup], merger: InProcessMerger, num_rounds: int, k: int, **options: Any) -> list[list[RoundReport]]:
    """Random steps and a merge, again and again."""
    reports = []
    for round_index in range(num_rounds):
        for replica, group in enumerate(groups):
            random_steps(group, replica, round_index * k + 1, k)
        reports.append(merger.merge(round_index, k, **options))
    return reports


def assert_all_equal(groups: Sequence[RowGroup]) -> None:
    for group in groups[1:]:
        assert_same_rows(group, groups[0])


@pytest.mark.parametrize("way", EVERY_WAY, ids=lambda way: "-".join(way.values()))
def test_replicas_hold_the_same_bits_after_every_round(way: dict[str, Any]) -> None:
    groups, merger = replicas(MergeSpec(k=3, **way), 3)
    before = rows_of(groups[0])
    for round_index in range(3):
        for replica, group in enumerate(groups):
            random_steps(group, replica, round_index * 3 + 1, 3)
        merger.merge(round_index, 3)
        assert_all_equal(groups)
        after = rows_of(groups[0])
        assert all(bool(torch.isfinite(values).all()) for values in after.values())
        assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("optimizer", [SgdSpec(0.1, touches="count"), RowwiseAdagradSpec(0.1, touches="count")], ids=lambda spec: spec.kind)
def test_optimizers_without_moments_merge_their_weights(optimizer: OptimizerSpec) -> None:
    groups, merger = replicas(MergeSpec(k=2), 2, optimizer)
    run(groups, merger, 2, 2)
    for table, spec in enumerate(TABLES):
        assert torch.equal(*(group.read(table, torch.arange(spec.num_rows)) for group in groups))


def test_a_run_repeats_bit_for_bit_also_where_rounding_is_random() -> None:
    ends = []
    for _ in range(2):
        groups, merger = replicas(MergeSpec(k=3, wire="int8"), 3)
        run(groups, merger, 2, 3)
        ends.append(groups[0])
    assert_same_rows(*ends)


@pytest.mark.parametrize("row_merge", ["union", "touched", "mean"])
def test_the_order_of_replicas_does_not_matter(row_merge: Any) -> None:
    ends = []
    for order in ((0, 1, 2), (2, 0, 1)):
        groups, merger = replicas(MergeSpec(k=3, row_merge=row_merge), 3)
        for group, replica in zip(groups, order, strict=True):
            random_steps(group, replica, 1, 3)
        merger.merge(0, 3)
        ends.append(rows_of(groups[0]))
    for name, values in ends[0].items():
        torch.testing.assert_close(ends[1][name], values, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("row_merge", ["union", "touched", "mean"])
def test_equal_replicas_with_equal_data_equal_one(row_merge: Any, num_replicas: int) -> None:
    """To one unit in the last place per merge. Under `union` for rows of every step only: it takes touches to be independent."""
    groups, merger = replicas(MergeSpec(k=2, row_merge=row_merge), num_replicas)
    alone = dram_group()
    for round_index in range(3):
        for group in (*groups, alone):
            for step in (1, 2):
                random_steps(group, 0, 1 if row_merge == "union" else round_index * 2 + step, 1)
        merger.merge(round_index, 2)
        for name, values in rows_of(alone).items():
            merged = rows_of(groups[0])[name]
            if values.dtype == torch.float32:
                # One unit of the largest of the numbers that were added and taken away again.
                unit = torch.finfo(torch.float32).eps * values.abs().clamp(min=2.0**-3)
                assert bool(((merged - values).abs() <= 2 * (round_index + 1) * unit).all()), name
            else:
                assert torch.equal(merged, values), name
        for table, spec in enumerate(TABLES):  # or rounding would grow with the training
            for field in ("weight", "m", "v"):
                alone.write(table, torch.arange(spec.num_rows), groups[0].read(table, torch.arange(spec.num_rows), field), field)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_one_replica_keeps_the_bits_of_plain_training(k: int) -> None:
    groups, merger = replicas(MergeSpec(k=k), 1)
    plain = dram_group(AdamSpec(lr=0.05, bias_correction="row"))
    for round_index in range(3):
        for group in (groups[0], plain):
            random_steps(group, 0, round_index * k + 1, k)
        (report,) = merger.merge(round_index, k)
        assert report.total_sent_bytes == 0
        assert report.num_union_rows == report.num_own_rows
        assert sum(report.num_own_rows.values()) > 0
        for name, values in rows_of(plain).items():
            assert torch.equal(rows_of(groups[0])[name], values)
    assert groups[0].base_bytes == 0


def test_one_replica_needs_no_record_of_touches() -> None:
    groups, merger = replicas(MergeSpec(k=2), 1, AdamSpec(lr=0.05))
    random_steps(groups[0], 0, 1, 2)
    merger.merge(0, 2)


def test_a_round_in_which_nothing_was_touched_changes_and_sends_nothing_but_counts() -> None:
    groups, merger = replicas(MergeSpec(k=2), 3)
    run(groups, merger, 1, 2)
    before = rows_of(groups[0])
    for report in merger.merge(1, 2):
        assert report.num_buckets == 0
        assert set(report.sent_bytes) == {"opening"}
        assert report.drift == 0.0
        assert report.num_union_rows == {"small": 0, "large": 0} or not any(report.num_union_rows.values())
    for group in groups:
        assert all(torch.equal(rows_of(group)[name], values) for name, values in before.items())


def test_replicas_that_touched_nothing_take_what_the_others_learned() -> None:
    groups, merger = replicas(MergeSpec(k=2), 3)
    touch(groups[1], {1: ([5, 900], torch.ones(2, 4))})
    merger.merge(0, 2)
    assert_all_equal(groups)
    assert groups[0].read(1, torch.tensor([5]), "step").tolist() == [[1]]


def test_steps_may_differ_between_replicas() -> None:
    """At the end of uneven data; the largest number of steps is k."""
    groups = [dram_group() for _ in range(2)]
    rows = [ReplicaRows([group], MergeSpec(k=4), index, 2) for index, group in enumerate(groups)]
    for replica, group in enumerate(groups):
        random_steps(group, replica, 1, 3)
    reports = run_in_lockstep([own.merge(0, steps) for own, steps in zip(rows, (3, 300), strict=True)])
    assert [report.num_local_steps for report in reports] == [3, 300]
    assert_all_equal(groups)


# ---- buckets -----------------------------------------------------------------------------------------------------------


def until_divergence(rounds: Sequence[Rounds[RoundReport]]) -> tuple[list[str], int]:
    """What rounds in lockstep raise, and how many arrivals they waited for; all are expected to raise at the same point."""
    texts: list[str] = []
    num_waits = 0
    pending = [next(own) for own in rounds]
    while pending:
        num_waits += sum(isinstance(request, Wait) for request in pending)
        given, pending = answers(pending), []
        for own, answer in zip(rounds, given, strict=True):
            try:
                pending.append(own.send(answer))
            except DivergenceError as error:
                texts.append(str(error))
    return texts, num_waits


def watched(rounds: Rounds[RoundReport], seen: list[Exchange]) -> Rounds[RoundReport]:
    """Hands a generator through and keeps what it exchanges."""
    request = next(rounds)
    while True:
        if isinstance(request, Exchange):
            seen.append(request)
        answer = yield request
        try:
            request = rounds.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("skewed", [False, True], ids=["spread", "one_owner_wanted"])
def test_buckets_bound_every_message_and_change_no_bit(skewed: bool) -> None:
    """Also where all ids are multiples of the number of replicas, which would load one owner if rows were dealt out in turn."""
    tables = [TableSpec("t", 40_000, 16, init="uniform", init_a=-0.5, init_b=0.5)]
    ends = []
    for bucket_bytes in (1 << 30, 1 << 18):
        groups = [dram_group(ADAM, tables) for _ in range(4)]
        spec = MergeSpec(k=1, bucket_bytes=bucket_bytes)
        rows = [ReplicaRows([group], spec, index, 4) for index, group in enumerate(groups)]
        for replica, group in enumerate(groups):
            noise = torch.Generator().manual_seed(replica)
            ids = torch.unique(torch.randint(0, 10_000, (8000 * (replica + 1) // 4,), generator=noise)) * (4 if skewed else 1)
            touch(group, {0: (ids.tolist(), torch.randn(ids.numel(), 16, generator=noise))})
        seen: list[Exchange] = []
        reports = run_in_lockstep([watched(own.merge(0, 1), seen) for own in rows])
        largest = max(max(sum(part.numel() for part in exchange.parts), sum(exchange.received_bytes)) for exchange in seen)
        assert largest <= bucket_bytes
        assert_all_equal(groups)
        ends.append((groups[0], reports[0]))
    (whole, one), (cut, many) = ends
    assert_same_rows(cut, whole)
    assert one.num_buckets == 1
    volume = sum(group_rows * 4 * 16 * 3 * 4 for group_rows in many.num_own_rows.values())
    assert many.num_buckets > volume / (1 << 18), "fewer buckets than one replica's rows fill"
    assert many.total_sent_bytes < 1.05 * one.total_sent_bytes


def test_buckets_before_one_that_is_not_finite_are_merged_and_nothing_is_left_under_way() -> None:
    """The bad row is among the last ones; what replicas exchanged is waited for on all of them before they raise."""
    tables = [TableSpec("t", 40_000, 16, init="uniform", init_a=-0.5, init_b=0.5)]
    groups = [dram_group(ADAM, tables) for _ in range(2)]
    replicas_rows = [ReplicaRows([group], MergeSpec(k=2, bucket_bytes=1 << 18), index, 2) for index, group in enumerate(groups)]
    for replica, group in enumerate(groups):
        touch(group, {0: (list(range(replica, 4000, 2)), torch.ones(2000, 16))})
    touch(groups[1], {0: ([2001], torch.full((1, 16), float("nan")))}, step=2)
    before = rows_of(groups[0])["t.weight"]
    begun: list[Exchange] = []
    rounds = [watched(own.merge(0, 2), begun) for own in replicas_rows]
    texts, waited = until_divergence(rounds)
    assert len(texts) == 2
    assert waited == len(begun)
    after = rows_of(groups[0])["t.weight"]
    changed = (before != after).any(dim=1)
    assert bool(changed[1:500:2].all()), "early buckets are merged: rows that the other replica moved"
    assert not bool(changed[2001:4000].any())


# ---- wires -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("moments", ["renew", "delta"])
def test_wires_are_right_on_average(wire: Any, moments: Any) -> None:
    def merged(wire: Any, seed: int) -> dict[str, torch.Tensor]:
        groups, merger = replicas(MergeSpec(k=2, wire=wire, moments=moments, seed=seed), 2, tables=TABLES[:1])
        run(groups, merger, 1, 2)
        return rows_of(groups[0])

    exact, start = merged("fp32", 0), rows_of(dram_group(ADAM, TABLES[:1]))
    num_seeds = 60
    samples = [merged(wire, seed) for seed in range(num_seeds)]
    for name in ("small.weight", "small.m", "small.v"):
        values = torch.stack([sample[name] for sample in samples]).to(torch.float64)
        # Two roundings, each to a step of at most (largest change of a row) / 127 or 2^-7 of the value.
        step = 2 * (exact[name] - start[name]).abs().amax(dim=1, keepdim=True).to(torch.float64) / 100
        assert bool(((values - exact[name]).abs() <= 2 * step + 1e-7).all()), name
        error = (values.mean(dim=0) - exact[name]).abs()
        assert bool((error <= 5 * step / num_seeds**0.5 + 1e-7).all()), f"{name}: biased"
        assert float(values.std(dim=0).max()) > 0, f"{name}: never rounded"


def test_narrow_wires_send_fewer_bytes() -> None:
    sent = {}
    for wire in ("fp32", "bf16", "int8"):
        groups, merger = replicas(MergeSpec(k=2, wire=wire, row_states="weights"), 2, tables=[TableSpec("t", 3000, 64)])
        ((report, _),) = run(groups, merger, 1, 2)
        sent[wire] = report.total_sent_bytes
    assert sent["fp32"] > 1.8 * sent["bf16"] > 1.8 * 1.6 * sent["int8"]


# ---- what is sent when -------------------------------------------------------------------------------------------------


def test_moments_are_merged_at_their_own_periods_and_all_in_a_full_round() -> None:
    groups, merger = replicas(
        MergeSpec(k=2, m_period_rounds=2, v_period_rounds=4),
        2,
        AdamSpec(0.05, bias_correction="row", touches="count", num_trackers=3, step_per_moment=True),
    )
    equal = []
    for round_index in range(6):
        for replica, group in enumerate(groups):
            random_steps(group, replica, round_index * 2 + 1, 2)
        merger.merge(round_index, 2, is_full=round_index == 4)
        left, right = (rows_of(group) for group in groups)
        fields = [
            name.removeprefix("large.") for name, values in left.items() if name.startswith("large.") and torch.equal(values, right[name])
        ]
        equal.append(" ".join(sorted(fields)))
    every = "m step step_v v weight"
    assert equal == ["weight", "m step weight", "weight", every, every, "m step weight"]


def test_sets_of_touches_that_no_period_needs_do_not_grow() -> None:
    groups, merger = replicas(MergeSpec(k=2), 2, AdamSpec(0.05, bias_correction="row", touches="count", num_trackers=3))
    run(groups, merger, 1, 2)
    assert all(group.touched_rows(table, tracker).numel() == 0 for group in groups for table in range(2) for tracker in range(3))


def test_periods_that_rows_cannot_keep_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"table 'small': its rows keep 1 sets of touches, and 3 are needed .* num_trackers=3"):
        replicas(MergeSpec(m_period_rounds=3, v_period_rounds=6), 2)
    with pytest.raises(ConfigError, match="keep 0 sets of touches, and 1 are needed"):
        replicas(MergeSpec(), 2, AdamSpec(lr=0.1))
    with pytest.raises(ConfigError, match=r"table 'small': m and v are merged at different periods, .* step_per_moment=True"):
        replicas(MergeSpec(m_period_rounds=3), 2, AdamSpec(lr=0.1, bias_correction="row", touches="count", num_trackers=2))


def test_auto_sends_moments_of_tables_that_are_touched_widely_only() -> None:
    groups, merger = replicas(MergeSpec(k=2, row_states="auto"), 2)
    reports = [report for report, _ in run(groups, merger, 3, 2)]
    assert reports[1].total_sent_bytes < 0.6 * reports[0].total_sent_bytes  # the first round sends all
    left, right = (rows_of(group) for group in groups)
    assert torch.equal(left["small.m"], right["small.m"])
    assert torch.equal(left["large.weight"], right["large.weight"])
    assert not torch.equal(left["large.m"], right["large.m"])


def test_the_first_round_of_auto_beside_training_is_done_in_place() -> None:
    groups, merger = replicas(MergeSpec(k=2, row_states="auto", overlap_steps=1), 2)
    late = []
    for round_index in range(2):
        for replica, group in enumerate(groups):
            random_steps(group, replica, 3 * round_index + 1, 2)
        merger.begin(round_index, 2)
        for replica, group in enumerate(groups):
            random_steps(group, replica, 3 * round_index + 3, 1)
        late.append(merger.finish(1)[0].num_steps_late)
    assert late == [0, 1]


def test_auto_decides_alike_where_replicas_did_different_numbers_of_steps() -> None:
    rows = [ReplicaRows([dram_group()], MergeSpec(k=20, row_states="auto"), index, 2) for index in range(2)]
    run_in_lockstep([own.merge(0, steps) for own, steps in zip(rows, (9, 10), strict=True)])
    assert [own.is_undecided for own in rows] == [False, False]
    assert rows[0].state_dict() == rows[1].state_dict()


def test_auto_is_not_decided_by_a_round_of_few_steps_and_survives_a_restart() -> None:
    groups = [dram_group() for _ in range(2)]
    rows = [ReplicaRows([group], MergeSpec(k=20, row_states="auto"), index, 2) for index, group in enumerate(groups)]
    for num_steps, is_undecided in ((3, True), (10, False)):
        for replica, group in enumerate(groups):
            random_steps(group, replica, 1, num_steps)
        run_in_lockstep([own.merge(0, num_steps) for own in rows])
        assert [own.is_undecided for own in rows] == [is_undecided] * 2
    again = ReplicaRows([dram_group()], MergeSpec(k=20, row_states="auto"), 0, 2)
    again.load_state_dict(rows[0].state_dict())
    assert not again.is_undecided
    assert again.state_dict() == rows[1].state_dict()


def test_reset_forgets_touches_and_a_round_under_way() -> None:
    groups, merger = replicas(MergeSpec(k=2, overlap_steps=1), 2)
    for replica, group in enumerate(groups):
        random_steps(group, replica, 1, 2)
    merger.begin(0, 2)
    random_steps(groups[0], 0, 3, 1)
    merger.reset()
    before = [rows_of(group) for group in groups]
    for report in merger.merge(1, 2):
        assert not any(report.num_union_rows.values())
    for group, rows in zip(groups, before, strict=True):
        assert all(torch.equal(rows_of(group)[name], values) for name, values in rows.items())
    assert groups[0].base_bytes == 0


def test_rounds_beside_training_leave_replicas_equal_once_a_round_in_place_follows() -> None:
    groups, merger = replicas(MergeSpec(k=3, overlap_steps=2), 3)
    step = 1
    for round_index in range(3):
        for replica, group in enumerate(groups):
            random_steps(group, replica, step, 3)
        merger.begin(round_index, 3)
        for replica, group in enumerate(groups):
            random_steps(group, replica, step + 3, 2)
        assert {report.num_steps_late for report in merger.finish(2)} == {2}
        step += 5
    merger.merge(3, 2)
    assert_all_equal(groups)


def test_a_late_round_without_steps_between_is_a_round_in_place() -> None:
    ends = []
    for is_late in (False, True):
        groups, merger = replicas(MergeSpec(k=3, overlap_steps=1), 2)
        for replica, group in enumerate(groups):
            random_steps(group, replica, 1, 3)
        if is_late:
            merger.begin(0, 3)
            merger.finish()
        else:
            merger.merge(0, 3)
        ends.append(groups[1])
    assert_same_rows(*ends)


# ---- what goes wrong ---------------------------------------------------------------------------------------------------


def test_nan_in_one_replica_is_refused_by_table_replica_and_row_before_it_is_merged() -> None:
    groups, merger = replicas(MergeSpec(k=2), 3)
    for replica, group in enumerate(groups):
        random_steps(group, replica, 1, 2)
    bad = torch.full((1, 4), float("nan"))
    touch(groups[1], {1: ([77], bad)}, step=3)
    before = rows_of(groups[0])["large.weight"].clone()
    with pytest.raises(DivergenceError, match=r"merge round 4: table 'large' of replica 1 has NaN or infinity") as caught:
        merger.merge(4, 2)
    assert "row" in str(caught.value)
    assert torch.equal(rows_of(groups[0])["large.weight"], before)


def test_every_replica_raises_and_the_one_with_nan_names_the_row() -> None:
    groups = [dram_group() for _ in range(2)]
    rows = [ReplicaRows([group], MergeSpec(k=1), index, 2) for index, group in enumerate(groups)]
    touch(groups[1], {1: ([77, 80], torch.tensor([[1.0] * 4, [float("inf")] * 4]))})
    texts, _ = until_divergence([own.merge(0, 1) for own in rows])
    assert len(texts) == 2, "both end at the same point"
    assert "its rank names the row" in texts[0]
    assert "1 of 2 rows, first row 80, field 'weight'" in texts[1]


@pytest.mark.parametrize(
    "other",
    [
        {"spec": MergeSpec(k=3)},
        {"optimizer": AdamSpec(lr=0.05, betas=(0.8, 0.999), bias_correction="row", touches="count")},
        {"tables": (TABLES[0], TABLES[1]._replace(num_rows=2999))},
        {"tables": (TABLES[1], TABLES[0])},
        {"num_shard_rows": [[40, 2000]]},
    ],
    ids=["spec", "optimizer", "size", "order", "shard"],
)
def test_replicas_that_hold_or_want_something_else_are_refused(other: dict[str, Any]) -> None:
    same: dict[str, Any] = {"spec": MergeSpec(k=2), "optimizer": ADAM, "tables": TABLES, "num_shard_rows": None}

    def make(index: int, spec: MergeSpec, optimizer: OptimizerSpec, tables: Sequence[TableSpec], num_shard_rows: Any) -> ReplicaRows:
        return ReplicaRows([dram_group(optimizer, tables)], spec, index, 3, num_shard_rows)

    rows = [make(0, **same), make(1, **(same | other)), make(2, **same)]
    with pytest.raises(MergeError, match=r"replicas \[1\] hold other shards"):
        run_in_lockstep([own.agree() for own in rows])


def test_replicas_that_were_not_equal_are_told_in_the_next_round() -> None:
    """Say, one of them loaded another snapshot. A row that nobody trains is nobody's loss, the first that moves is told."""
    groups, merger = replicas(MergeSpec(k=1), 3)
    rows = torch.arange(TABLES[0].num_rows)
    groups[2].write(0, rows, groups[2].read(0, rows) + 1.0)
    touch(groups[0], {0: ([1, 5], torch.ones(2, 8))})
    merger.merge(0, 1)
    with pytest.raises(MergeError, match=r"merge round 1: after the round before, replicas \[2\] held other rows than replica 0"):
        merger.merge(1, 1)


def test_equal_replicas_agree() -> None:
    rows = [ReplicaRows([dram_group()], MergeSpec(), index, 2) for index in range(2)]
    assert run_in_lockstep([own.agree() for own in rows]) == [None, None]
