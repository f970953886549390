"""Goal: a table's id comes from its name, whatever the order, and no two tables share one. Layer: unit, property-based."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_kstep.storage import table_ids as module
from torchrec_kstep.storage.table_ids import NUM_TABLE_IDS, hash_of, table_ids


def test_ids_stay_what_they_are() -> None:
    """Stores on disk hold them: another hash would refuse every store."""
    assert table_ids(["user", "item"]) == {"user": 243625, "item": 417579}


@given(st.lists(st.text(max_size=8), unique=True, max_size=40).flatmap(lambda names: st.tuples(st.just(names), st.permutations(names))))
def test_any_order_gives_the_same_ids(names: tuple[list[str], list[str]]) -> None:
    assert table_ids(names[0]) == table_ids(names[1])


@given(st.lists(st.text(max_size=8), unique=True, max_size=40))
def test_names_with_equal_hashes_get_different_ids(names: list[str]) -> None:
    """With few ids, so that collisions are the rule; the ids are all used up where there are as many names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUM_TABLE_IDS", max(len(names), 1))
        assert sorted(table_ids(names).values()) == list(range(len(names)))


def test_a_collision_moves_the_later_name_only() -> None:
    first_by_hash: dict[int, str] = {}
    names = (f"table{index}" for index in range(NUM_TABLE_IDS))
    pair = next([first_by_hash[hash_of(name)], name] for name in names if first_by_hash.setdefault(hash_of(name), name) != name)
    earlier, later = sorted(pair)
    ids = table_ids([later, earlier, "user"])
    assert (ids[earlier], ids[later]) == (hash_of(earlier), (hash_of(earlier) + 1) % NUM_TABLE_IDS)
    assert ids["user"] == hash_of("user")


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="table 'user' stands 2 times"):
        table_ids(["user", "item", "user"])


def test_more_names_than_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_TABLE_IDS", 1)
    with pytest.raises(ValueError, match="2 tables, expected at most 1"):
        table_ids(["user", "item"])
