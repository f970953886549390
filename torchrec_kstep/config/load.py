"""The way from a command line to a checked, frozen configuration; the command line of every program of the package.

No process group, data file or directory is opened or made here. Environment variables of this room are read here only.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrec_kstep._version import __version__
from torchrec_kstep.config import validate
from torchrec_kstep.config.check import Checker, writable_schema
from torchrec_kstep.config.command import Command, parse_command
from torchrec_kstep.config.compose import Composer, register_schema
from torchrec_kstep.config.findings import Findings
from torchrec_kstep.config.keys import schema_keys
from torchrec_kstep.config.render import help_text, yaml_text
from torchrec_kstep.config.search_path import SearchPath
from torchrec_kstep.config.sweep import Job, jobs_of
from torchrec_kstep.config.yaml_file import read_yaml
from torchrec_kstep.errors import ConfigError

T = TypeVar("T")

SPEAKER_GRACE_S = 30.0  # seconds that a rank leaves to local rank 0 to tell a fault that all ranks find
EXIT_CONFIG = 2  # exit code of a wrong configuration, as argparse uses it for a wrong command line
PATH_KEYS = (
    "run_dir",
    "data.path",
    "data.source",
    "tiers.ssd_paths",
    "planner.topology",
    "planner.calibration",
    "planner.plan_cache",
)  # keys that name files or folders


def load(schema_cls: type[T], config_name: str, argv: Sequence[str]) -> T:
    """Returns the checked configuration of one run.

    Args:
        schema_cls: frozen dataclass of the configuration.
        config_name: file of `conf/` to start from, without `.yaml`.
        argv: arguments after the program's name: overrides, `--config-path`, `--config-name`, `--config-dir`.

    Raises:
        ConfigError: lists everything that is wrong with keys, values and their combination.
    """
    findings = Findings()
    command = parse_command(argv)
    for fault in command.faults:
        findings.add(fault)
    config = _load_job(schema_cls, config_name, command, command.overrides, findings)
    findings.raise_if_any()
    return cast(T, config)


def main(schema_cls: type[T], config_name: str, fn: Callable[[T], int], argv: Sequence[str] | None = None) -> int:
    """Runs a program: reads its command line, checks its configuration, calls `fn` once or, with --multirun, several times.

    A wrong configuration is told as a short text on stderr, by local rank 0 of each host, and ends the job with exit code 2
    before `fn` is called. A ConfigError that `fn` itself raises is told likewise in a single process; under torchrun it passes
    through, because the other ranks need not have met it.

    Args:
        schema_cls: frozen dataclass of the configuration.
        config_name: file of `conf/` to start from, and name of the program's module.
        fn: the program; returns its exit code.
        argv: arguments after the program's name; None = those of this process.

    Returns:
        The exit code: that of `fn`, 0 after --help and the like, 2 for a wrong configuration.
    """
    is_speaker = os.environ.get("LOCAL_RANK", "0") == "0"  # files may differ between hosts, so each host says what is wrong
    under_torchrun = "RANK" in os.environ
    try:
        command = parse_command(sys.argv[1:] if argv is None else argv)
        if command.help or command.version:
            if is_speaker:
                print(_help(schema_cls, config_name, command) if command.help else __version__)
            return 0
        runs = _load_all(schema_cls, config_name, command, under_torchrun)
        if command.cfg:
            if is_speaker:
                print("\n".join(f"# {job.title}\n{yaml_text(config)}" if job.title else yaml_text(config) for job, config in runs), end="")
            return 0
    except ConfigError as error:
        if not is_speaker:
            # Launchers end all ranks when the first one ends, so that one must be the speaker. Who is still here after the
            # grace has met a fault that the speaker did not, and tells it.
            time.sleep(SPEAKER_GRACE_S)
        _tell(config_name, error)
        print("(--help lists all groups and keys; nothing was started)", file=sys.stderr)
        return EXIT_CONFIG
    return _run_all(config_name, fn, runs, under_torchrun)


def save(config: object, path: str | os.PathLike[str]) -> None:
    """Writes a configuration as YAML with a comment on each key.

    `--config-path FOLDER --config-name NAME` with the file's folder and name (without `.yaml`) repeats the run.
    """
    Path(path).write_text(yaml_text(config), encoding="utf-8")


def _help(schema_cls: type, config_name: str, command: Command) -> str:
    search = SearchPath.of(command, config_name, Path.cwd())
    return help_text(schema_cls, config_name, search.groups(schema_keys(schema_cls).groups), search.offered())


def _tell(config_name: str, error: ConfigError) -> None:
    print(f"torchrec_kstep.{config_name}: {error}", file=sys.stderr)


def _load_all(schema_cls: type[T], config_name: str, command: Command, under_torchrun: bool) -> list[tuple[Job, T]]:
    """Loads the configuration of every run, and raises the findings of all of them together."""
    findings = Findings()
    for fault in command.faults:
        findings.add(fault)
    if command.multirun and under_torchrun:
        findings.add(
            "--multirun does not work under torchrun: each rank would start the sweep by itself; start torchrun once for each value, "
            f"e.g. for lr in 1e-3 1e-2; do torchrun --nproc-per-node 2 -m torchrec_kstep.{config_name} optim.lr=$lr; done"
        )
    jobs = jobs_of(command.overrides, command.multirun, findings)
    configs = []
    for job in jobs:
        found = Findings()
        configs.append(_load_job(schema_cls, config_name, command, job.overrides, found))
        for item in found.items:
            findings.add(item.text, *item.keys)
    findings.raise_if_any()
    return [(job, _in_own_folder(cast(T, config), job)) for job, config in zip(jobs, configs, strict=True)]


def _in_own_folder(config: T, job: Job) -> T:
    """Gives each run of a sweep its own run directory, unless the sweep itself names them."""
    if not job.folder or not hasattr(config, "run_dir"):
        return config
    parent = config.run_dir or os.path.abspath(time.strftime("runs/%Y%m%d_%H%M%S_multirun", job.started))
    return dataclasses.replace(config, run_dir=os.path.join(parent, job.folder))  # type: ignore[type-var]


def _run_all(config_name: str, fn: Callable[[T], int], runs: Sequence[tuple[Job, T]], under_torchrun: bool) -> int:
    launch_dir = Path.cwd()
    for job, config in runs:
        if job.title:
            print(job.title, flush=True)
        try:
            code = fn(config)
        except ConfigError as error:
            if under_torchrun:
                raise
            _tell(config_name, error)
            return EXIT_CONFIG
        finally:
            os.chdir(launch_dir)  # a run may have changed into its directory
        if code:
            return code
    return 0


def _load_job(schema_cls: type, config_name: str, command: Command, overrides: Sequence[str], findings: Findings) -> object:
    """Returns the configuration of one run; where something is wrong, adds findings and leaves the faulty keys at their defaults."""
    launch_dir = Path.cwd()
    try:
        search = SearchPath.of(command, config_name, launch_dir)
    except ConfigError as error:
        findings.add(str(error))
        search = SearchPath.of(Command(), config_name, launch_dir)
    register_schema(schema_cls, config_name)
    checker = Checker(schema_cls, search.groups(schema_keys(schema_cls).groups), search.offered(), findings)
    checker.check_overrides(overrides)
    with Composer.open(search) as composer:
        _check_files(checker, composer, search)
        checker.apply_overrides()
        node = checker.accepted
        if not findings:
            try:
                node = cast(DictConfig, OmegaConf.merge(writable_schema(schema_cls), composer.compose(checker.overrides)))
            except ConfigError as error:
                findings.add(str(error))
    config = _to_dataclass(node, schema_cls, launch_dir, findings)
    findings.add_unrelated(validate.findings(config))
    return config


def _check_files(checker: Checker, composer: Composer, search: SearchPath) -> None:
    """Checks the files that the chosen groups use, in the order in which Hydra merges them."""
    reason = ""
    try:
        used = composer.used_files(checker.group_overrides)
    except ConfigError as error:
        reason = str(error)
        used = search.reachable(checker.chosen)
    for item in used:
        file = search.find(item.config_path)
        if file is not None:  # schemas and Hydra's own files are no files of the search path
            _check_file(checker, file, item.package)
    if reason and not checker.findings:
        checker.findings.add(reason)


def _check_file(checker: Checker, file: Path, package: str) -> None:
    try:
        content = read_yaml(file)
    except ConfigError as error:
        checker.findings.add(str(error))
    else:
        checker.check_file(content, package)


def _to_dataclass(node: DictConfig, schema_cls: type, launch_dir: Path, findings: Findings) -> object:
    """Resolves interpolations and paths; a key that fails gives a finding and keeps its default in the returned dataclass."""
    for path, key in schema_keys(schema_cls).leaves.items():
        try:
            value = OmegaConf.select(node, path, throw_on_missing=True, throw_on_resolution_failure=True)
        except OmegaConfBaseException as error:
            findings.add(f"{path}: {_first_line(error)}", path)
            OmegaConf.update(node, path, key.default)
        else:
            if path in PATH_KEYS and value and not (path == "planner.topology" and "/" not in value and not value.endswith(".yaml")):
                places = [value] if isinstance(value, str) else list(value)
                absolute = [os.path.normpath(os.path.join(launch_dir, os.path.expanduser(place))) for place in places]
                OmegaConf.update(node, path, absolute[0] if isinstance(value, str) else absolute)
    return OmegaConf.to_object(node)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n    full_key")[0].split())
