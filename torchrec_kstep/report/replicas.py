"""Charts of merge rounds between replicas."""

from collections.abc import Sequence

from torchrec_kstep.report.chart import NUM_COLOURS, Series, line_chart
from torchrec_kstep.report.run import Run

EVENT = "replicas"
_PHASE_BEGIN, _PHASE_END = "rows_", "_s"


def has_rounds(run: Run) -> bool:
    """Whether the run had several replicas that were merged."""
    return any(record["event"] == EVENT for record in run.events)


def round_charts(runs: Sequence[Run]) -> list[str]:
    """Returns what rounds sent, touched, took, and how far replicas had gone apart, as rank 0 saw it."""

    def curves(*values: tuple[str, str]) -> list[Series]:
        drawn = []
        for index, run in enumerate(runs):
            for place, (value, label) in enumerate(values):
                name = " ".join(part for part in (run.name if len(runs) > 1 else "", label) if part)
                drawn.append(Series(name, (index + place) % NUM_COLOURS, run.curve(EVENT, value)))
        return drawn

    phases = sorted({name for run in runs for record in run.events if record["event"] == EVENT for name in record if _is_phase(name)})
    per_step = (
        ("sent_bytes_per_step", "by this rank, at the collective"),
        ("interface_sent_bytes_per_step", "by its host, at the interface"),
    )
    return [
        line_chart("Sent to other replicas, bytes/step", curves(*per_step), from_zero=True),
        line_chart("Sent per round, bytes", curves(("rows_sent_bytes", "rows"), ("dense_sent_bytes", "dense")), from_zero=True),
        line_chart("Rows per round", curves(("own_rows", "touched here"), ("union_rows", "merged")), from_zero=True),
        line_chart("Drift of dense parameters, root mean square", curves(("dense_drift", "")), from_zero=True),
        line_chart("Drift of rows over their way since the last round", curves(("rows_drift", "")), from_zero=True),
        line_chart("Seconds per round", curves(("dense_s", "dense"), ("rows_s", "rows")), from_zero=True),
        line_chart("Seconds per round of rows, by phase", curves(*((name, _phase(name)) for name in phases)), from_zero=True),
        line_chart("Merged rows read from SSD per round", curves(("read_rows", "")), from_zero=True),
    ]


def _is_phase(name: str) -> bool:
    return name.startswith(_PHASE_BEGIN) and name.endswith(_PHASE_END) and name != "rows_s"


def _phase(name: str) -> str:
    return name.removeprefix(_PHASE_BEGIN).removesuffix(_PHASE_END).replace("_", " ")
