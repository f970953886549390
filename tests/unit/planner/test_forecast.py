"""Predictions held against runs: forecasts, what a run's shape changes, known plans as starts, index memory. Layer: unit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.planners import SMALL, SOCKETS, planner, sharders, task
from torchrec_kstep.config.schema import KStepConfig, PlannerConfig
from torchrec_kstep.cost import AccessCurve, Coefficients, Machine, Table, shard_work
from torchrec_kstep.cost.calibration import Calibration, calibration_file
from torchrec_kstep.cost.price import price
from torchrec_kstep.errors import PlanError, TopologyError
from torchrec_kstep.planner import plan as plan_module
from torchrec_kstep.planner import topology_planner as planner_module
from torchrec_kstep.planner.forecast import Forecast, Measured, comparison_lines, observation, read_comparison, write_comparison
from torchrec_kstep.planner.plan import plan_alone, topology_planner
from torchrec_kstep.planner.run_shape import RunShape, merge_weight_bytes
from torchrec_kstep.planner.search import Problem, Solution, solve
from torchrec_kstep.planner.tables import find_tables
from torchrec_kstep.planner.traces import Usage, traced_usage
from torchrec_kstep.topology import topology_text
from torchrec_kstep.types import Batch
from torchrec_kstep.world import World

MEASURED = Measured(400, 0.021, 0.004, {"tier_rows": 120.0})


def forecast(**options: object) -> Forecast:
    made = planner(SOCKETS, 8, 2, **options)
    made.plan(task([1_000, 160, 2_000_000]), sharders("tiered"))
    return made.forecast()


@pytest.mark.parametrize("options", [{}, {"dram_bytes_per_host": 64 << 20}, {"world": 2, "k": 20, "num_replicas": 4}])
def test_a_forecast_prices_to_the_step_of_its_placement(options: dict[str, int]) -> None:
    """Otherwise runs would be held against something that the planner never predicted."""
    made = planner(SOCKETS, options.pop("world", 8), 2, **options)
    made.plan(task([1_000, 160, 2_000_000]), sharders("tiered"))
    assert made.placement is not None
    assert made.forecast().step.seconds == pytest.approx(made.placement.step.seconds, rel=1e-9)


def test_without_a_plan_there_is_no_forecast() -> None:
    with pytest.raises(PlanError, match="nothing was planned here yet"):
        planner().forecast()


def test_prediction_and_reality_are_kept_in_the_run_directory(tmp_path: Path) -> None:
    made = forecast(dram_bytes_per_host=64 << 20)
    write_comparison(tmp_path, made, MEASURED)
    again, measured = read_comparison(tmp_path)
    assert measured == MEASURED
    assert again.step == made.step
    assert np.array_equal(again.work, made.work)
    assert again.topology.fingerprint == made.topology.fingerprint
    one = observation("run", again, measured)
    assert one.predicted(Coefficients()).seconds == pytest.approx(made.step.seconds)
    text = "\n".join(comparison_lines(again, measured))
    assert "step: predicted" in text
    assert "measured 25 ms" in text
    assert "rows read from SSD per step, rank 0" in text


SLOWER = [(0.5, False), (1.05, False), (4.0, True)]


@pytest.mark.parametrize(("slower", "is_told"), SLOWER)
def test_machines_far_slower_than_described_are_told(slower: float, is_told: bool) -> None:
    """A drive that reaches a quarter of what the topology declares must not pass unnoticed."""
    made = replace(forecast(dram_bytes_per_host=64 << 20), calibration="calibrated on 20 runs")
    lines = comparison_lines(made, Measured(100, slower * made.step.seconds, 0.0))
    assert any(line.startswith("warning: a step took 4.0 times what was predicted") for line in lines) == is_told
    assert not any("not calibrated" in line for line in lines)


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize(("slower", "is_told"), SLOWER)
def test_before_a_calibration_the_comparison_says_what_it_rests_on(slower: float, is_told: bool, is_measured: bool) -> None:
    """Predictions that rest on probes alone are missed by factors: no alarm, but what narrows them."""
    made = forecast(dram_bytes_per_host=64 << 20)
    made = replace(made, topology=replace(made.topology, is_measured=is_measured))
    *figures, note = comparison_lines(made, Measured(100, slower * made.step.seconds, 0.0))
    assert not any(line.startswith(("warning", "not calibrated")) for line in figures)
    assert note.startswith(f"not calibrated: predicted from {'probes of these machines' if is_measured else 'what is declared for '}")
    assert "`python -m torchrec_kstep.calibrate --topology machine.yaml" in note
    assert ("`python -m torchrec_kstep.probe --out machine.yaml`" in note) == (not is_measured), "declared machines are measured first"
    assert ("a step took 4.0 times that" in note) == is_told


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1}'])
def test_a_damaged_prediction_is_refused(content: str, tmp_path: Path) -> None:
    write_comparison(tmp_path, forecast(), MEASURED)
    (tmp_path / "prediction.json").write_text(content)
    with pytest.raises(PlanError, match=r"prediction.json"):
        read_comparison(tmp_path)
    (tmp_path / "prediction.json").unlink()
    with pytest.raises(PlanError, match=r"holds no prediction\.json"):
        read_comparison(tmp_path)


def test_the_period_of_merge_rounds_is_in_the_prediction_of_a_run() -> None:
    """A run that merges every 10 steps takes longer per step than one that merges every 1,000."""
    model = task([100_000, 2_000_000])
    seconds = {}
    for k in (1, 10, 1_000):
        found: list[Forecast] = []
        shape = RunShape(num_hosts=2, num_replicas=2, k=k, merge_weight_bytes=12.0)
        plan_alone(
            model, PlannerConfig(), World(0, 1, 0, 1), sharders("tiered"), batch_size=512, ranks_per_host=1, run=shape, tell=found.append
        )
        assert found[0].setup.num_replicas == 2
        assert len(found[0].topology.hosts) == 2
        seconds[k] = found[0].step.seconds_of("merge")
    assert seconds[1] > seconds[10] > seconds[1_000] > 0


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        ({"k": 20}, 12.0),
        ({"k": 1}, 4.0),
        ({"k": 20, "row_states": "weights"}, 4.0),
        ({"k": 20, "row_states": "weights", "wire": "bf16"}, 2.0),
        ({"k": 20, "wire": "int8"}, 4.0),
        ({"k": 20, "m_period_rounds": 2, "v_period_rounds": 4}, 7.0),
    ],
)
def test_bytes_of_a_merged_weight_follow_wire_and_periods(settings: dict[str, object], num_bytes: float) -> None:
    assert merge_weight_bytes(replace(KStepConfig(), **settings)) == num_bytes  # type: ignore[arg-type]


def batch(first: list[int], second: list[list[int]]) -> Batch:
    values = torch.tensor([*first, *(row for bag in second for row in bag)])
    lengths = torch.tensor([1] * len(first) + [len(bag) for bag in second])
    sparse = KeyedJaggedTensor(keys=["f0", "f1"], values=values, lengths=lengths)
    size = len(first)
    return Batch(torch.zeros(size, 1), sparse, torch.zeros(size), torch.ones(size), size)


def test_data_tells_how_often_rows_are_asked_for_and_how_many_ids_a_bag_has() -> None:
    usage = traced_usage([batch([1, 1], [[5, 6], [5]]), batch([1, 2], [[], [7, 5, 5]])], find_tables(task([10, 10])))
    assert usage.ids_per_sample == {"t0": 1.0, "t1": 1.5}
    assert usage.curves["t0"].probability[0] > usage.curves["t1"].probability[0] > 0.1
    assert traced_usage([], find_tables(task([10, 10]))) == Usage()


def test_a_table_that_data_asks_often_weighs_more() -> None:
    curve = AccessCurve.zipf(1_000_000, 1.05)
    steps = []
    for ids in (1.0, 40.0):
        made = planner(usage=Usage({"t0": curve}, {"t0": ids}))
        made.plan(task([1_000_000, 1_000]), sharders("tiered"))
        assert made.placement is not None
        steps.append(made.placement.step.seconds)
    assert steps[1] > steps[0]


def test_a_known_plan_is_never_beaten_by_what_the_search_returns() -> None:
    """The start of the search: any plan of the same ranks, e.g. TorchRec's."""
    model = task([50_000 * (1 + index) for index in range(7)], dim=64)
    constraints = {f"t{index}": ParameterConstraints(sharding_types=["table_wise"]) for index in range(7)}
    stock = planner(SOCKETS, 8, 2, kernel="fused", constraints=constraints).plan(model, sharders("fused"))
    known = planner(SOCKETS, 8, 2, kernel="fused", known_plans=[stock])
    known.plan(model, sharders("fused"))
    free = planner(SOCKETS, 8, 2, kernel="fused", constraints=constraints)
    free.plan(model, sharders("fused"))
    assert known.placement is not None
    assert free.placement is not None
    assert known.placement.step.seconds <= free.placement.step.seconds * (1 + 1e-9)


