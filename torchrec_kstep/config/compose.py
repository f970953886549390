"""Runs Hydra: registers schemas, lists the files that an override list uses, composes them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import yaml  # type: ignore[import-untyped]  # OmegaConf's own YAML reader, without annotations
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from torchrec_kstep.config.check import writable_schema
from torchrec_kstep.config.search_path import SearchPath
from torchrec_kstep.errors import ConfigError

_VERSION_BASE = "1.3"


def register_schema(schema_cls: type, config_name: str) -> None:
    """Stores a dataclass as `schema/<config_name>`, which `conf/<config_name>.yaml` names first in its defaults list."""
    ConfigStore.instance().store(group="schema", name=config_name, node=writable_schema(schema_cls), package="_global_")


@dataclass(frozen=True)
class UsedFile:
    """A file that takes part in a composition: its name, and the dotted path below which its keys stand."""

    config_path: str
    package: str


@dataclass(frozen=True)
class Composer:
    """Hydra, opened on a search path."""

    search: SearchPath
    extra: tuple[str, ...]

    @classmethod
    @contextmanager
    def open(cls, search: SearchPath) -> "Iterator[Composer]":
        """Initialises Hydra for the duration of the context; what was initialised before comes back after it."""
        first, *others = search.folders
        extra = (
            (f"hydra.searchpath=[{','.join(json.dumps(f'file://{folder}', ensure_ascii=False) for folder in others)}]",) if others else ()
        )
        with initialize_config_dir(str(first), version_base=_VERSION_BASE):
            yield cls(search, extra)

    def used_files(self, group_overrides: Sequence[str]) -> list[UsedFile]:
        """Returns the files that a list of group choices uses, the later win.

        Raises:
            ConfigError: a defaults list cannot be resolved, or a file cannot be read.
        """
        loader: ConfigLoader = GlobalHydra.instance().config_loader()
        with _as_config_error():
            defaults = loader.compute_defaults_list(self.search.primary, [*self.extra, *group_overrides], RunMode.RUN).defaults
        return [UsedFile(str(item.config_path), str(item.package or "")) for item in defaults if item.config_path]

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Composes the configuration.

        Raises:
            ConfigError: Hydra refuses it.
        """
        with _as_config_error():
            return compose(self.search.primary, [*self.extra, *overrides])


@contextmanager
def _as_config_error() -> Iterator[None]:
    """Turns every error that Hydra lets out for a wrong file or override into a ConfigError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        hint = "; does a file lack its first line '# @package _global_'?" if "Could not override" in text and "@" in text else ""
        raise ConfigError(text + hint) from error
