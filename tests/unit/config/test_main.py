"""The command line of the programs: help, printing, sweeps, paths, exit codes; errors once and before anything starts."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrec_kstep._version import __version__
from torchrec_kstep.config import load as load_module
from torchrec_kstep.config.keys import schema_keys
from torchrec_kstep.config.load import EXIT_CONFIG, PATH_KEYS, load, main, save
from torchrec_kstep.config.schema import PrepareConfig, RunConfig
from torchrec_kstep.errors import ConfigError


class Program:
    """Keeps the configurations it is started with."""

    def __init__(self, codes: tuple[int, ...] = (), then: Callable[[RunConfig], None] | None = None) -> None:
        self.configs: list[RunConfig] = []
        self._codes = list(codes)
        self._then = then

    def __call__(self, config: RunConfig) -> int:
        self.configs.append(config)
        if self._then is not None:
            self._then(config)
        return self._codes.pop(0) if self._codes else 0


@pytest.fixture(autouse=True)
def launch_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts its program in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def test_the_program_gets_the_configuration_and_gives_the_exit_code() -> None:
    program = Program(codes=(7,))
    assert main(RunConfig, "train", program, ["train.epochs=3"]) == 7
    assert [config.train.epochs for config in program.configs] == [3]


def test_nothing_is_written_by_loading(launch_dir: Path) -> None:
    """Hydra's own output directories, named by the clock of each rank, must not appear."""
    assert main(RunConfig, "train", Program(), []) == 0
    assert main(RunConfig, "train", Program(), ["-m", "train.epochs=1,2"]) == 0
    assert list(launch_dir.iterdir()) == []


# --- errors ---


def test_a_wrong_configuration_ends_with_code_2_and_a_short_text(capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    assert main(RunConfig, "train", program, ["optim.lrr=4", "train.epochs=ten"]) == EXIT_CONFIG == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 faults" in captured.err
    assert "Traceback" not in captured.err
    assert program.configs == []


@pytest.mark.parametrize(
    "argv", [["optim.lrr=4"], ["--mutlirun"], ["--cfg"], ["--cfg", "hydra"], ["-m", "train.epochs=1,ten"], ["--config-dir", "none"]]
)
def test_every_kind_of_wrong_command_line_ends_alike(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    assert main(RunConfig, "train", program, argv) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("torchrec_kstep.train: ")
    assert program.configs == []


@pytest.mark.multiprocess
def test_ranks_under_torchrun_tell_a_wrong_configuration_once_whoever_is_first(launch_dir: Path) -> None:
    """Rank 1 finds the fault first. If it ended at once, torchrun would end rank 0 before that could say what is wrong."""
    program = launch_dir / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "from torchrec_kstep.config.load import main\n"
        "from torchrec_kstep.config.schema import RunConfig\n"
        "time.sleep(2 if os.environ['RANK'] == '0' else 0)\n"
        "sys.exit(main(RunConfig, 'train', lambda config: 0))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), "optim.lrr=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("did you mean 'optim.lr'?") == 1


def test_a_fault_that_local_rank_0_does_not_meet_is_told_after_a_grace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(load_module.time, "sleep", waits.append)
    under_torchrun(monkeypatch, rank=1)
    assert main(RunConfig, "train", Program(), ["optim.lrr=4"]) == EXIT_CONFIG
    assert waits == [load_module.SPEAKER_GRACE_S]
    assert "did you mean 'optim.lr'?" in capsys.readouterr().err


def test_a_configuration_error_of_the_program_itself_is_told_in_a_single_process_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_config: RunConfig) -> int:
        raise ConfigError("no such table")

    assert main(RunConfig, "train", fail, []) == EXIT_CONFIG
    assert "torchrec_kstep.train: no such table" in capsys.readouterr().err
    under_torchrun(monkeypatch, rank=1)
    with pytest.raises(ConfigError):
        main(RunConfig, "train", fail, [])


def test_argv_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "train.epochs=4"])
    program = Program()
    assert main(RunConfig, "train", program) == 0
    assert program.configs[0].train.epochs == 4


# --- help, version, cfg ---