def test_known_plans_are_asked_for_when_a_plan_is_searched_for_and_not_when_it_is_kept(tmp_path: Path) -> None:
    model, asked = task([50_000, 1_000_000]), []

    def known_plans() -> list[ShardingPlan]:
        asked.append(1)
        return [planner(SOCKETS, 8, 2).plan(model, sharders("tiered"))]

    plans = [planner(SOCKETS, 8, 2, known_plans=known_plans, cache_folder=tmp_path).plan(model, sharders("tiered")) for _ in range(2)]
    assert str(plans[0]) == str(plans[1])
    assert asked == [1]
    planner(SOCKETS, 8, 2, cache_folder=tmp_path).plan(model, sharders("tiered"))
    assert len(list(tmp_path.glob("plan-*.json"))) == 2, "a search without these starts may find another plan"


def test_a_run_is_never_predicted_to_be_slower_than_as_torchrec_plans_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of TorchRec's planner is among the starts, whatever the search makes of the problem by itself."""
    model, world, asked = task([300_000 + 9_973 * index for index in range(9)], dim=64), World(0, 4, 0, 2), []
    stock = plan_module._torchrec_plan

    def spied(*arguments: Any) -> ShardingPlan:
        asked.append(stock(*arguments))
        return asked[-1]

    starts: list[np.ndarray] = []

    def searched(problem: Problem, **options: Any) -> Solution:
        starts.extend(options["starts"])
        return solve(problem, **options)

    monkeypatch.setattr(plan_module, "_torchrec_plan", spied)
    monkeypatch.setattr(planner_module, "solve", searched)
    told: list[Forecast] = []
    plan_alone(model, PlannerConfig(), world, sharders("tiered"), batch_size=512, run=RunShape(num_hosts=2), tell=told.append)
    assert len(starts) == 1
    assert (starts[0] >= 0).all(), "the search began at TorchRec's place of every table"
    (theirs,), made = asked, told[0]
    work = np.zeros_like(made.work)
    for config in find_tables(model)["0"]:
        placed = theirs.plan["0"][config.name]
        curve = AccessCurve.zipf(config.num_embeddings, 1.05)
        table = Table(config.name, config.num_embeddings, config.embedding_dim, curve, state_bytes=2 * config.embedding_dim * 4)
        shard = shard_work(table, made.setup, placed.sharding_type, len(placed.ranks), "dram", 0.0, on_device=False)
        for rank in placed.ranks:
            work[rank] += shard.vector
    machine = Machine.of(made.topology, made.setup, threads_per_rank=made.threads_per_rank)
    assert made.step.seconds <= price(machine, work).seconds * (1 + 1e-9)


