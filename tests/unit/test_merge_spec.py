"""MergeSpec: checks of its values, recipes, and what is said against mixtures."""

import dataclasses
import itertools
import typing

import pytest

from torchrec_kstep import merge_spec
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.merge_spec import RECIPES, MergeSpec, mixture_warnings


def test_the_start_values_are_the_default_recipe() -> None:
    assert MergeSpec.of_recipe("default") == MergeSpec()
    assert set(typing.get_args(merge_spec.RecipeName)) == set(RECIPES)


def test_the_paper_recipe_is_the_plain_mean_and_scales_the_rate_by_the_root_of_the_replicas() -> None:
    spec = MergeSpec.of_recipe("paper", k=7, wire="bf16")
    assert (spec.row_merge, spec.moments, spec.k, spec.wire) == ("mean", "delta", 7, "bf16")
    assert RECIPES["paper"].bias_correction == "global"
    assert RECIPES["paper"].lr_factor(4) == 2.0
    assert RECIPES["default"].lr_factor(4) == 1.0


def test_what_is_named_beside_a_recipe_wins() -> None:
    assert MergeSpec.of_recipe("paper", moments="renew").moments == "renew"


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'papers', expected one of default, paper"):
        MergeSpec.of_recipe("papers")  # type: ignore[arg-type]


def test_all_faults_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        MergeSpec(
            k=0,
            row_merge="sum",  # type: ignore[arg-type]
            moments="keep",  # type: ignore[arg-type]
            row_states="some",  # type: ignore[arg-type]
            wire="fp8",  # type: ignore[arg-type]
            auto_share=1.5,
            m_period_rounds=0,
            timeout_s=0.0,
            overlap_steps=3,
            bucket_bytes=10,
            seed=-1,
        )
    names = [field.name for field in dataclasses.fields(MergeSpec) if field.name != "v_period_rounds"]
    assert [name for name in names if f"{name} is" not in str(caught.value)] == []


def test_sizes_are_texts_with_units_or_numbers() -> None:
    assert MergeSpec(bucket_bytes="1MiB") == MergeSpec(bucket_bytes=1 << 20)
    with pytest.raises(ConfigError, match="bucket_bytes: cannot read '1 big'"):
        MergeSpec(bucket_bytes="1 big")


def test_a_round_must_end_before_the_next_begins() -> None:
    assert MergeSpec(k=5, overlap_steps=4).overlap_steps == 4
    with pytest.raises(ConfigError, match="overlap_steps is 5, expected 0 to k - 1 = 4"):
        MergeSpec(k=5, overlap_steps=5)


@pytest.mark.parametrize(
    ("periods", "states", "expected"), [((1, 1), "all", 1), ((3, 6), "all", 3), ((3, 3), "auto", 2), ((3, 6), "weights", 1)]
)
def test_fields_of_one_period_share_a_tracker(periods: tuple[int, int], states: merge_spec.RowStates, expected: int) -> None:
    assert MergeSpec(m_period_rounds=periods[0], v_period_rounds=periods[1], row_states=states).num_trackers == expected


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_not_warned_of(name: merge_spec.RecipeName) -> None:
    assert mixture_warnings(MergeSpec.of_recipe(name), RECIPES[name].bias_correction, 4) == []


def test_every_other_mixture_is_warned_of_with_a_way_out() -> None:
    policies = itertools.product(*(typing.get_args(kind) for kind in (merge_spec.RowMerge, merge_spec.MomentMerge)), ("global", "row"))
    known = {(recipe.row_merge, recipe.moments, recipe.bias_correction) for recipe in RECIPES.values()}
    for row_merge, moments, bias in policies:
        found = mixture_warnings(MergeSpec(row_merge=row_merge, moments=moments), bias, 4)
        assert bool(found) == ((row_merge, moments, bias) not in known), (row_merge, moments, bias)
        assert all("; " in text and "use " in text for text in found)


def test_one_replica_has_nothing_to_be_warned_of() -> None:
    assert mixture_warnings(MergeSpec(row_merge="touched"), "global", 1) == []


def test_sending_moments_after_two_steps_is_more_than_synchronous_training_sends() -> None:
    assert any("more bytes" in text for text in mixture_warnings(MergeSpec(k=2), "row", 4))
    assert mixture_warnings(MergeSpec(k=2, row_states="weights"), "row", 4) == []


@pytest.mark.parametrize(("periods", "is_warned"), [((3, 6), True), ((1, 2), True), ((6, 3), False), ((3, 3), False)])
def test_a_first_moment_must_not_come_without_its_second(periods: tuple[int, int], is_warned: bool) -> None:
    spec = MergeSpec(m_period_rounds=periods[0], v_period_rounds=periods[1])
    assert any("far too long" in text for text in mixture_warnings(spec, "row", 4)) == is_warned
    assert mixture_warnings(dataclasses.replace(spec, row_states="weights"), "row", 4) == []
