"""KStepAdam: wires, periods of moments, late rounds, the frozen variant.

Layer: multiprocess.
"""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule

from tests.multiprocess.kstep_cases import SPEC, Model, Trained, env_of, outcome_of
from tests.spawn import SpawnRanks
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.world import World

pytestmark = pytest.mark.multiprocess

THREE_TRACKERS = replace(SPEC, bias_correction="global", num_trackers=3)
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"merge": MergeSpec()},
    "bf16": {"merge": MergeSpec(wire="bf16")},
    "int8": {"merge": MergeSpec(wire="int8")},
    "late": {"merge": MergeSpec(overlap_steps=2)},
    "late_bf16": {"merge": MergeSpec(overlap_steps=3, wire="bf16")},
    "periods": {"merge": MergeSpec(m_period_rounds=2, v_period_rounds=3), "spec": THREE_TRACKERS},
    "periods_row": {
        "merge": MergeSpec(m_period_rounds=2, v_period_rounds=3),
        "spec": replace(SPEC, num_trackers=3, step_per_moment=True),
    },
    "auto": {"merge": MergeSpec(row_states="auto", auto_share=0.0)},
    "frozen": {"variant": "frozen"},
    "amsgrad": {"variant": "frozen", "is_amsgrad": True},
    "frozen_rows": {"variant": "frozen", "spec": replace(SPEC, frozen=True)},
    "frozen_rows_global": {"variant": "frozen", "spec": replace(SPEC, frozen=True, amsgrad=True, bias_correction="global")},
    "paper": {"recipe": "paper", "spec": replace(SPEC, bias_correction="global")},
    "stages": {"k": {0: 2, 6: 1, 8: 5}},
}
NUM_STEPS = 15  # three rounds of 4, and 3 steps more


def _all(_world: World) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        trained = Trained.make(env_of(1), **{"k": 4, **case}).train(range(NUM_STEPS))
        rounds = trained.optimizer.num_rounds
        trained.optimizer.merge()
        trained.optimizer.merge()
        weights = torch.cat([param.detach().reshape(-1) for param in trained.dmp.module.parameters()])
        found[name] = {"bits": trained.bits(), "rounds": rounds, "weights": weights, "scalars": trained.optimizer.take_scalars()}
    return found


def test_every_mode_ends_in_equal_replicas_near_the_plain_one(spawn_ranks: SpawnRanks) -> None:
    first, second = spawn_ranks(_all, 2, timeout_s=110)
    plain = first["fp32"]["weights"]
    for name, case in first.items():
        differing = [key for key, bits in case["bits"].items() if second[name]["bits"][key] != bits]
        assert not differing, f"{name}: {differing[:3]}"
        if name == "stages":
            assert case["rounds"] == 4, "after steps 2, 4, 6 and 13"
        else:
            assert case["rounds"] == 3
            assert case["weights"].isfinite().all()
        if name not in ("fp32", "stages", "paper"):
            assert (case["weights"] - plain).abs().max() < 0.1, f"{name} is far from what it approximates"
        if name not in ("fp32", "auto"):
            assert not torch.equal(case["weights"], plain), f"{name} has no effect"
    bytes_sent = {name: case["scalars"]["rows_sent_bytes"] for name, case in first.items()}
    assert bytes_sent["int8"] < bytes_sent["bf16"] < 0.7 * bytes_sent["fp32"]
    assert bytes_sent["periods"] < bytes_sent["fp32"]
    assert first["bf16"]["scalars"]["dense_sent_bytes"] < 0.7 * first["fp32"]["scalars"]["dense_sent_bytes"]


def _late(_world: World) -> float:
    """Replicas with equal data: a late correction has nothing to correct, whatever was trained meanwhile."""
    late, alone = (
        Trained.make(env_of(1), k=k, merge=MergeSpec(row_merge="touched", overlap_steps=overlap), has_batch_norm=False)
        for k, overlap in ((4, 2), (100, 0))
    )
    late.train(range(11), stream=0)
    alone.train(range(11), stream=0)
    pairs = zip(late.dmp.module.parameters(), alone.dmp.module.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs if ours.numel())


