"""The command line: options by argparse, everything else is an override."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torchrec_kstep.config.suggest import nearest
from torchrec_kstep.errors import ConfigError

_OPTIONS = ("--help", "--version", "--cfg", "--multirun", "--config-path", "--config-name", "--config-dir")

# Options of Hydra's own command line that have no meaning here, with what to do instead.
_HYDRA_OPTIONS = {
    "--hydra-help": "--help lists all groups and keys",
    "--resolve": "--cfg job is always resolved",
    "--info": "--cfg job prints the configuration",
    "--package": "--cfg job prints the configuration",
    "--run": "it is what happens without options",
    "--shell-completion": "--help lists all groups and keys",
    "--experimental-rerun": "use --config-path RUN_DIR --config-name config",
}


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
        overrides: `key=value` and `group=choice`, in order, as typed.
        help: list groups and keys, then end.
        version: print the version, then end.
        cfg: `job` prints the resolved configuration, then ends; "" runs.
        multirun: run once for each combination of values.
        config_path: folder searched before the packaged files; None = none.
        config_name: file to start from, without `.yaml`; None = the program's own.
        config_dir: folder searched after the packaged files; None = none.
        faults: what is wrong with the options, one text each.
    """

    overrides: tuple[str, ...] = ()
    help: bool = False
    version: bool = False
    cfg: str = ""
    multirun: bool = False
    config_path: Path | None = None
    config_name: str | None = None
    config_dir: Path | None = None
    faults: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; --help lists the options")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"], default="")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cp", "--config-path", type=Path)
    parser.add_argument("-cn", "--config-name")
    parser.add_argument("-cd", "--config-dir", type=Path)
    return parser


def parse_command(argv: Sequence[str]) -> Command:
    """Splits the arguments after the program's name into options and overrides.

    Unknown options become `faults`, so that they are reported together with faults in keys and values.

    Raises:
        ConfigError: an option lacks its value or has a wrong one, so that the rest cannot be told apart.
    """
    known, unknown = _parser().parse_known_intermixed_args(argv)
    name: str | None = known.config_name
    return Command(
        overrides=(*known.overrides, *(text for text in unknown if not text.startswith("-"))),  # argparse stops at an unknown option
        help=known.help,
        version=known.version,
        cfg=known.cfg,
        multirun=known.multirun,
        config_path=known.config_path,
        config_name=name.removesuffix(".yaml") if name else None,
        config_dir=known.config_dir,
        faults=tuple(_unknown_option(text.partition("=")[0]) for text in unknown if text.startswith("-")),
    )


def _unknown_option(option: str) -> str:
    if option in _HYDRA_OPTIONS:
        return f"option {option} of Hydra is not offered here: {_HYDRA_OPTIONS[option]}"
    match = nearest(option, _OPTIONS)
    return f"unknown option {option}: " + (f"did you mean {match}?" if match else "--help lists the options")
