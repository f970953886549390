"""Criteo logs, Kaggle and Terabyte alike: tab-separated, a label, 13 whole numbers, 26 hexadecimal categories, no header."""

from collections.abc import Iterator

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import RawBlock
from torchrec_kstep.data.delimited import TextFormat, read_delimited
from torchrec_kstep.data.sources.base import find_files

NUM_DENSE = 13
NUM_SPARSE = 26
FORMAT = TextFormat(
    columns=(
        ("label", "label"),
        *((f"I{index}", "integer") for index in range(1, NUM_DENSE + 1)),
        *((f"C{index}", "hex") for index in range(1, NUM_SPARSE + 1)),
    ),
    delimiter="\t",
    has_header=False,
)


class CriteoSource:
    """The rows of one or several files (days), in the order of their names."""

    dense_names = FORMAT.names("integer")
    sparse_names = FORMAT.names("hex")
    bag_names: frozenset[str] = frozenset()

    def __init__(self, config: DataConfig) -> None:
        """Finds the files."""
        self.files = find_files(config.source, "criteo", "train.txt of the Kaggle set, or day_* files of the Terabyte set, plain or .gz")
        self._max_bad_lines = config.max_bad_lines

    def blocks(self, bad_lines: BadLines) -> Iterator[RawBlock]:
        """Streams the rows, see `Source.blocks`."""
        return read_delimited(self.files, FORMAT, bad_lines, self._max_bad_lines)