@pytest.mark.parametrize(("schema_cls", "name"), [(RunConfig, "train"), (PrepareConfig, "prepare")])
def test_help_lists_groups_and_keys(schema_cls: type, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(schema_cls, name, Program(), ["--help", "--no-such-option"]) == 0
    text = capsys.readouterr().out
    assert f"python -m torchrec_kstep.{name}" in text
    assert "movielens_100k | movielens_1m" in text
    assert "data.prefetch_batches" in text
    assert "batches decoded ahead by a background thread; 0 = none" in text
    assert ("optim.lr" in text) is (name == "train")


def test_help_lists_a_users_folder(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (launch_dir / "my" / "model").mkdir(parents=True)
    (launch_dir / "my" / "model" / "big.yaml").write_text("name: dcn\n")
    assert main(RunConfig, "train", Program(), ["--help", "--config-dir", "my"]) == 0
    assert "big | dcn" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RunConfig, "train", Program(), ["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_the_printed_configuration_repeats_itself(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model=dcnv2", "model.mlp=[8]", "planner.tables.user=row_wise", "optim.lr=3e-7", "data.source=a: 'b' # c"]
    argv[-1] = "data.source=\"a: 'b' # c\""
    program = Program()
    assert main(RunConfig, "train", program, [*argv, "--cfg", "job"]) == 0
    assert program.configs == []
    (launch_dir / "again.yaml").write_text(capsys.readouterr().out)
    assert load(RunConfig, "train", ["--config-path", ".", "--config-name", "again"]) == load(RunConfig, "train", argv)


def test_only_the_first_rank_of_a_host_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, rank=1)
    for argv in (["--help"], ["--version"], ["--cfg", "job"]):
        assert main(RunConfig, "train", Program(), argv) == 0
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_saved_configuration_loads_to_the_same(launch_dir: Path) -> None:
    config = load(RunConfig, "train", ["experiment=ml1m_deepfm", "run_dir=here"])
    save(config, launch_dir / "config.yaml")
    assert load(RunConfig, "train", ["--config-path", str(launch_dir), "--config-name", "config"]) == config


# --- sweeps ---


def test_multirun_runs_every_combination_in_its_own_folder(launch_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    assert main(RunConfig, "train", program, ["--multirun", "optim.lr=1e-3,1e-2", "model=dcn,dlrm", "train.epochs=3"]) == 0
    assert [(config.optim.lr, config.model.name) for config in program.configs] == [
        (1e-3, "dcn"),
        (1e-3, "dlrm"),
        (1e-2, "dcn"),
        (1e-2, "dlrm"),
    ]
    assert {config.train.epochs for config in program.configs} == {3}
    folders = [Path(config.run_dir) for config in program.configs]
    assert len(set(folders)) == 4
    assert {folder.parent.parent for folder in folders} == {launch_dir / "runs"}
    assert re.fullmatch(r"\d{8}_\d{6}_multirun", folders[0].parent.name)  # as single runs are named
    assert folders[0].name == "0_optim.lr=0.001,model=dcn"
    assert "run 4 of 4: optim.lr=0.01 model=dlrm" in capsys.readouterr().out


def test_multirun_takes_ranges_and_a_parent_folder(launch_dir: Path) -> None:
    program = Program()
    assert main(RunConfig, "train", program, ["-m", "train.seed=range(1,4)", "run_dir=sweep"]) == 0
    assert [config.run_dir for config in program.configs] == [str(launch_dir / "sweep" / f"{i}_train.seed={i + 1}") for i in range(3)]


def test_multirun_over_run_dir_uses_the_folders_as_they_are(launch_dir: Path) -> None:
    program = Program()
    assert main(RunConfig, "train", program, ["-m", "run_dir=a,b"]) == 0
    assert [config.run_dir for config in program.configs] == [str(launch_dir / "a"), str(launch_dir / "b")]


def test_multirun_without_several_values_runs_once() -> None:
    program = Program()
    assert main(RunConfig, "train", program, ["-m", "train.epochs=2"]) == 0
    assert len(program.configs) == 1


def test_multirun_works_for_a_program_without_a_run_directory() -> None:
    names: list[str] = []

    def program(config: PrepareConfig) -> int:
        names.append(config.data.name)
        return 0

    assert main(PrepareConfig, "prepare", program, ["-m", "data=movielens_100k,frappe"]) == 0
    assert names == ["movielens_100k", "frappe"]


def test_faults_of_all_runs_are_told_before_the_first_starts(capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    assert main(RunConfig, "train", program, ["-m", "train.epochs=1,ten,0", "optim.lrr=3"]) == EXIT_CONFIG
    text = capsys.readouterr().err
    assert "3 faults" in text
    assert program.configs == []


def test_a_sweep_that_cannot_be_listed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RunConfig, "train", Program(), ["-m", "optim.lr=interval(0.1,1)"]) == EXIT_CONFIG
    assert "--multirun takes lists" in capsys.readouterr().err


def test_a_failing_run_ends_the_sweep_with_its_code() -> None:
    program = Program(codes=(0, 5))
    assert main(RunConfig, "train", program, ["-m", "train.epochs=1,2,3"]) == 5
    assert len(program.configs) == 2


def test_multirun_under_torchrun_is_refused_with_the_way_to_do_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, rank=0)
    program = Program()
    assert main(RunConfig, "train", program, ["-m", "optim.lr=1e-3,1e-2", "train.epoch=3"]) == EXIT_CONFIG
    text = capsys.readouterr().err
    assert "do torchrun --nproc-per-node 2 -m torchrec_kstep.train optim.lr=$lr; done" in text
    assert "did you mean 'train.epochs'?" in text
    assert program.configs == []


def test_a_sweep_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RunConfig, "train", Program(), ["-m", "train.seed=1,2", "--cfg", "job"]) == 0
    text = capsys.readouterr().out
    assert "# run 1 of 2: train.seed=1" in text
    assert "# run 2 of 2: train.seed=2" in text


