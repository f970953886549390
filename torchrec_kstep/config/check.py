"""Checks overrides and YAML files against the schema, before Hydra composes anything.

Hydra by itself stops at the first fault, accepts any key behind `+`, and lets a misspelt `optional` and unknown names
below `hydra.` pass in silence. Here every fault of a command line and of the files it uses is collected.
"""

import typing
from collections.abc import Callable, Container, Mapping, Sequence

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrec_kstep.config.findings import Findings
from torchrec_kstep.config.keys import Key, SchemaKeys, schema_keys
from torchrec_kstep.config.suggest import did_you_mean, is_close, nearest
from torchrec_kstep.config.yaml_file import YamlFile

CHDIR = "hydra.job.chdir"  # the one key below `hydra.` that has a meaning here: another spelling of `chdir` on the command line
_KEYWORDS = ("optional", "override")  # words that may stand before a group in a defaults list
_HYDRA_INSTEAD = {
    "hydra.run.dir": "write run_dir=FOLDER",
    "hydra.sweep.dir": "write run_dir=FOLDER; each run of --multirun gets a folder inside",
    "hydra.searchpath": "use --config-dir FOLDER",
    "hydra.mode": "use --multirun",
    CHDIR: "write chdir: true in a file; a command without that key has no run directory to change into",
}
_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

Locate = Callable[[str], str]  # dotted path -> where a person finds it


def writable_schema(schema_cls: type) -> DictConfig:
    """Returns the defaults of a frozen dataclass as a typed configuration whose values may be set."""

    def unlock(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, None)
        for child in node.values():
            if isinstance(child, DictConfig):
                unlock(child)

    schema = OmegaConf.structured(schema_cls)
    assert isinstance(schema, DictConfig)
    unlock(schema)
    return schema


