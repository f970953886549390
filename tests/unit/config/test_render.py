"""What people read: the saved YAML repeats its configuration, and docs/configuration.md lists every key as the schema has it."""

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.unit.config.toy import InnerToy, OptimToy, Toy
from torchrec_kstep.config.check import writable_schema
from torchrec_kstep.config.render import reference_table, yaml_text
from torchrec_kstep.config.schema import PrepareConfig, RunConfig, StudyConfig

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"

# "${" begins an interpolation, and a lone surrogate is no text; both cannot stand in a resolved file.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="$")).filter(lambda text: text != "???")


@settings(max_examples=100)
@given(
    st.builds(
        Toy,
        name=words,
        is_fast=st.booleans(),
        widths=st.lists(st.integers()),
        columns=st.lists(words),
        rules=st.dictionaries(words, words),
        optim=st.builds(OptimToy, k=st.integers(), pace=st.floats(allow_nan=False), inner=st.builds(InnerToy, width=st.integers())),
        bare=st.integers(),
    )
)
def test_written_yaml_reads_back_equal(toy: Toy) -> None:
    read = OmegaConf.to_object(OmegaConf.merge(writable_schema(Toy), OmegaConf.create(yaml_text(toy))))
    assert read == toy


@pytest.mark.parametrize(
    "text", ["1e5", "0E0", "1_0", ".5e+1", "-1", "yes", "null", "~", "2026-12-01", "1:30", "0x1f", "a: b # c", "", " x ", "*a"]
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    toy = Toy(name=text, columns=[text], rules={"table": text})
    assert OmegaConf.to_object(OmegaConf.merge(writable_schema(Toy), OmegaConf.create(yaml_text(toy)))) == toy


def test_written_yaml_explains_every_key() -> None:
    lines = yaml_text(Toy()).splitlines()
    assert "name: a  # what it is called" in lines
    assert "  k: 1  # steps between merges" in lines
    assert "bare: 3" in lines


def test_the_document_lists_every_key_as_the_schema_has_it() -> None:
    """`KSTEP_UPDATE_GOLDEN=1 pytest tests/unit/config/test_render.py` rewrites the tables after a change of the schema."""
    table = reference_table({"train": RunConfig, "prepare": PrepareConfig, "study": StudyConfig})
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    current, _, tail = rest.partition(END)
    if os.environ.get("KSTEP_UPDATE_GOLDEN") == "1":
        assert "CI" not in os.environ, "golden files are updated on a desk, where the difference is read"
        DOCUMENT.write_text(f"{head}{BEGIN}{table}{END}{tail}")
        return
    assert current == table, "docs/configuration.md is out of step with the schema: run this test with KSTEP_UPDATE_GOLDEN=1"


def test_the_table_shows_shared_groups_once() -> None:
    table = reference_table({"train": RunConfig, "prepare": PrepareConfig, "study": StudyConfig})
    assert table.count("### `data`\n") == 1
    assert "Read by `train` and `prepare`." in table
    assert "| `train.batch_size` | `int` | `256` | rows per rank and micro-batch |" in table
    assert all(f"`{field.name}`" in table for field in dataclasses.fields(PrepareConfig))
