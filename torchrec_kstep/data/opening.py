"""From a configuration to an open data set."""

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.manifest import MANIFEST_NAME
from torchrec_kstep.data.preparation import check_sources, prepare, prepared_folder
from torchrec_kstep.data.prepared import PreparedSet
from torchrec_kstep.data.sources import SMALL_SOURCES
from torchrec_kstep.data.synthetic import SyntheticStream
from torchrec_kstep.errors import DataError


def ensure_prepared(config: DataConfig) -> None:
    """Prepares the small data sets on first use. Call it on one rank, and let the others wait before they open the set.

    Large sources are prepared on purpose, by `python -m torchrec_kstep.prepare`; here they must be there already. Where
    `data.source` is given, an existing set is compared with the raw files and the options.

    Raises:
        DataError: raw files are missing or malformed, or the set at `data.path` was made from other ones.
    """
    if config.name == "synthetic":
        return
    folder = prepared_folder(config)
    is_made_before = (folder / MANIFEST_NAME).is_file()
    if config.name in SMALL_SOURCES:
        if config.source or not is_made_before or config.name == "movielens_100k":
            prepare(config)
    elif config.source and is_made_before:
        check_sources(config)


def open_dataset(config: DataConfig) -> Dataset:
    """Opens a data set for reading; every rank opens it by itself.

    Raises:
        DataError: it was not prepared, or its files are damaged or changed.
        ConfigError: the configuration contradicts itself.
    """
    if config.name == "synthetic":
        return SyntheticStream(config.synthetic, config.limit, config.prefetch_batches)
    folder = prepared_folder(config)
    data = PreparedSet(folder, config.limit, config.shuffle_row_groups, config.prefetch_batches)
    if data.manifest.name != config.name:
        raise DataError(f"{folder} holds the prepared set of {data.manifest.name}, but data.name={config.name}: choose another data.path")
    return data
