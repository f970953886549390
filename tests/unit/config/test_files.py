"""YAML files: a user's folder adds to the packaged ones, and every fault in the files that a run uses is told with its line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import PrepareConfig, RunConfig
from torchrec_kstep.errors import ConfigError

HEADER = "# @package _global_\n"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, "train", argv)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("optim:\n  kstp: 4\n", 3, "unknown key 'optim.kstp'; did you mean"),
        ("optim:\n  lrr: 4\n", 3, "did you mean 'optim.lr'?"),
        ("optm:\n  lr: 4\n", 2, "unknown key 'optm'; did you mean 'optim'?"),
        ("lr: 4\n", 2, "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("optim.lr: 4\n", 2, "a key of a file has no dots"),
        ("optim: 4\n", 2, "optim is a group of keys, got 4"),
        ("optim:\n", 2, "optim is a group of keys, got None"),
        ("train:\n  epochs: ten\n", 3, "train.epochs expects a whole number, got 'ten'"),
        ("data:\n  shuffle: 3\n", 3, "data.shuffle expects true or false, got 3"),
        ("model:\n  mlp: [1, x]\n", 3, "model.mlp expects a list in brackets"),
        ("1: 2\n", 2, "unknown key '1'"),
        ("hydra:\n  ouput_subdir: x\n", 3, "did you mean 'hydra.output_subdir'?"),
        ("hydra:\n  run: {dir: x}\n", 3, "hydra.run.dir has no effect here; write run_dir=FOLDER"),
        ("hydra:\n  job:\n    chdir: true\n", 4, "write chdir: true in a file"),
        ("optim:\n  lr: 1\n  lr: 2\n", 4, "found duplicate key lr"),
        ("optim: [\n", 3, "no valid YAML"),
        ("- 1\n", 1, "expected keys and values, got list"),
        ("defaults: 3\n", 2, "expected a list under defaults"),
        ("defaults:\n  - override /modle: dcn\n", 3, "no group is named 'modle'; did you mean 'model'?"),
        ("defaults:\n  - override /model: dcm\n", 3, "no model is named 'dcm'; did you mean 'dcn'?"),
    ],
)
def test_a_fault_in_an_experiment_is_refused_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    file = write(tmp_path, "experiment/mine", HEADER + text)
    told = refusal("--config-dir", str(tmp_path), "experiment=mine")
    assert told.startswith("1 fault")
    assert says in told
    assert f"{file}:{line}" in told or f'"{file}", line {line}' in told or says.startswith("expected keys") or "defaults" in text


@pytest.mark.parametrize("word", ["optoinal", "optinal", "Optional", "overide"])
def test_a_misspelt_keyword_of_a_defaults_list_is_refused(tmp_path: Path, word: str) -> None:
    """Hydra takes it for a part of the group's name, and with `null` drops the entry without a word."""
    file = write(tmp_path, "mine", f"defaults:\n  - train\n  - {word} experiment: null\n  - _self_\n")
    told = refusal("--config-dir", str(tmp_path), "--config-name", "mine")
    assert f"{file}:3: unknown word {word!r}" in told
    assert "did you mean 'o" in told


def test_faults_of_files_and_command_line_are_told_together(tmp_path: Path) -> None:
    write(tmp_path, "mine", "defaults:\n  - train\n  - optoinal experiment: null\n  - _self_\noptim:\n  kstp: 4\n  eps: small\n")
    told = refusal("--config-dir", str(tmp_path), "--config-name", "mine", "train.epoch=3", "train.batch_size=0")
    assert told.startswith("5 faults")
    assert "did you mean 'optional'?" in told
    assert "optim.kstp" in told
    assert "optim.eps expects a number, got 'small'" in told
    assert "did you mean 'train.epochs'?" in told
    assert "train.batch_size: expected at least 1 and at most 16777216, got 0" in told