class Checker:
    """Takes assignments one by one; keeps those that fit the schema and a finding for each that does not.

    Attributes:
        accepted: the schema's defaults with every good assignment applied.
        group_overrides: overrides that choose a file of a group, those with faults left out.
        chosen: group -> its choices in `group_overrides`.
        overrides: all overrides without a fault, as Hydra must be given them.
        findings: faults so far.
    """

    def __init__(self, schema_cls: type, groups: Mapping[str, Sequence[str]], offered: Container[str], findings: Findings) -> None:
        """Starts from the defaults of `schema_cls`; `groups` maps each group to its choices, `offered` are those in the defaults list."""
        self.keys: SchemaKeys = schema_keys(schema_cls)
        self.groups = groups
        self._offered = offered
        self.findings = findings
        self.accepted = writable_schema(schema_cls)
        self.group_overrides: list[str] = []
        self.chosen: dict[str, list[str]] = {}
        self.overrides: list[str] = []
        self._pending: list[tuple[str, object, str]] = []

    # --- overrides ---

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Checks every override; `apply_overrides` brings their values in, after those of the files."""
        parser = OverridesParser.create()
        for text in overrides:
            try:
                override = parser.parse_override(self._without_alias(text))
            except HydraException as error:
                reason = str(error).splitlines()[0]
                key, equals, value = text.partition("=")
                advice = f"""if the value is right, quote it: '{key}="{value}"'""" if equals else "expected key=value or group=choice"
                self.findings.add(f"{text or repr(text)}: cannot be read ({reason}); {advice}")
            else:
                self._check_override(text, override)

    def _without_alias(self, text: str) -> str:
        key, equals, value = text.partition("=")
        return f"{key.replace(CHDIR, 'chdir')}{equals}{value}" if "chdir" in self.keys.leaves else text

    def apply_overrides(self) -> None:
        """Assigns the values of the overrides that were checked, in order."""
        for path, value, text in self._pending:
            self.assign(path, value, lambda _path, text=text: text)  # type: ignore[misc]

    def _check_override(self, text: str, override: Override) -> None:
        name = override.key_or_group
        is_group = name in self.groups and not isinstance(override.value(), dict)
        if name == "hydra" or name.startswith(("hydra.", "hydra/")):
            self._refuse_hydra(name.replace("/", "."), text)
        elif override.package is not None:
            self.findings.add(f"{text}: a package (@{override.package}) is not used here; write {name}=...", name)
        elif not is_group and not self.keys.knows(name):
            self._unknown(name, text)
        elif override.is_sweep_override():
            self.findings.add(f"{text}: several values need --multirun, one run each; a list is written {name}=[...]", name)
        elif is_group:
            self._check_choice(text, override)
        elif override.is_delete() and not self.keys.is_open(name):
            self.findings.add(f"{text}: {name} cannot be removed, every key has a value; leave it out for its default", name)
        elif override.is_add() and not self.keys.is_open(name):
            self.findings.add(f"{text}: '+' adds a new key, and {name} exists; write {text.lstrip('+')}", name)
        elif override.is_delete():
            self.overrides.append(text)
        else:
            self._pending.append((name, override.value(), text))
            # Hydra closes mappings too: a new name in one needs its '++', which users need not know.
            self.overrides.append(f"++{(override.input_line or text).lstrip('+')}")

    def _check_choice(self, text: str, override: Override) -> None:
        group, value = override.key_or_group, override.value()
        if override.is_delete():
            if group in self.keys.groups:
                self.findings.add(f"{text}: group {group} cannot be removed; choose one of {', '.join(self.groups[group])}", group)
            else:
                self._choose(text, group, [])
            return
        bare = text.lstrip("+")
        if override.is_force_add() or override.is_add() == (group in self._offered):
            right = (
                f"{group} is in the defaults list; write {bare}"
                if group in self._offered
                else f"no defaults list has {group}; write +{bare}"
            )
            self.findings.add(f"{text}: {right}", group)
            return
        choices = value if isinstance(value, list) else [value]
        unknown = [choice for choice in choices if choice not in self.groups[group]]
        for choice in unknown:
            self.findings.add(f"{text}: no {group} is named {choice!r}; {did_you_mean(str(choice), self.groups[group])}", group)
        if isinstance(value, list) and group in self.keys.groups:
            self.findings.add(f"{text}: one {group} at a time; several runs need --multirun and {group}={','.join(map(str, value))}", group)
        elif not unknown:
            self._choose(text, group, [str(choice) for choice in choices])

    def _choose(self, text: str, group: str, choices: list[str]) -> None:
        self.chosen[group] = choices
        self.group_overrides.append(text)
        self.overrides.append(text)

    # --- files ---

    def check_file(self, content: YamlFile, package: str) -> None:
        """Checks the defaults list and assigns the values of one file, whose keys stand below `package`."""
        for entry in content.defaults:
            where = f"{content.file}:{entry.line}"
            for word in entry.keywords:
                if word not in _KEYWORDS:
                    self.findings.add(
                        f"{where}: unknown word {word!r} before group {entry.group!r}; {did_you_mean(word, _KEYWORDS)}", entry.group
                    )
            if entry.choices and entry.group not in self.groups and not entry.group.startswith("hydra"):
                self.findings.add(f"{where}: no group is named {entry.group!r}; {did_you_mean(entry.group, self.groups)}", entry.group)
                continue
            known = self.groups.get(entry.group, ())
            for choice in entry.choices:
                if known and choice not in known and "${" not in choice and "optional" not in entry.keywords:
                    self.findings.add(f"{where}: no {entry.group} is named {choice!r}; {did_you_mean(choice, known)}", entry.group)
        if package not in ("", *self.keys.groups):
            self.findings.add(
                f"{content.file}:1: its keys would stand below {package!r}, which is no group; begin it with '# @package _global_'"
            )
            return
        prefix = f"{package}." if package else ""
        self.assign(package, dict(content.values), lambda path: content.locate(path.removeprefix(prefix)))

    # --- values ---

    def assign(self, path: str, value: object, locate: Locate) -> None:
        """Sets a key, or all keys of a group given as a mapping, where they fit."""
        is_hydra = path == "hydra" or path.startswith("hydra.")
        if isinstance(value, dict) and (path == "" or path in self.keys.groups or (is_hydra and value)):
            for name, inner in value.items():
                inner_path = f"{path}.{name}" if path else str(name)
                if "." in str(name):
                    self.findings.add(f"{locate(inner_path)}: a key of a file has no dots; write {name!r} as nested keys", inner_path)
                else:
                    self.assign(inner_path, inner, locate)
        elif is_hydra:
            self._refuse_hydra(path, locate(path))
        elif not self.keys.knows(path):
            self._unknown(path, locate(path))
        elif path in self.keys.groups:
            self.findings.add(f"{locate(path)}: {path} is a group of keys, got {value!r}; {self._members(path)}", path)
        else:
            self._assign_leaf(path, value, locate(path))

    def _assign_leaf(self, path: str, value: object, where: str) -> None:
        key = self.keys.leaves.get(path)
        is_interpolation = isinstance(value, str) and "${" in value
        if key is not None and key.type is bool and not isinstance(value, bool) and not is_interpolation:
            self.findings.add(_type_fault(key, value, where), path)  # OmegaConf would take any number for true
            return
        try:
            OmegaConf.update(self.accepted, path, value)
        except OmegaConfBaseException as error:
            self.findings.add(_type_fault(key, value, where) if key else f"{where}: {str(error).splitlines()[0]}", path)

    def _unknown(self, path: str, where: str) -> None:
        names = [*self.keys.names, *self.groups]
        match = nearest(path, names)
        text = f"{where}: unknown key {path!r}; {did_you_mean(path, names)}"
        if match is None or not is_close(path, match):
            text += f" ({self._members(path.rpartition('.')[0])})"
        self.findings.add(text, *([match] if match else []))

    def _members(self, group: str) -> str:
        prefix = f"{group}." if group in self.keys.groups else ""
        names = dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in self.keys.leaves if name.startswith(prefix))
        return f"keys of {group if prefix else 'the configuration'}: {', '.join(names)}"

    def _refuse_hydra(self, path: str, where: str) -> None:
        known = schema_keys(HydraConf)
        names = [f"hydra.{name}" for name in known.names]
        inner = path.removeprefix("hydra").removeprefix(".")
        if not inner or known.knows(inner):
            self.findings.add(f"{where}: {path} has no effect here; {_HYDRA_INSTEAD.get(path, f'only {CHDIR} is read')}", path)
        else:
            self.findings.add(f"{where}: unknown key {path!r}; {did_you_mean(path, names)} (below hydra. only {CHDIR} is read)", path)


def _type_fault(key: Key, value: object, where: str) -> str:
    item = typing.get_args(key.type)
    words = _TYPE_WORDS.get(typing.cast(type, key.type), key.type_text)
    if typing.get_origin(key.type) is list and item:
        words = f"a list in brackets, each item {_TYPE_WORDS.get(item[0], item[0])}"
    return f"{where}: {key.path} expects {words}, got {value!r}" + (f" ({key.comment})" if key.comment else "")