def test_a_late_round_of_equal_replicas_changes_nothing(spawn_ranks: SpawnRanks) -> None:
    assert max(spawn_ranks(_late, 2)) < 1e-6


class WithCollisions(Model):
    """The model, with a module that gives rows to ids as they come."""

    def __init__(self, has_batch_norm: bool = True) -> None:
        super().__init__(has_batch_norm)
        self.mapping = MCHManagedCollisionModule(
            zch_size=4, device=torch.device("cpu"), eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=1
        )


REPLAYING = AdamSpec(lr=0.1, l2=0.01, l2_absent_rows="replay")
REFUSED: dict[str, dict[str, Any]] = {
    "variant='frozen' with overlap_steps=2": {"variant": "frozen", "merge": MergeSpec(overlap_steps=2)},
    "row_states='auto'": {"k": {0: 4, 10: 1}, "merge": MergeSpec(row_states="auto")},
    'touches="count"': {"spec": replace(SPEC, touches="none")},
    "choose variant='frozen'": {"is_amsgrad": True},
    "lr_factor is 0.0": {"lr_factor": 0.0},
    "clip_norm is -1.0": {"clip_norm": -1.0},
    "weight_decay is nan": {"weight_decay": float("nan")},
    "eps is -1.0": {"eps": -1.0},
    "beta 1.5": {"betas": (0.9, 1.5)},
    "a recipe is named by recipe=": {"merge": "paper"},
    "2.5 in k=2.5": {"k": 2.5},
    "MergeSpec.of_recipe('paper', ...)": {"recipe": "paper", "merge": MergeSpec(wire="bf16")},
    "recipe is 'papers'": {"recipe": "papers"},
    "nothing would ever be frozen": {
        "variant": "frozen",
        "merge": MergeSpec(row_states="weights"),
        "spec": replace(SPEC, frozen=True),
    },
    "l2_absent_rows='replay' for tables a, b": {"kernel": "dense", "spec": REPLAYING},
    "**env.dmp_kwargs()": {"has_dmp_kwargs": False},
    "'mapping' assigns rows to ids": {"model_type": WithCollisions},
}


def _refused(_world: World) -> dict[str, tuple[str, str]]:
    env = env_of(1)
    return {text: outcome_of(lambda case=case: Trained.make(env, **{"k": 4, **case})) for text, case in REFUSED.items()}  # type: ignore[misc]


def test_contradictions_are_refused_by_name(spawn_ranks: SpawnRanks) -> None:
    for found in spawn_ranks(_refused, 2):
        for text, (kind, told) in found.items():
            assert kind == "ConfigError", f"{text}: {kind}: {told}"
            assert text in told


def _warned(_world: World) -> tuple[list[str], list[tuple[str, str]]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = Trained.make(env_of(1), k=4, variant="frozen")
        Trained.make(env_of(1), k=4, variant="frozen", spec=replace(SPEC, frozen=True))
    told = [str(one.message) for one in caught if "dense parameters only" in str(one.message)]
    state = Trained.make(env_of(1), k=4).optimizer.state_dict()
    return told, [outcome_of(lambda: trained.optimizer.step(lambda: 0.0)), outcome_of(lambda: trained.optimizer.load_state_dict(state))]


def test_a_variant_that_tables_do_not_share_is_warned_of_and_closures_and_other_states_are_refused(spawn_ranks: SpawnRanks) -> None:
    (told, (closure, loaded)), (silent, _) = spawn_ranks(_warned, 2)
    assert len(told) == 1, told
    assert "AdamSpec(frozen=False, amsgrad=False)" in told[0]
    assert not silent, "one rank tells"
    assert closure[0] == "ConfigError"
    assert "call backward() before step()" in closure[1]
    assert loaded[0] == "CheckpointError"
    assert "['exp_avg', 'exp_avg_sq', 'step'] there and ['exp_avg', 'exp_avg_sq', 'step', 'v_hat'] here" in loaded[1]
