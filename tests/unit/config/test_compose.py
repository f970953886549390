"""The check's own picture of the configuration, which rules judge when some key is wrong, is what Hydra composes."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from torchrec_kstep.config.check import Checker
from torchrec_kstep.config.command import Command
from torchrec_kstep.config.compose import Composer, register_schema
from torchrec_kstep.config.findings import Findings
from torchrec_kstep.config.keys import schema_keys
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.config.search_path import PACKAGE, SearchPath
from torchrec_kstep.config.yaml_file import read_yaml


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=dcnv2", "optim=sgd", "planner=fused", "data=synthetic", "distributed=nccl"],
        ["experiment=ml1m_deepfm", "optim.lr=3e-3", "train.epochs=2", "model={mlp: [1]}"],
        ["experiment=[ml1m_deepfm,frappe_deepfm]"],
        ["planner.tables={a: row_wise}", "planner.tables.b=row_wise", "optim.lr=${optim.eps}"],
    ],
)
def test_what_is_checked_is_what_is_composed(overrides: list[str]) -> None:
    search = SearchPath.of(Command(), "train", Path.cwd())
    register_schema(RunConfig, "train")
    checker = Checker(RunConfig, search.groups(schema_keys(RunConfig).groups), search.offered(), Findings())
    checker.check_overrides(overrides)
    with Composer.open(search) as composer:
        for used in composer.used_files(checker.group_overrides):
            file = search.find(used.config_path)
            if file is not None:
                checker.check_file(read_yaml(file), used.package)
        checker.apply_overrides()
        composed = composer.compose(checker.overrides)
    assert not checker.findings
    assert OmegaConf.to_container(checker.accepted, resolve=True) == OmegaConf.to_container(composed, resolve=True)


def test_files_that_hydra_uses_are_among_those_found_without_it() -> None:
    search = SearchPath.of(Command(), "train", Path.cwd())
    register_schema(RunConfig, "train")
    choices = {"experiment": ["synthetic_dlrm"], "train": ["default"]}
    with Composer.open(search) as composer:
        used = [item for item in composer.used_files(["experiment=synthetic_dlrm"]) if search.find(item.config_path)]
    reachable = search.reachable(choices)
    assert all(item in reachable for item in used)


def test_hydra_is_left_as_it_was() -> None:
    """A program that uses Hydra for itself may load a configuration of ours meanwhile."""
    register_schema(RunConfig, "train")
    with initialize_config_module(PACKAGE, version_base="1.3"):
        with Composer.open(SearchPath.of(Command(), "train", Path.cwd())) as composer:
            composer.compose(["model=dcn"])
        assert compose("train", ["model=dlrm"]).model.name == "dlrm"
    assert not GlobalHydra.instance().is_initialized()
