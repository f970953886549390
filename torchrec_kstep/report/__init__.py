"""One page about one or several runs, `report.html`: complete in itself, readable offline and years later.

`train` writes it at the end of a run; `python -m torchrec_kstep.report RUN [RUN...]` makes it anew or compares runs.
"""

from torchrec_kstep.report.facts import write_facts
from torchrec_kstep.report.page import render
from torchrec_kstep.report.run import Run, read_run
from torchrec_kstep.report.write import REPORT_NAME, write_report

__all__ = ["REPORT_NAME", "Run", "read_run", "render", "write_facts", "write_report"]
