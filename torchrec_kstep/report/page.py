"""The page: sections as HTML text. Pure functions of the runs; everything a run says is escaped."""

import html
from collections.abc import Iterable, Sequence

from torchrec_kstep.planner.forecast import comparison_rows
from torchrec_kstep.report.assets import SCRIPT, STYLE
from torchrec_kstep.report.chart import Series, line_chart, number, stacked_bar
from torchrec_kstep.report.replicas import has_rounds, round_charts
from torchrec_kstep.report.run import PHASES, Run
from torchrec_kstep.report.tiers import has_tiers, tier_charts
from torchrec_kstep.units import format_seconds

PHASE_NAMES = {
    "data_wait": "waiting for data",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
}


def render(runs: Sequence[Run]) -> str:
    """Returns the whole page, which loads nothing from anywhere."""
    title = _title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs compared"
    sections = [_results(runs), _curves(runs), _phases(runs)]
    sections += [_tiers(runs)] if any(map(has_tiers, runs)) else []
    sections += [_replicas(runs)] if any(map(has_rounds, runs)) else []
    sections += [_predictions(run, len(runs) > 1) for run in runs if run.comparison is not None]
    sections += [_differences(runs)] if len(runs) > 1 else []
    sections += [_details(run, is_open=len(runs) == 1) for run in runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body><main><h1>{_text(title)}</h1>\n"
        + "\n".join(sections)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _title(run: Run) -> str:
    config = run.config()
    model, data = config.get("model.name"), config.get("data.name")
    return f"{model} on {data}" if model and data else run.name


def _results(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        (run,) = runs
        tiles = "".join(f'<div class="tile"><span>{_text(name)}</span><b>{_text(value)}</b></div>' for name, value in _summary(run).items())
        started = next((begun for begun, _ in run.attempts()), "")
        return f'<p class="under">{_text(run.name)}{f", started {_text(started)}" if started else ""}</p><div class="tiles">{tiles}</div>'
    rows = [[_swatch(index) + _text(run.name), _text(_title(run)), *map(_text, _summary(run).values())] for index, run in enumerate(runs)]
    return _table(["run", "what", *_summary(runs[0])], rows)


def _summary(run: Run) -> dict[str, str]:
    """The numbers of a run that one looks at first, as text."""

    def digits(value: float | None, places: int = 4) -> str:
        return "-" if value is None else f"{value:.{places}f}"

    ranks = run.fact("ranks")
    return {
        "test AUC": digits(run.test.get("auc")),
        "test logloss": digits(run.test.get("logloss")),
        "normalized entropy": digits(run.test.get("normalized_entropy")),
        "calibration": digits(run.test.get("calibration"), 3),
        "best validation AUC": digits(run.best_validation_auc),
        "steps": str(run.num_steps),
        "rows/s": "-" if run.rows_per_s is None else number(run.rows_per_s),
        "time in the loop": format_seconds(sum(run.seconds_per_phase().values())),
        "hosts x ranks": f"{ranks.get('hosts', '?')} x {ranks.get('ranks per host', '?')}" if ranks else "-",
    }


def _curves(runs: Sequence[Run]) -> str:
    def curves(event: str, value: str) -> list[Series]:
        return [Series(run.name, index, run.curve(event, value)) for index, run in enumerate(runs)]

    charts = [
        line_chart("Training loss", curves("train", "loss")),
        line_chart("Validation AUC", curves("validation", "auc"), digits=5),
        line_chart("Validation logloss", curves("validation", "logloss"), digits=5),
        line_chart("Throughput, rows/s", curves("train", "rows_per_s"), from_zero=True),
    ]
    return f'<section><h2>Curves</h2><div class="charts">{"".join(charts)}</div></section>'


def _tiers(runs: Sequence[Run]) -> str:
    under = "Rank 0, between one log line and the next."
    return f'<section><h2>Tables on SSD</h2><p class="under">{under}</p><div class="charts">{"".join(tier_charts(runs))}</div></section>'


def _replicas(runs: Sequence[Run]) -> str:
    under = "Rank 0, means per round between one log line and the next."
    return f'<section><h2>Merge rounds</h2><p class="under">{under}</p><div class="charts">{"".join(round_charts(runs))}</div></section>'


def _phases(runs: Sequence[Run]) -> str:
    seconds = [{PHASE_NAMES[phase]: spent for phase, spent in run.seconds_per_phase().items()} for run in runs]
    longest = max(sum(parts.values()) for parts in seconds)
    bars = "".join(
        f"{f'<p>{_text(run.name)}</p>' if len(runs) > 1 else ''}{stacked_bar(parts, longest)}"
        for run, parts in zip(runs, seconds, strict=True)
    )
    rows = []
    for index, phase in enumerate(PHASES):
        cells = [_swatch(index) + PHASE_NAMES[phase]]
        for parts in seconds:
            total, spent = sum(parts.values()), parts[PHASE_NAMES[phase]]
            cells.append(f"{format_seconds(spent)} <small>{100 * spent / total if total else 0:.0f} %</small>")
        rows.append(cells)
    table = _table(["phase", *(_text(run.name) if len(runs) > 1 else "rank 0" for run in runs)], rows)
    return f"<section><h2>Time per phase</h2>{bars}{table}</section>"


def _predictions(run: Run, is_one_of_many: bool) -> str:
    """What the planner expected of a step beside what it took, and where it expected the time to go."""
    assert run.comparison is not None
    made, measured = run.comparison
    rows = [[_text(name), _text(predicted), _text(found)] for name, predicted, found in comparison_rows(made, measured)]
    phases = [
        [
            _text(phase.name),
            format_seconds(phase.seconds) + (" <small>beside the others</small>" if phase.is_hidden else ""),
            _text(phase.bottleneck),
        ]
        for phase in made.step.phases
        if phase.seconds > 0
    ]
    source = made.calibration or "not calibrated: coefficients of another machine"
    under = f"Rank 0, medians of {measured.num_steps:,} steps, waiting for data not counted; {source}."
    title = f"Prediction and reality{f': {run.name}' if is_one_of_many else ''}"
    return (
        f'<section><h2>{_text(title)}</h2><p class="under">{_text(under)}</p>'
        f"{_table(['', 'predicted', 'measured'], rows)}"
        f"{_folded('Predicted phases', _table(['phase', 'time', 'busiest'], phases), False)}</section>"
    )


def _differences(runs: Sequence[Run]) -> str:
    """Keys whose values are not the same in all runs."""
    configs = [run.config() for run in runs]
    keys = sorted({key for config in configs for key in config})
    differing = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    rows = [[f"<code>{_text(key)}</code>", *(_text(config.get(key, "-")) for config in configs)] for key in differing]
    body = _table(["key", *(_text(run.name) for run in runs)], rows) if rows else "<p>none</p>"
    return f"<section><h2>Differences in configuration</h2>{body}</section>"


def _details(run: Run, is_open: bool) -> str:
    if not run.facts:
        missing = "No run.json: configuration, plan, versions and hardware were not recorded."
        return f"<section><h2>{_text(run.name)}</h2><p>{missing}</p></section>"
    lacking = run.missing_facts()
    note = f"<p>run.json does not say (or not in the form of this release): {_text(', '.join(lacking))}.</p>" if lacking else ""
    attempts = run.attempts()
    restarts = [f"{started}, continued from step {from_step}" for started, from_step in attempts[1:]]
    about = {
        **({"started": attempts[0][0]} if attempts else {}),
        **({"restarted": "; ".join(restarts)} if restarts else {}),
        "ranks": ", ".join(f"{count} {name}" for name, count in run.fact("ranks").items()),
        **{f"data, {name}": f"{value:,}" if isinstance(value, int) else str(value) for name, value in run.fact("data").items()},
    }
    plan = f"<pre>{_text(run.fact('plan'))}</pre>"
    routes = run.fact("routes")
    routes = _folded("Routes", f"<pre>{_text(routes)}</pre>", is_open) if routes else ""
    surroundings = _pairs(about) + _pairs(run.fact("versions")) + _pairs(run.fact("hardware"))
    return (
        f"<section><h2>{'Details' if is_open else _text(run.name)}</h2>{note}"
        f"{_folded('Plan', plan, is_open)}{routes}{_folded('Run, versions and hardware', surroundings, is_open)}"
        f"{_folded('Configuration', _pairs(run.config(), 'code'), False)}</section>"
    )


def _folded(title: str, body: str, is_open: bool) -> str:
    return f"<details{' open' if is_open else ''}><summary>{_text(title)}</summary>{body}</details>"


def _pairs(pairs: dict[str, str], tag: str = "span") -> str:
    rows = "".join(f"<tr><th><{tag}>{_text(name)}</{tag}></th><td>{_text(str(value))}</td></tr>" for name, value in pairs.items())
    return f'<table class="pairs">{rows}</table>'


def _table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background:var(--series-{index % 6})"></i>'


def _text(value: str) -> str:
    return html.escape(value)
