"""Where YAML files are found, and what stands in them: values with their lines, and defaults lists."""

import importlib
import typing
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # OmegaConf's own YAML reader, without annotations
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrec_kstep.config.command import Command
from torchrec_kstep.config.suggest import did_you_mean
from torchrec_kstep.errors import ConfigError

PACKAGE = "torchrec_kstep._conf"  # the folder conf/ of the checkout, as the installed package names it
_NOT_CHOICES = ("hydra", "schema", "__pycache__")  # folders that hold no groups of ours


def packaged_dir() -> Path:
    """Returns the folder of the packaged YAML files.

    Raises:
        ConfigError: the package is not installed, so that the files of `conf/` have no name to import them by.
    """
    try:
        file = importlib.import_module(PACKAGE).__file__
    except ModuleNotFoundError:
        raise ConfigError(
            f"the configuration files cannot be imported as {PACKAGE}: install the package, `make install` or `pip install .`"
        ) from None
    assert file is not None, "conf/ has an __init__.py"
    return Path(file).parent


@dataclass(frozen=True)
class SearchPath:
    """Folders that hold YAML files, the first match wins.

    Attributes:
        folders: absolute paths, in order.
        primary: name of the file to start from, without `.yaml`.
    """

    folders: tuple[Path, ...]
    primary: str

    @classmethod
    def of(cls, command: Command, config_name: str, launch_dir: Path) -> "SearchPath":
        """Returns the folders of a command line; relative ones resolve from `launch_dir`.

        Raises:
            ConfigError: a folder or the file to start from does not exist.
        """
        folders = [packaged_dir()]
        if command.config_path is not None:
            folders.insert(0, launch_dir / command.config_path.expanduser())
        if command.config_dir is not None:
            folders.append(launch_dir / command.config_dir.expanduser())
        for option, given in (("--config-path", command.config_path), ("--config-dir", command.config_dir)):
            if given is not None and not (launch_dir / given.expanduser()).is_dir():
                raise ConfigError(f"{option} {given}: no such folder, looked for {launch_dir / given.expanduser()}")
        search = cls(tuple(folders), command.config_name or config_name)
        if search.find(search.primary) is None:
            raise ConfigError(f"--config-name {search.primary}: no such file, {did_you_mean(search.primary, search.primaries())}")
        return search

    def find(self, config_path: str) -> Path | None:
        """Returns the file of e.g. `model/deepfm`, or None."""
        candidates = (folder / f"{config_path}.yaml" for folder in self.folders)
        return next((file for file in candidates if file.is_file()), None)

    def groups(self, schema_groups: Container[str]) -> dict[str, list[str]]:
        """Returns the groups that this program can use with their choices, both sorted.

        Those are the groups of its schema, those in its defaults list, and those that a user's folder adds.
        """
        offered, packaged = self.offered(), packaged_dir()
        choices: dict[str, set[str]] = {}
        for folder in self.folders:
            for file in folder.glob("*/*.yaml"):
                group = file.parent.name
                if group not in _NOT_CHOICES and (group in schema_groups or group in offered or folder != packaged):
                    choices.setdefault(group, set()).add(file.stem)
        return {group: sorted(names) for group, names in sorted(choices.items())}

    def offered(self) -> dict[str, tuple[str, ...]]:
        """Returns the groups in the defaults list of the file to start from, and of the files it names, with their choices."""
        offered: dict[str, tuple[str, ...]] = {}
        seen: set[str] = set()
        ahead = [self.primary]
        while ahead:
            name = ahead.pop()
            file = self.find(name)
            if file is None or name in seen:
                continue
            seen.add(name)
            try:
                defaults = read_yaml(file).defaults
            except ConfigError:  # told by the check of files
                continue
            ahead += [entry.group for entry in defaults if not entry.is_group]
            offered |= {entry.group: entry.choices for entry in defaults if entry.is_group}
        return offered

    def primaries(self) -> list[str]:
        """Returns the names of the files to start from."""
        return sorted({file.stem for folder in self.folders for file in folder.glob("*.yaml")})


@dataclass(frozen=True)
class DefaultsEntry:
    """One entry of a defaults list: `optional override /group@package: choice`.

    Attributes:
        keywords: words before the group.
        group: name of the group, or of a file if there is no choice.
        is_group: whether a group and a choice stand there, or the plain name of a file.
        choices: names chosen; empty for `null` and for plain files.
        line: line in its file, from 1.
    """

    keywords: tuple[str, ...]
    group: str
    is_group: bool
    choices: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class YamlFile:
    """The content of one file.

    Attributes:
        file: its path.
        values: what it sets, without its defaults list; interpolations are not resolved.
        lines: dotted path -> line, from 1.
        defaults: its defaults list.
    """

    file: Path
    values: Mapping[typing.Any, object]
    lines: Mapping[str, int]
    defaults: tuple[DefaultsEntry, ...]

    def locate(self, path: str) -> str:
        """Returns `file:line` of a key in this file."""
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_yaml(file: Path) -> YamlFile:
    """Reads one YAML file.

    Raises:
        ConfigError: it cannot be read, is no valid YAML, repeats a key, or is no mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = OmegaConf.to_container(OmegaConf.create(text)) if root is not None else {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: no valid YAML: {error.problem}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}:1: expected keys and values, got {type(values).__name__}")
    lines = dict(_lines(root, ""))
    defaults = values.pop("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}:{lines.get('defaults', 1)}: expected a list under defaults, got {defaults!r}")
    entries = [_entry(entry, lines.get(f"defaults.{index}", 1)) for index, entry in enumerate(defaults)]
    return YamlFile(file, values, lines, tuple(entries))


def _lines(node: "yaml.Node | None", prefix: str) -> Iterator[tuple[str, int]]:
    """Yields the dotted path and the line of every key and list item."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _lines(value, path + ".")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{prefix}{index}", value.start_mark.line + 1
            yield from _lines(value, f"{prefix}{index}.")


def _entry(entry: object, line: int) -> DefaultsEntry:
    text, choice = next(iter(entry.items())) if isinstance(entry, dict) and entry else (entry, None)
    words = str(text).split() or [""]
    choices = choice if isinstance(choice, list) else [] if choice is None else [choice]
    return DefaultsEntry(
        tuple(words[:-1]), words[-1].partition("@")[0].lstrip("/"), isinstance(entry, dict), tuple(map(str, choices)), line
    )
