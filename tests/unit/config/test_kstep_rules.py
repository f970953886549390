"""What replicas ask of the other groups of the configuration."""

import pytest

from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim.build_kstep import merge_spec
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding.sharder import row_optimizer


def loaded(*overrides: str) -> RunConfig:
    return load(RunConfig, "train", list(overrides))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["planner=fused"], "no fused Adam on the CPU"),
        (["planner=dense", "planner.tables={user: data_parallel}"], r"data_parallel \(user\)"),
        (["optim.dense=sgd"], "optim.dense=sgd"),
        (["optim.embedding=rowwise_adagrad"], "rules of Adam"),
        (["kstep.overlap_steps=5"], "at most 4"),
        (["kstep.stages=[100:0]"], "'100:0' is no '<from step>:<k>'"),
        (["kstep.is_amsgrad=true"], "choose kstep.variant=frozen"),
        (["kstep.variant=frozen", "kstep.row_states=weights"], "none would be frozen"),
        (["kstep.variant=frozen", "kstep.overlap_steps=2"], "choose kstep.overlap_steps=0"),
        (["optim.l2_absent_rows=replay", "optim.embedding_l2=1e-5"], "choose optim.l2_absent_rows=skip"),
        (["kstep.wire=fp8"], "kstep.wire"),
        (["kstep.m_period_rounds=0"], "kstep.m_period_rounds"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_any_rank_starts(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        loaded("kstep.k=5", *overrides)


def test_tables_with_the_dense_kernel_and_a_bound_on_all_gradients_may_be_merged() -> None:
    config = loaded("kstep.k=5", "planner=dense", "optim.clip_norm=1", "optim.clip_covers=all")
    assert (config.kstep.k, config.planner.kernel, config.optim.clip_covers) == (5, "dense", "all")


def test_without_replicas_nothing_is_asked() -> None:
    assert loaded("planner=dense", "optim=sgd").kstep.k == 0


def test_recipes_set_what_belongs_together_and_single_keys_win() -> None:
    default, paper = loaded("kstep=default").kstep, loaded("kstep=paper").kstep
    assert (merge_spec(default).row_merge, merge_spec(default).moments, default.k) == ("union", "renew", 20)
    assert (merge_spec(paper).row_merge, merge_spec(paper).moments, paper.k) == ("mean", "delta", 20)
    mixed = loaded("kstep=paper", "kstep.row_merge=touched", "kstep.wire=int8").kstep
    assert (merge_spec(mixed).row_merge, merge_spec(mixed).moments, merge_spec(mixed).wire) == ("touched", "delta", "int8")


def test_rows_get_the_bias_correction_of_the_recipe_and_count_touches_only_where_they_are_merged() -> None:
    config = loaded("kstep=default", "kstep.m_period_rounds=3", "kstep.v_period_rounds=6", "kstep.variant=frozen")
    spec = row_optimizer(config.optim, config.kstep, num_replicas=4)
    assert isinstance(spec, AdamSpec)
    assert (spec.bias_correction, spec.touches, spec.num_trackers, spec.step_per_moment, spec.frozen) == ("row", "count", 3, True, True)
    alone = row_optimizer(config.optim, config.kstep, num_replicas=1)
    assert isinstance(alone, AdamSpec)
    assert (alone.bias_correction, alone.touches, alone.frozen) == ("row", "none", False)
    paper = row_optimizer(config.optim, loaded("kstep=paper").kstep, num_replicas=2)
    assert isinstance(paper, AdamSpec)
    assert (paper.bias_correction, paper.num_trackers, paper.step_per_moment) == ("global", 1, False)
    assert row_optimizer(config.optim) == AdamSpec(lr=1e-3)
