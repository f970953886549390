"""Writes configurations and schemas for people: YAML with comments, the text of --help, the reference table."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence

import yaml  # type: ignore[import-untyped]  # OmegaConf's own YAML writer, without annotations

from torchrec_kstep.config.keys import Key, SchemaKeys, field_comments, schema_keys

_LIKE_A_NUMBER = re.compile(r"[-+]?\.?[0-9]")
_WIDE = 10**6  # characters: values stay on one line


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no annotations
    """Quotes every text that begins like a number: OmegaConf reads more of them as numbers (`1e5`) than YAML itself does."""


def _text_node(dumper: _Dumper, text: str) -> yaml.Node:
    style = '"' if not text.isprintable() else "'" if _LIKE_A_NUMBER.match(text) else None  # other quotes fold odd line breaks
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def value_text(value: object) -> str:
    """Writes a value as it stands in YAML, on one line."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    text: str = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, width=_WIDE, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def yaml_text(config: object) -> str:
    """Writes a configuration dataclass as YAML, each key with its comment."""
    return "".join(f"{line}\n" for line in _yaml_lines(config, ""))


def _yaml_lines(config: object, indent: str) -> list[str]:
    assert dataclasses.is_dataclass(config), f"expected a dataclass, got {config!r}"
    comments = field_comments(type(config)) if not isinstance(config, type) else {}
    lines: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            lines += [f"{indent}{field.name}:", *_yaml_lines(value, indent + "  ")]
        else:
            comment = f"  # {comments[field.name]}" if field.name in comments else ""
            lines.append(f"{indent}{field.name}: {value_text(value)}{comment}")
    return lines


def default_text(key: Key) -> str:
    """Writes the default of a key; a long list of equal items as `[100000] * 26`."""
    value = key.default
    if isinstance(value, list) and len(value) > 4 and len({str(item) for item in value}) == 1:
        return f"[{value[0]}] * {len(value)}"
    return "none" if value is dataclasses.MISSING else '""' if value == "" else value_text(value)


_OPTIONS_TEXT = """\
options:
  -h, --help              this text
  --version               version of the package
  -c, --cfg job           print the resolved configuration and end
  -m, --multirun          run once for each combination of values, e.g. data.limit=100,1000
  -cp, --config-path DIR  folder searched for files before the packaged ones
  -cn, --config-name NAME file to start from (NAME.yaml)
  -cd, --config-dir DIR   folder searched for files after the packaged ones
"""


def help_text(schema_cls: type, config_name: str, groups: Mapping[str, Sequence[str]], chosen: Mapping[str, Sequence[str]]) -> str:
    """Writes the text of --help: options, groups with their choices, keys with default, meaning and unit.

    `groups` maps each group to its choices, `chosen` to its default.
    """
    keys = schema_keys(schema_cls)
    width = max(map(len, keys.leaves))
    lines = [
        f"usage: python -m torchrec_kstep.{config_name} [options] [group=choice ...] [key=value ...]",
        "",
        _OPTIONS_TEXT,
        "groups (a choice sets several keys at once; experiment=... sets keys of several groups):",
        *(
            f"  {group:{width}}  {' | '.join(choices)}  (default: {', '.join(chosen.get(group, ())) or 'none'})"
            for group, choices in groups.items()
        ),
    ]
    for group, members in grouped(keys).items():
        lines += ["", f"{group or 'top level'}: {group_summary(schema_cls, keys, group)}"]
        lines += [f"  {key.path:{width}}  {key.type_text:9}  {default_text(key):14}  {key.comment}" for key in members]
    return "\n".join(lines) + "\n"


def grouped(keys: SchemaKeys) -> dict[str, list[Key]]:
    """Returns the keys by group, "" for those at the top; groups inside groups stand apart."""
    by_group: dict[str, list[Key]] = {}
    for key in keys.leaves.values():
        by_group.setdefault(key.path.rpartition(".")[0], []).append(key)
    return by_group


def group_summary(schema_cls: type, keys: SchemaKeys, group: str) -> str:
    """Returns the first line of the docstring of a group's dataclass."""
    return (inspect.getdoc(keys.groups.get(group, schema_cls)) or "").partition("\n")[0]


def reference_table(schemas: Mapping[str, type]) -> str:
    """Writes every key of every schema as Markdown tables, one a group; `schemas` maps a command to its schema."""
    seen: dict[tuple[str, type], list[str]] = {}
    for command, schema_cls in schemas.items():
        keys = schema_keys(schema_cls)
        for group in grouped(keys):
            seen.setdefault((group, keys.groups.get(group, schema_cls)), []).append(command)
    lines: list[str] = []
    for (group, cls), commands in seen.items():
        keys = schema_keys(schemas[commands[0]])
        lines += [f"### {f'`{group}`' if group else f'Top level of `{commands[0]}`'}", "", group_summary(cls, keys, group), ""]
        lines += [f"Read by {' and '.join(f'`{command}`' for command in commands)}.", ""]
        lines += ["| key | type | default | meaning and unit |", "|---|---|---|---|"]
        lines += [
            f"| `{key.path}` | `{key.type_text}` | `{default_text(key)}` | {key.comment.replace('|', chr(92) + '|')} |"
            for key in grouped(keys)[group]
        ]
        lines.append("")
    return "\n".join(lines)
