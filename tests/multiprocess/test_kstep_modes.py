"""KStepAdam: wires, periods of moments, late rounds, the frozen variant.

Layer: multiprocess.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.multiprocess.kstep_cases import SPEC, Trained, env_of
from tests.spawn import SpawnRanks
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.merge_spec import MergeSpec
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


def _refused(_world: World) -> list[str]:
    found = []
    for case in (
        {"variant": "frozen", "merge": MergeSpec(overlap_steps=2)},
        {"k": {0: 4, 10: 1}, "merge": MergeSpec(row_states="auto")},
        {"spec": replace(SPEC, touches="none")},
    ):
        try:
            Trained.make(env_of(1), **{"k": 4, **case})  # type: ignore[arg-type]
        except ConfigError as error:
            found.append(str(error))
    return found


def test_contradictions_are_refused_by_name(spawn_ranks: SpawnRanks) -> None:
    for frozen, auto, touches in spawn_ranks(_refused, 2):
        assert "variant='frozen' with overlap_steps=2" in frozen
        assert "row_states='auto'" in auto
        assert 'touches="count"' in touches
