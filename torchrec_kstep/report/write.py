"""From run directories to a file."""

import os
from collections.abc import Sequence
from pathlib import Path

from torchrec_kstep.report.page import render
from torchrec_kstep.report.run import read_run

REPORT_NAME = "report.html"


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Writes the page about the runs in `folders`; a page that is there already is replaced as a whole.

    Raises:
        DataError: a folder holds no run.
    """
    page = render([read_run(folder) for folder in folders])
    partial = output.with_suffix(".tmp")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, output)
