"""Rules that carry settings from one batch size to another."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.config.schema import DataConfig, OptimConfig, RunConfig, TrainConfig
from torchrec_kstep.data import open_dataset
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim.scaling import RULES, describe, factors, scale_optim, warnings
from torchrec_kstep.train import batch_order, scale_to_batch
from torchrec_kstep.world import World

BASE = OptimConfig(lr=1e-3, embedding_lr=2e-3, embedding_l2=1e-5, base_batch_size=1024)


@pytest.mark.parametrize(
    ("batch_size", "lr", "l2"),  # the table of the CowClip paper's code for Criteo: dense lr 8e-4 and L2 1e-5 at 1K
    [
        (1024, 8e-4, 1e-5),
        (2048, 11.31e-4, 2e-5),
        (4096, 16e-4, 4e-5),
        (8192, 22.62e-4, 8e-5),
        (16384, 32e-4, 16e-5),
        (131072, 90.5e-4, 128e-5),
    ],
)
def test_cowclip_gives_the_published_settings(batch_size: int, lr: float, l2: float) -> None:
    published = replace(BASE, lr=8e-4, embedding_lr=1e-4, scaling="cowclip")
    scaled = scale_optim(published, batch_size, num_epoch_steps=123, num_total_steps=1230)
    assert scaled.lr == pytest.approx(lr, rel=1e-3)
    assert scaled.embedding_l2 == pytest.approx(l2, rel=1e-3)
    assert scaled.embedding_lr == 1e-4
    assert (scaled.warmup_steps, scaled.warmup_covers) == (123, "dense")


@given(st.integers(1, 10**6), st.integers(1, 4 * 10**7))
def test_cowclip_warms_up_for_an_epoch_and_at_most_a_tenth_of_the_run(num_epoch_steps: int, num_total_steps: int) -> None:
    scaled = scale_optim(replace(BASE, scaling="cowclip"), 4096, num_epoch_steps, num_total_steps)
    assert scaled.warmup_steps == (num_epoch_steps if num_total_steps >= 10 * num_epoch_steps else -(-num_total_steps // 10))
    assert scaled.warmup_covers == "dense"


@pytest.mark.parametrize(
    ("epochs", "max_steps", "num_warmup_steps"),
    [(1, 0, 4), (10, 0, 32), (20, 0, 32), (20, 1000, 32), (20, 310, 31), (20, 32, 4), (1, 5, 1), (1, 10**6, 4)],
)
def test_the_warm_up_of_a_run_follows_the_steps_that_it_takes(epochs: int, max_steps: int, num_warmup_steps: int) -> None:
    """An epoch, 32 steps of it, may be more than a run that max_steps cuts short."""
    config = RunConfig(
        data=DataConfig(name="synthetic", limit=3200),
        train=TrainConfig(epochs=epochs, max_steps=max_steps, batch_size=50),
        optim=replace(BASE, scaling="cowclip"),
    )
    world, dataset = World(0, 2, 0, 2), open_dataset(config.data)
    assert batch_order(config, world).num_steps(dataset.num_rows("train")) == 32
    assert scale_to_batch(config, world, dataset).optim.warmup_steps == num_warmup_steps


def test_a_warm_up_that_is_given_wins() -> None:
    given_settings = replace(BASE, scaling="cowclip", warmup_steps=7, warmup_covers="all")
    scaled = scale_optim(given_settings, 4096, 123, 1230)
    assert (scaled.warmup_steps, scaled.warmup_covers) == (7, "all")


def test_the_rules_differ_as_their_table_says() -> None:
    of = {rule: factors(rule, 4096, 256) for rule in RULES}
    assert {rule: (by.lr, by.embedding_lr, by.embedding_l2) for rule, by in of.items()} == {
        "none": (1, 1, 1),
        "linear": (16, 16, 1),
        "sqrt": (4, 4, 4),
        "sqrt_l2_kept": (4, 4, 1),
        "cowclip": (4, 1, 16),
    }


@given(st.sampled_from(RULES), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_two_scalings_in_a_row_are_one(rule: str, first: int, second: int, third: int) -> None:
    whole, one, other = factors(rule, third, first), factors(rule, second, first), factors(rule, third, second)
    for name in ("lr", "embedding_lr", "embedding_l2"):
        assert math.isclose(getattr(whole, name), getattr(one, name) * getattr(other, name), rel_tol=1e-9)


@given(st.sampled_from(RULES))
def test_the_base_batch_keeps_its_rates(rule: str) -> None:
    scaled = scale_optim(replace(BASE, scaling=rule), 1024, num_epoch_steps=10, num_total_steps=100)
    assert (scaled.lr, scaled.embedding_lr, scaled.embedding_l2) == (BASE.lr, BASE.embedding_lr, BASE.embedding_l2)


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ConfigError, match="base_batch_size"):
        scale_optim(replace(BASE, scaling="sqrt", base_batch_size=0), 4096, 10, 100)
    with pytest.raises(ConfigError, match="expected one of"):
        factors("cubic", 1, 1)
    with pytest.raises(ConfigError, match="at least 1 row"):
        factors("sqrt", 0, 1)


def test_the_description_names_every_changed_setting() -> None:
    given_settings = replace(BASE, scaling="cowclip")
    text = describe(given_settings, scale_optim(given_settings, 131072, 77, 770), 131072)
    for part in ("1024 -> 131072", "x128", "lr 0.001 -> 0.0113137", "embedding_lr 0.002 -> 0.002", "1e-05 -> 0.00128", "77 steps"):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "num_steps", "init_std", "expected"),
    [
        ({"scaling": "cowclip", "clip": "cowclip"}, 10_000, 0.01, ()),
        ({"scaling": "sqrt"}, 499, 0.5, ("fewer than 500",)),
        ({"scaling": "none"}, 3, 0.5, ()),
        ({"scaling": "cowclip"}, 10_000, 1e-4, ("without optim.clip=cowclip", "embedding_init_std=0.01")),
    ],
)
def test_warnings_tell_what_the_rule_cannot_mend(
    changes: dict[str, str], num_steps: int, init_std: float, expected: tuple[str, ...]
) -> None:
    found = warnings(replace(BASE, **changes), num_steps, init_std)  # type: ignore[arg-type]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))
