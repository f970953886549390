"""The packaged YAML files: a comment with a unit on every key, defaults equal to the schema's, experiments that only override."""

from pathlib import Path

import pytest
import yaml

from tests.unit.config.words import UNIT
from torchrec_kstep.config.keys import schema_keys
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import PrepareConfig, RunConfig, StudyConfig
from torchrec_kstep.config.search_path import packaged_dir
from torchrec_kstep.config.yaml_file import read_yaml

NOT_GROUPS = {"topology"}  # descriptions of machines, which have a schema of their own
FILES = sorted(file for file in packaged_dir().rglob("*.yaml") if file.parent.name not in NOT_GROUPS)
IDS = [str(file.relative_to(packaged_dir())) for file in FILES]
CHOICES = [(file.parent.name, file.stem) for file in FILES if file.parent != packaged_dir()]

# Choices that go only together with another one; alone they are refused, by name.
COMPANIONS = {
    ("planner", "fused"): ["optim=adagrad"],
    ("distributed", "nccl"): ["train.device=cuda", "planner=dense"],
    ("optim", "adagrad"): ["planner=dense"],
}


def leaf_nodes(node: yaml.Node, path: str = "") -> list[tuple[str, yaml.Node, int]]:
    """Dotted path, value and last line (from 0) of every key whose value is no mapping; a defaults list's items count."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return [(path, node, node.end_mark.line)]
    return [leaf for key, value in node.value for leaf in leaf_nodes(value, f"{path}.{key.value}".lstrip("."))]


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_every_key_has_a_comment_and_every_number_its_unit(file: Path) -> None:
    lines = file.read_text().splitlines()
    for path, node, line in leaf_nodes(yaml.compose(file.read_text())):
        if path.split(".")[0] == "defaults":
            continue
        code, mark, comment = lines[min(line, len(lines) - 1)].partition(" # ")
        assert mark, f"{file.name}: {path} has no comment: {code}"
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if any(item.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") for item in items):
            assert UNIT.search(comment), f"{file.name}: {path} is a number without a unit: {comment}"


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_file_says_at_its_top_what_it_is(file: Path) -> None:
    first = next(line for line in file.read_text().splitlines() if not line.startswith("# @package"))
    assert first.startswith("# ")
    assert first.endswith(".")


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_composes_and_names_itself(group: str, choice: str) -> None:
    if group == "study":
        assert load(StudyConfig, "study", [f"study={choice}"]).name == choice
        return
    config = load(RunConfig, "train", [f"{group}={choice}", *COMPANIONS.get((group, choice), ())])
    if group in ("data", "model"):
        assert getattr(config, group).name == choice


@pytest.mark.parametrize(("schema_cls", "name"), [(RunConfig, "train"), (PrepareConfig, "prepare")])
def test_files_and_schema_agree_on_defaults(schema_cls: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RunConfig()` in Python and a command line without overrides mean the same; only `data.path` is spelt out."""
    monkeypatch.chdir(tmp_path)
    config = load(schema_cls, name, ["data.path=''"])
    assert config == schema_cls()
    assert load(schema_cls, name, []).data.path == str(tmp_path / "prepared" / "movielens_100k")


@pytest.mark.parametrize("file", sorted(packaged_dir().glob("experiment/*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_only_overrides(file: Path) -> None:
    content = read_yaml(file)
    assert all(entry.keywords == ("override",) for entry in content.defaults)
    assert content.values.keys() <= schema_keys(RunConfig).groups.keys()
