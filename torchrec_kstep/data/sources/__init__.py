"""Raw data sets: one small module for each format, all behind the interface of `base.Source`."""

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.sources.avazu import AvazuSource
from torchrec_kstep.data.sources.base import Source
from torchrec_kstep.data.sources.criteo import CriteoSource
from torchrec_kstep.data.sources.frappe import FrappeSource
from torchrec_kstep.data.sources.movielens_1m import MovieLens1MSource
from torchrec_kstep.data.sources.movielens_100k import MovieLens100KSource
from torchrec_kstep.errors import ConfigError

SMALL_SOURCES = ("movielens_100k", "movielens_1m", "frappe")
"""Sources that fit into memory and are prepared on first use."""

SOURCES = (*SMALL_SOURCES, "criteo", "avazu")
"""Every `data.name` that has raw files."""


def open_source(config: DataConfig) -> Source:
    """Finds the raw files of a data set.

    Raises:
        ConfigError: no source has this name.
        DataError: the files are not there.
    """
    match config.name:
        case "movielens_100k":
            return MovieLens100KSource(config)
        case "movielens_1m":
            return MovieLens1MSource(config)
        case "frappe":
            return FrappeSource(config)
        case "criteo":
            return CriteoSource(config)
        case "avazu":
            return AvazuSource(config)
    raise ConfigError(f"data.name={config.name} has no raw files to read: expected one of {', '.join(SOURCES)}")


__all__ = ["SMALL_SOURCES", "SOURCES", "Source", "open_source"]
