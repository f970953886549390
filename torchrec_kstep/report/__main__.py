"""`python -m torchrec_kstep.report RUN [RUN...] [--output FILE]`: one page about one run, or a comparison of several."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrec_kstep.errors import DataError
from torchrec_kstep.report.write import REPORT_NAME, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and says where; returns 2 if a folder holds no run or the page cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m torchrec_kstep.report", description="Writes one HTML page about one or several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run directory, as `train` names it on its first line")
    parser.add_argument("--output", type=Path, help="file to write; default: report.html in the run directory, or here for several runs")
    args = parser.parse_args(argv)
    output = args.output or (args.runs[0] / REPORT_NAME if len(args.runs) == 1 else Path(REPORT_NAME))
    try:
        write_report(args.runs, output)
    except (DataError, OSError) as error:
        print(f"torchrec_kstep.report: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
