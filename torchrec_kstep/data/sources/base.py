"""What a source of raw rows is, and how its files are found."""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import RawBlock
from torchrec_kstep.errors import DataError


class Source(Protocol):
    """Raw rows in one of the known formats.

    Attributes:
        files: the raw files, in the order in which their rows come.
        dense_names: numeric columns.
        sparse_names: categorical columns.
        bag_names: those of `sparse_names` whose rows hold a bag of values.
    """

    files: list[Path]

    @property
    def dense_names(self) -> tuple[str, ...]: ...  # noqa: D102 - see the class
    @property
    def sparse_names(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def bag_names(self) -> frozenset[str]: ...  # noqa: D102

    def blocks(self, bad_lines: BadLines) -> Iterator[RawBlock]:
        """Reads all rows, in order, in blocks of bounded size; the same blocks each time.

        Args:
            bad_lines: is told of every malformed line, and refuses when there are too many.

        Raises:
            DataError: a line is malformed; names file and line.
        """
        ...


def find_files(source: str, data: str, what: str) -> list[Path]:
    """Finds raw files: a file, a glob, or all files of a folder, in the order of their names.

    Args:
        source: the value of `data.source`.
        data: name of the data set, for the message.
        what: what is expected there, for the message.

    Raises:
        DataError: nothing is there.
    """
    if not source:
        raise DataError(f"data={data} needs data.source: {what}")
    path = Path(source)
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(name) for name in glob.glob(source) if Path(name).is_file())
    if not files:
        raise DataError(f"data.source={source} is neither a file, nor a folder with files, nor a glob that matches one; expected {what}")
    return files


def name_files(files: Sequence[Path]) -> str:
    """Names raw files for a message: the only one, or their number and their folder."""
    return str(files[0]) if len(files) == 1 else f"{len(files)} files in {files[0].parent}"
