"""Avazu click logs: comma-separated with a header. The hour column (YYMMDDHH) becomes hour of day and day of week; id is dropped."""

from collections.abc import Iterator

import numpy as np

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import Coded, RawBlock
from torchrec_kstep.data.delimited import TextFormat, read_delimited
from torchrec_kstep.data.sources.base import find_files

_HEX_NAMES = (
    *("site_id", "site_domain", "site_category"),
    *("app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
_NUMBER_NAMES = ("device_type", "device_conn_type", *(f"C{index}" for index in range(14, 22)))
FORMAT = TextFormat(
    columns=(
        ("id", "skipped"),
        ("click", "label"),
        ("hour", "hour"),
        ("C1", "category"),
        ("banner_pos", "category"),
        *((name, "hex") for name in _HEX_NAMES),
        *((name, "category") for name in _NUMBER_NAMES),
    ),
    delimiter=",",
    has_header=True,
)


class AvazuSource:
    """The rows of one or several files, in the order of their names."""

    dense_names: tuple[str, ...] = ()
    sparse_names = ("hour_of_day", "day_of_week", *FORMAT.names("category", "hex"))
    bag_names: frozenset[str] = frozenset()

    def __init__(self, config: DataConfig) -> None:
        """Finds the files."""
        self.files = find_files(config.source, "avazu", "the train file of the Kaggle set, plain or .gz")
        self._max_bad_lines = config.max_bad_lines

    def blocks(self, bad_lines: BadLines) -> Iterator[RawBlock]:
        """Streams the rows, see `Source.blocks`."""
        for block in read_delimited(self.files, FORMAT, bad_lines, self._max_bad_lines):
            hour, *others = block.sparse
            yield RawBlock(block.label, block.split, block.dense, [*_split_hour(hour), *others])


def _split_hour(hour: Coded) -> tuple[Coded, Coded]:
    """Turns a column of YYMMDDHH into hour of day (0..23) and day of week (0 = Monday .. 6)."""
    days = np.array([f"20{day // 10000:02d}-{day // 100 % 100:02d}-{day % 100:02d}" for day in (hour.values // 100).tolist()], "M8[D]")
    weekday = (days.astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
    return _recode(hour, hour.values % 100), _recode(hour, weekday)


def _recode(coded: Coded, new_values: np.ndarray) -> Coded:
    """Replaces the distinct values of a column by others, which need not be distinct."""
    values, place = np.unique(new_values, return_inverse=True)
    return Coded(np.append(place, -1).astype(np.int32)[coded.codes], values)