# --- paths ---


@pytest.mark.parametrize("extra", [[], ["hydra.job.chdir=true"], ["--multirun", "train.seed=1,2"]])
def test_relative_paths_start_at_the_launch_directory(launch_dir: Path, extra: list[str]) -> None:
    """Also where the program changes into its run directory, as hydra.job.chdir=true asks."""
    elsewhere = launch_dir / "elsewhere"
    elsewhere.mkdir()
    program = Program(then=lambda _config: os.chdir(elsewhere))
    tiers = ["planner=tiered", "tiers=dram_ssd", "tiers.ssd_paths=[rows,/drive/rows]"]
    assert main(RunConfig, "train", program, ["data.path=./d", "data.source=../raw/*.csv", "run_dir=r", *tiers, *extra]) == 0
    for config in program.configs:
        assert config.data.path == str(launch_dir / "d")
        assert config.data.source == str(launch_dir.parent / "raw" / "*.csv")
        assert config.run_dir.startswith(str(launch_dir / "r"))
        assert config.tiers.ssd_paths == [str(launch_dir / "rows"), "/drive/rows"]
        assert config.chdir is ("hydra.job.chdir=true" in extra)
    assert Path.cwd() == launch_dir


def test_a_path_may_be_absolute_at_home_or_empty(launch_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(launch_dir / "mine"))
    config = load(RunConfig, "train", ["data.path=/abs/d", 'data.source="~/raw"', "run_dir="])
    assert (config.data.path, config.data.source, config.run_dir) == ("/abs/d", str(launch_dir / "mine" / "raw"), "")


def test_the_prepared_folder_follows_the_data_set(launch_dir: Path) -> None:
    assert load(RunConfig, "train", ["data=frappe"]).data.path == str(launch_dir / "prepared" / "frappe")
    assert load(PrepareConfig, "prepare", ["data=criteo"]).data.path == str(launch_dir / "prepared" / "criteo")


def test_every_key_that_names_a_place_is_made_absolute() -> None:
    words = ("path", "paths", "dir", "dirs", "source", "file", "folder")
    for schema_cls in (RunConfig, PrepareConfig):
        keys = schema_keys(schema_cls).leaves
        assert [
            path
            for path, key in keys.items()
            if key.type is not bool and path.split(".")[-1].split("_")[-1] in words and path not in PATH_KEYS
        ] == []
