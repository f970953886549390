"""The flat list of keys: paths, defaults and comments come from the dataclasses; mappings are open below."""

import inspect
from dataclasses import MISSING, make_dataclass

import pytest

from tests.unit.config.toy import Toy
from tests.unit.config.words import UNIT
from torchrec_kstep.config.keys import field_comments, schema_keys
from torchrec_kstep.config.schema import PrepareConfig, RunConfig


def test_every_leaf_and_group_is_listed_in_order() -> None:
    keys = schema_keys(Toy)
    assert list(keys.leaves) == ["name", "is_fast", "widths", "columns", "rules", "optim.k", "optim.pace", "optim.inner.width", "bare"]
    assert list(keys.groups) == ["optim", "optim.inner"]
    assert keys.leaves["widths"].default == [1, 2]
    assert keys.leaves["widths"].type_text == "list[int]"
    assert keys.leaves["optim.k"].type_text == "int"


def test_comments_are_read_from_the_source() -> None:
    keys = schema_keys(Toy)
    assert keys.leaves["optim.k"].comment == "steps between merges"
    assert keys.leaves["bare"].comment == ""


def test_without_sources_only_comments_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(_cls: type) -> str:
        raise OSError("source code not available")

    monkeypatch.setattr(inspect, "getsource", no_source)
    assert field_comments(Toy) == {}
    sourceless = make_dataclass("Sourceless", [("k", int, 1)], frozen=True)
    assert list(schema_keys(sourceless).leaves) == ["k"]


@pytest.mark.parametrize(
    ("path", "is_known"), [("rules.user", True), ("rules", True), ("optim", True), ("optim.q", False), ("widths.0", False), ("", False)]
)
def test_names_are_free_inside_a_mapping_only(path: str, is_known: bool) -> None:
    assert schema_keys(Toy).knows(path) is is_known


@pytest.mark.parametrize("schema_cls", [RunConfig, PrepareConfig])
def test_every_key_has_a_default_and_a_comment(schema_cls: type) -> None:
    assert [key.path for key in schema_keys(schema_cls).leaves.values() if key.default is MISSING or not key.comment] == []


@pytest.mark.parametrize("schema_cls", [RunConfig, PrepareConfig])
def test_every_number_says_its_unit(schema_cls: type) -> None:
    """A number without a unit is a guess; the words of its comment must name what is counted or measured."""
    bare = [
        key.path
        for key in schema_keys(schema_cls).leaves.values()
        if key.type in (int, float, list[int], list[float]) and not UNIT.search(key.comment)
    ]
    assert bare == []