@pytest.mark.parametrize("text", ["optim:\n  lr: 1\n", "defaults:\n  - override /model: dcn\noptim:\n  lr: 1\n"])
def test_an_overlay_without_its_package_line_says_so(tmp_path: Path, text: str) -> None:
    write(tmp_path, "experiment/mine", text)
    assert "'# @package _global_'" in refusal("--config-dir", str(tmp_path), "experiment=mine")


def test_a_file_in_a_group_of_the_user_is_checked_and_used(tmp_path: Path) -> None:
    write(tmp_path, "model/mine", "name: dcn\nmlp: [3]\n")
    assert load(RunConfig, "train", ["--config-dir", str(tmp_path), "model=mine"]).model.mlp == [3]
    write(tmp_path, "model/mine", "name: dcn\nmpl: [3]\n")
    assert "mine.yaml:2: unknown key 'model.mpl'; did you mean 'model.mlp'?" in refusal("--config-dir", str(tmp_path), "model=mine")


def test_a_new_group_of_the_user_is_added_with_a_plus(tmp_path: Path) -> None:
    write(tmp_path, "hardware/laptop", HEADER + "train:\n  batch_size: 8\n")
    assert load(RunConfig, "train", ["--config-dir", str(tmp_path), "+hardware=laptop"]).train.batch_size == 8
    assert "write +hardware=laptop" in refusal("--config-dir", str(tmp_path), "hardware=laptop")


def test_config_path_wins_over_the_packaged_files_and_config_dir_does_not(tmp_path: Path) -> None:
    write(tmp_path, "train/default", "epochs: 77\n")
    assert load(RunConfig, "train", ["--config-path", str(tmp_path)]).train.epochs == 77
    assert load(RunConfig, "train", ["--config-dir", str(tmp_path)]).train.epochs != 77


def test_a_file_to_start_from_may_set_values_alone(tmp_path: Path) -> None:
    write(tmp_path, "mine", "optim:\n  lr: 0.5\n")
    config = load(RunConfig, "train", ["--config-dir", str(tmp_path), "--config-name", "mine", "train.epochs=3"])
    assert isinstance(config, RunConfig)
    assert (config.optim.lr, config.train.epochs, config.model) == (0.5, 3, RunConfig().model)


def test_folders_with_spaces_and_relative_folders_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my 'odd', [folder]"
    write(folder, "experiment/mine", HEADER + "train:\n  epochs: 5\n")
    monkeypatch.chdir(tmp_path)
    assert load(RunConfig, "train", ["--config-dir", folder.name, "experiment=mine"]).train.epochs == 5


@pytest.mark.parametrize("option", ["--config-dir", "--config-path"])
def test_a_missing_folder_is_refused(tmp_path: Path, option: str) -> None:
    assert f"{option} {tmp_path}/none: no such folder" in refusal(option, f"{tmp_path}/none", "train.epochs=3")


def test_a_missing_file_to_start_from_is_refused_with_a_near_match(tmp_path: Path) -> None:
    write(tmp_path, "mine", "{}\n")
    told = refusal("--config-dir", str(tmp_path), "--config-name", "mien", "train.epoch=3")
    assert "--config-name mien: no such file, did you mean 'mine'?" in told
    assert "did you mean 'train.epochs'?" in told


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "experiment/mine", HEADER).write_bytes(b"# @package _global_\nrun_dir: \xff\xfe\n")
    assert "mine" in refusal("--config-dir", str(tmp_path), "experiment=mine")


def test_the_packaged_files_are_found_from_any_directory(tmp_path: Path) -> None:
    """As a user of the installed package has them: nothing of the checkout on the path or in the working directory."""
    code = (
        "import torchrec_kstep._conf\n"
        "from torchrec_kstep.config.load import load\n"
        "from torchrec_kstep.config.schema import RunConfig\n"
        "print(load(RunConfig, 'train', ['model=dcn']).model.name)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("dcn\n", 0), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_prepare_has_its_own_file() -> None:
    assert load(PrepareConfig, "prepare", ["overwrite=true"]).overwrite
