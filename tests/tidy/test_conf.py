"""Every file of `conf/` composes into a valid run, every key is commented, and every group of the schema has files."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from torchrec_kstep.config import schema
from torchrec_kstep.config.load import load

CONF = Path(__file__).resolve().parents[2] / "conf"
ENTRIES = {"train": schema.RunConfig, "prepare": schema.PrepareConfig, "study": schema.StudyConfig}
THIN = {("experiment", "train"), ("study", "study")}  # groups of files that change keys of any group of their entry
NO_GROUPS = {"topology"}  # descriptions of machines, read by the planner and not by Hydra
GROUPS = sorted(
    folder.name for folder in CONF.iterdir() if folder.is_dir() and not folder.name.startswith("_") and folder.name not in NO_GROUPS
)
CHOICES = [(group, file.stem) for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))]
# Choices that make sense only together with another one; alone they are refused, by name.
COMPANIONS = {
    ("planner", "fused"): ["optim=adagrad"],
    ("distributed", "nccl"): ["train.device=cuda", "planner=dense"],
    ("optim", "adagrad"): ["planner=dense"],
}


def groups_of(entry: type) -> set[str]:
    return {field.name for field in dataclasses.fields(entry) if dataclasses.is_dataclass(field.type)}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_composes_as_it_stands(entry: str) -> None:
    assert isinstance(load(ENTRIES[entry], entry, []), ENTRIES[entry])


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=["/".join(choice) for choice in CHOICES])
def test_every_choice_of_a_group_composes(group: str, choice: str) -> None:
    used = [entry for entry, kind in ENTRIES.items() if group in groups_of(kind) or (group, entry) in THIN]
    assert used, f"conf/{group} belongs to no entry"
    for entry in used:
        load(ENTRIES[entry], entry, [f"{group}={choice}", *COMPANIONS.get((group, choice), [])])


def test_every_group_of_the_schema_can_be_chosen() -> None:
    assert groups_of(schema.RunConfig) <= set(GROUPS)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_a_file_holds_yaml_that_stands_for_something(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict), f"{path.name} holds no keys"


def schema_lines() -> list[str]:
    return Path(schema.__file__).read_text().splitlines()


def test_every_key_of_the_schema_is_commented() -> None:
    """The comment gives meaning and unit; it is what a user reads."""
    fields = [field for kind in vars(schema).values() if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)]
    keys = {f"    {field.name}:" for field in fields}
    groups = {f"    {field.name}:" for field in fields if dataclasses.is_dataclass(field.type)}
    lines = schema_lines()
    bare = [
        line.strip()
        for number, line in enumerate(lines)
        if any(line.startswith(key) for key in keys - groups) and "#" not in line and not lines[number - 1].strip().startswith("#")
    ]
    assert bare == []
