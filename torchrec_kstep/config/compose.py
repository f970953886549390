"""Runs Hydra: registers schemas, lists the files that an override list uses, composes them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml  # type: ignore[import-untyped]  # OmegaConf's own YAML reader, without annotations
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from torchrec_kstep.config.check import writable_schema
from torchrec_kstep.config.search_path import SearchPath, UsedFile
from torchrec_kstep.errors import ConfigError

_VERSION_BASE = "1.3"


def register_schema(schema_cls: type, config_name: str) -> None:
    """Stores a dataclass as `schema/<config_name>`, which `conf/<config_name>.yaml` names first in its defaults list."""
    ConfigStore.instance().store(group="schema", name=config_name, node=writable_schema(schema_cls), package="_global_")


class _MoreFolders(SearchPathPlugin):
    """Adds folders to the search path of whatever is initialised while they are set; else adds none."""

    folders: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.append(provider="torchrec_kstep", path=f"file://{folder}")


@dataclass(frozen=True)
class Composer:
    """Hydra, opened on a search path."""

    search: SearchPath

    @classmethod
    @contextmanager
    def open(cls, search: SearchPath) -> "Iterator[Composer]":
        """Initialises Hydra for the duration of the context; what was initialised before comes back after it.

        Not thread-safe, as Hydra is not.
        """
        Plugins.instance().register(_MoreFolders)
        first, *_MoreFolders.folders = search.folders
        outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()  # it refuses to be initialised twice
        try:
            with initialize_config_dir(str(first), version_base=_VERSION_BASE):
                yield cls(search)
        finally:
            _MoreFolders.folders = ()
            GlobalHydra.instance().hydra = outer

    def used_files(self, group_overrides: Sequence[str]) -> list[UsedFile]:
        """Returns the files that a list of group choices uses, the later win.

        Raises:
            ConfigError: a defaults list cannot be resolved, or a file cannot be read.
        """
        loader: ConfigLoader = GlobalHydra.instance().config_loader()
        with _as_config_error():
            defaults = loader.compute_defaults_list(self.search.primary, list(group_overrides), RunMode.RUN).defaults
        return [UsedFile(str(item.config_path), str(item.package or "")) for item in defaults if item.config_path]

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Composes the configuration.

        Raises:
            ConfigError: Hydra refuses it.
        """
        with _as_config_error():
            return compose(self.search.primary, list(overrides))


@contextmanager
def _as_config_error() -> Iterator[None]:
    """Turns every error that Hydra lets out for a wrong file or override into a ConfigError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        hint = "; does a file lack its first line '# @package _global_'?" if "Could not override" in text and "@" in text else ""
        raise ConfigError(text + hint) from error
