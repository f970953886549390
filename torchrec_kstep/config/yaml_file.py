"""What stands in a YAML file: values with their lines, and the defaults list."""

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # OmegaConf's own YAML reader, without annotations
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrec_kstep.errors import ConfigError

_GLOBAL = re.compile(r"\s*#\s*@package\s+_global_\s*")  # the line by which Hydra lets a file's keys start at the top


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
        is_global: whether its keys start at the top, and not below the name of its group.
    """

    file: Path
    values: Mapping[typing.Any, object]
    lines: Mapping[str, int]
    defaults: tuple[DefaultsEntry, ...]
    is_global: bool

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
    except (yaml.YAMLError, RecursionError) as error:  # a character that YAML forbids, or brackets without end
        raise ConfigError(f"{file}: no valid YAML: {str(error).splitlines()[0]}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}:1: expected keys and values, got {type(values).__name__}")
    lines = dict(_lines(root, ""))
    defaults = values.pop("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}:{lines.get('defaults', 1)}: expected a list under defaults, got {defaults!r}")
    entries = [_entry(entry, lines.get(f"defaults.{index}", 1)) for index, entry in enumerate(defaults)]
    return YamlFile(file, values, lines, tuple(entries), any(_GLOBAL.fullmatch(line) for line in text.splitlines()))


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
