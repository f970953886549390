"""Layer 1: optimizer specs declare the right records and refuse values without meaning, all at once."""

import json

import pytest

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim_spec import (
    AdamSpec,
    CowClip,
    OptimizerSpec,
    RecordField,
    RowwiseAdagradSpec,
    SgdSpec,
    replay_rule,
    replaying_spec,
)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (SgdSpec(lr=0.1), "weight"),
        (AdamSpec(lr=0.1), "weight m v"),
        (AdamSpec(lr=0.1, bias_correction="row", touches="count"), "weight m v step touches"),
        (AdamSpec(lr=0.1, touches="base"), "weight m v touches base"),
        (RowwiseAdagradSpec(lr=0.1, touches="count"), "weight sum touches"),
        (AdamSpec(lr=0.1, l2=0.1, l2_absent_rows="replay"), "weight m v last_step"),
        (SgdSpec(lr=0.1, l2=0.1, l2_absent_rows="replay"), "weight last_step"),
        (AdamSpec(lr=0.1, l2_absent_rows="replay"), "weight m v"),  # without L2 there is nothing to replay
    ],
)
def test_the_record_has_what_the_rule_needs(spec: OptimizerSpec, names: str) -> None:
    fields = spec.record_fields(7)
    assert " ".join(field.name for field in fields) == names
    assert fields[0] == RecordField("weight", "f32", 7)
    widths = {"weight": 7, "m": 7, "v": 7, "base": 7, "step": 1, "touches": 1, "sum": 1, "last_step": 1}
    assert all(field.width == widths[field.name] for field in fields)
    assert all((field.dtype == "i32") == (field.name in ("step", "touches", "last_step")) for field in fields)


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        AdamSpec(lr=-1.0, l2=-2.0, betas=(0.9, 1.0), eps=0.0, bias_correction="both", touches="all")  # type: ignore[arg-type]  # the point
    for part in ("lr is -1.0", "l2 is -2.0", "beta 1.0", "eps is 0.0", "'both'", "'all'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("values", [{"ratio": 0.0}, {"ratio": float("nan")}, {"zeta": -1.0}, {"zeta": float("inf")}])
def test_a_clip_without_meaning_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="CowClip"):
        CowClip(**values)


def test_states_of_adam_for_merge_rounds() -> None:
    spec = AdamSpec(0.1, touches="count", bias_correction="row", step_per_moment=True, frozen=True, amsgrad=True, num_trackers=3)
    fields = [field.name for field in spec.record_fields(4)]
    assert fields == ["weight", "m", "v", "v_hat", "step", "step_v", "touches", "touches_1", "touches_2"]
    assert spec.kernel_options() | {"step_per_moment": 1.0, "frozen": 1.0, "amsgrad": 1.0} == spec.kernel_options()
    for message, values in (
        ("step_per_moment needs bias_correction 'row'", {"step_per_moment": True}),
        ("amsgrad needs frozen", {"amsgrad": True}),
        ("num_trackers is 4, expected 1 to 3", {"num_trackers": 4, "touches": "count"}),
        ("num_trackers is 2 while touches is 'none'", {"num_trackers": 2}),
    ):
        with pytest.raises(ConfigError, match=message):
            AdamSpec(0.1, **values)  # type: ignore[arg-type]  # values by name


def test_what_cannot_replay_is_refused_with_the_reason() -> None:
    for message, values in (
        ("l2_absent_rows is 'decay', expected 'skip' or 'replay'", {"l2_absent_rows": "decay"}),
        ("l2_replay_max_steps is -1", {"l2_replay_max_steps": -1}),
        ("rounds weigh its moves by touches alone", {"touches": "count"}),
        ("v_hat is for merge rounds", {"frozen": True}),
        ("l2 0.1 above the clip's ratio 0.05", {"clip": CowClip(ratio=0.05)}),
    ):
        with pytest.raises(ConfigError, match=message):
            AdamSpec(0.1, l2=0.1, **{"l2_absent_rows": "replay", **values})  # type: ignore[arg-type]  # values by name


@pytest.mark.parametrize(
    "spec",
    [
        AdamSpec(0.1, 0.2, betas=(0.8, 0.9), bias_correction="row", l2_absent_rows="replay", l2_replay_max_steps=7),
        SgdSpec(0.1, 0.2, l2_absent_rows="replay"),
        RowwiseAdagradSpec(0.1, 0.2, eps=1e-3, l2_absent_rows="replay"),
    ],
)
def test_the_rule_of_a_replay_survives_json(spec: OptimizerSpec) -> None:
    assert replaying_spec(json.loads(json.dumps(replay_rule(spec)))) == spec
    with pytest.raises(ConfigError, match="no rule by which rows replay"):
        replaying_spec({"kind": "ftrl"})


def test_kernel_options_name_every_constant() -> None:
    spec = AdamSpec(lr=0.1, l2=1e-5, clip=CowClip(1.0, 1e-4), betas=(0.8, 0.9), eps=1e-6, bias_correction="row")
    assert spec.kernel_options() == {
        "l2": 1e-5,
        "clip_ratio": 1.0,
        "clip_zeta": 1e-4,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-6,
        "row_bias": 1.0,
        "step_per_moment": 0.0,
        "frozen": 0.0,
        "amsgrad": 0.0,
    }
    assert SgdSpec(lr=0.1).kernel_options() == {"l2": 0.0}
