"""Near matches: a slip of the pen finds its key, in the right group or in another, and noise finds nothing."""

import pytest

from torchrec_kstep.config.suggest import did_you_mean, is_close, nearest

NAMES = ["optim.k", "optim.lr", "optim.embedding_lr", "train.epochs", "train.batch_size", "model", "data"]


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("optim.lrr", "optim.lr"),
        ("train.epoch", "train.epochs"),
        ("epochs", "train.epochs"),
        ("batchsize", "train.batch_size"),
        ("modle", "model"),
        ("optim.kstp", "optim.k"),
        ("optim.batch_size", "train.batch_size"),
        ("optim.learning_rate", "optim.lr"),
        ("learning_rate", "optim.lr"),
        ("train.bs", "train.batch_size"),
        ("zzzzqqqq", None),
        ("optim.foo", None),  # the group alone is no likeness
        ("train.zzz", None),
    ],
)
def test_the_nearest_name_is_found(word: str, match: str | None) -> None:
    assert nearest(word, NAMES) == match


def test_an_exact_name_is_its_own_match() -> None:
    assert all(nearest(name, NAMES) == name for name in NAMES)


def test_nothing_is_nearest_among_nothing() -> None:
    assert nearest("a", []) is None


def test_without_a_match_the_choices_are_listed() -> None:
    assert did_you_mean("zzz", ["b", "a"]) == "expected one of a, b"
    assert did_you_mean("zzz", [f"name{i}" for i in range(50)]) == "--help lists all keys"
    assert did_you_mean("mdel", NAMES) == "did you mean 'model'?"


def test_closeness_is_judged_by_the_last_part() -> None:
    assert is_close("optim.lrr", "optim.lr")
    assert is_close("optim.learning_rate", "optim.lr")
    assert not is_close("optim.kstp", "optim.eps")