def test_a_calibration_beside_the_topology_is_found_and_another_machines_refused(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(topology_text(SMALL))
    fitted = Coefficients().having({"step_s": 0.5})
    made = Calibration(fitted, 0.1, 12, SMALL.cores_fingerprint, "2026-12-01 12:00", {})
    made.write(calibration_file(file))
    model, config = task([100, 1_000]), PlannerConfig(topology=str(file))
    told: list[Forecast] = []
    plan_alone(model, config, World(), sharders("tiered"), batch_size=64, tell=told.append)
    assert told[0].step.seconds > 0.5
    assert "12 runs" in told[0].calibration
    replace(made, cores="other").write(calibration_file(file))
    with pytest.raises(TopologyError, match="was fitted beside other numbers"):
        plan_alone(model, config, World(), sharders("tiered"), batch_size=64)


def test_a_huge_table_of_which_little_is_touched_fits_and_one_that_is_touched_does_not() -> None:
    """The index of rows on SSD grows with touched rows; a run of few steps must not be refused for the table's size."""
    model = task([4_000_000_000], dim=8)
    short = planner(world=1, per_host=1, batch_size=512, num_steps=1_000, dram_bytes_per_host=64 << 20, ssd_bytes_per_host=10**12)
    short.plan(model, sharders("tiered"))
    endless = planner(world=1, per_host=1, batch_size=512, dram_bytes_per_host=64 << 20, ssd_bytes_per_host=10**13)
    with pytest.raises(PlanError) as error:
        endless.plan(model, sharders("tiered"))
    text = str(error.value)
    assert "is the index that finds its rows on SSD and stays in DRAM" in text
    assert "4,000,000,000 of its 4,000,000,000 rows will be touched in the run, 4.0 bytes each" in text
    assert "planner.engine=torchrec" in text
    assert "data.num_hash_rows" in text


def test_the_shape_of_a_run_reaches_the_job() -> None:
    config, model = PlannerConfig(), task([10])
    shape = RunShape(num_hosts=4, num_replicas=4, k=7, merge_weight_bytes=2.0, num_steps=11, prefetch=False)
    job = topology_planner(find_tables(model), config, World(), sharders("tiered"), 8, ranks_per_host=1, run=shape).job
    assert (job.k, job.num_replicas, job.merge_weight_bytes, job.num_steps, job.prefetch) == (7, 4, 2.0, 11, False)
