"""From a configuration to an open data set."""

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.preparation import prepare, prepared_folder
from torchrec_kstep.data.prepared import PreparedSet
from torchrec_kstep.data.sources import SMALL_SOURCES


def ensure_prepared(config: DataConfig) -> None:
    """Prepares the small data sets on first use. Call it on one rank, and let the others wait before they open the set.

    Large sources are prepared on purpose, by `python -m torchrec_kstep.prepare`, so this does nothing for them. An existing
    set is checked against the raw files and the options where the files can be found (`data.source`).

    Raises:
        DataError: raw files are missing or malformed, or the set at `data.path` was made from other ones.
    """
    if config.name in SMALL_SOURCES:
        prepare(config)


def open_dataset(config: DataConfig) -> Dataset:
    """Opens a data set for reading; every rank opens it by itself.

    Raises:
        DataError: it was not prepared, or its files are damaged or changed.
        ConfigError: the configuration contradicts itself.
    """
    return PreparedSet(
        prepared_folder(config), limit=config.limit, shuffle_row_groups=config.shuffle_row_groups, prefetch_batches=config.prefetch_batches
    )
