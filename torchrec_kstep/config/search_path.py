"""Where YAML files are found, and which of them a command line leads to."""

import importlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrec_kstep.config.command import Command
from torchrec_kstep.config.suggest import did_you_mean
from torchrec_kstep.config.yaml_file import YamlFile, read_yaml
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
class UsedFile:
    """A file that takes part in a composition: its name, and the dotted path below which its keys stand."""

    config_path: str
    package: str


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
        entries = (entry for _, content in self._walk({}) if content is not None for entry in content.defaults)
        return {entry.group: entry.choices for entry in entries if entry.is_group and "override" not in entry.keywords}

    def reachable(self, chosen: Mapping[str, Sequence[str]]) -> list[UsedFile]:
        """Returns every file that the defaults lists lead to, where `chosen` replaces the choices of some groups.

        An approximation of what Hydra uses, for when a fault keeps Hydra from saying: it leaves out nothing that is used.
        """
        return [used for used, _ in self._walk(chosen)]

    def _walk(self, chosen: Mapping[str, Sequence[str]]) -> Iterator[tuple[UsedFile, YamlFile | None]]:
        """Yields each file once, the content None where it cannot be read."""
        seen: set[str] = set()
        ahead = [("", self.primary), *((group, f"{group}/{choice}") for group, choices in chosen.items() for choice in choices)]
        while ahead:
            group, name = ahead.pop(0)
            file = self.find(name)
            if file is None or name in seen:
                continue
            seen.add(name)
            try:
                content = read_yaml(file)
            except ConfigError:  # told by the check of the file
                yield UsedFile(name, group), None
                continue
            yield UsedFile(name, "" if content.is_global else group), content
            for entry in content.defaults:
                if not entry.is_group:
                    ahead.append((group, entry.group))
                ahead += [(entry.group, f"{entry.group}/{choice}") for choice in entry.choices if entry.group not in chosen]

    def primaries(self) -> list[str]:
        """Returns the names of the files to start from."""
        return sorted({file.stem for folder in self.folders for file in folder.glob("*.yaml")})
