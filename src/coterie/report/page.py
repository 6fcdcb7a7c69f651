"""The report: one HTML file that opens offline, with its style, its script and its values inside."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie.measures import Measure
from coterie.report.charts import (
    AXES,
    Group,
    groups,
    headline,
    headline_measure,
    headline_of_several,
    measure_charts,
    spread_text,
    traffic_chart,
    weight_charts,
)
from coterie.report.results import Run, moved
from coterie.report.svg import CHART_STYLE, COLOUR_CLASSES, DARK_THEME, LIGHT_THEME, Chart, as_json, esc, size
from coterie.storage import make_folder, write_atomically

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
FIRST = 4  # measures that are shown at once; the others unfold
MOST_COLUMNS = 4  # measures of the stored models
MOST_EVENTS = 100
NARROW = 3  # columns of a table that fit a phone
MOST_DETAILS = 12  # runs that get charts of their own


def write(folder: Path, runs: Sequence[Run], complaints: Sequence[str] = (), more: str = "") -> Path:
    """report.html and plots/*.svg in a folder; where the page is."""
    page, charts = content(runs, complaints, more)
    make_folder(folder / "plots")
    for chart in charts:
        write_atomically(folder / "plots" / f"{chart.name}.svg", chart.file().encode())
    out = folder / "report.html"
    write_atomically(out, document(page, title(runs)).encode())
    return out


def document(main: str, name: str) -> str:
    """The whole page around its content."""
    assets = files("coterie.report") / "assets"
    dark = f":root:not([data-theme=light]){{{DARK_THEME}}}"
    themes = f":root{{{LIGHT_THEME}}}@media screen and (prefers-color-scheme:dark){{{dark}}}"
    themes += f"@media screen{{:root[data-theme=dark]{{{DARK_THEME}}}}}"
    style = themes + CHART_STYLE + COLOUR_CLASSES + (assets / "page.css").read_text(encoding="utf-8")
    script = (assets / "page.js").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{esc(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{esc(name)}</title>
<style>{style}</style>
</head>
<body>
<header><p class="brand">coterie</p><h1>{esc(name)}</h1>
<button type="button" id="theme" aria-label="light, dark or as the system has it">theme: system</button></header>
<main>{main}</main>
<div id="tip" role="status" aria-live="polite" hidden></div>
<script>{script}</script>
</body>
</html>
"""


def title(runs: Sequence[Run]) -> str:
    """What the page is about."""
    problems = ", ".join(dict.fromkeys(run.problem for run in runs))
    if len(runs) == 1:
        return f"{runs[0].method} on {problems}, seed {runs[0].seed}"
    return f"{len(runs)} runs on {problems}"


def content(runs: Sequence[Run], complaints: Sequence[str] = (), more: str = "") -> tuple[str, list[Chart]]:
    """What stands between header and end, and the charts in it."""
    found, single = groups(runs), len(runs) == 1
    answer = headline(runs[0], found) if single else headline_of_several(found)
    charts: list[Chart] = []
    parts = [headline_section(answer.sentences, answer.figures)]
    notes = [f"{run.folder.name}: {note}" for run in runs for note in run.notes]
    parts += [_warnings("Left out", complaints), _warnings("Note", notes), more]
    if single:
        parts += [_models_section(runs[0]), _weights_section(runs[0], charts, "weights")]
    parts += [_measures_section(found, charts), _runs_table(found)]
    parts.append(_cost_sections(runs[0], charts, "communication") if single else _details(found, charts))
    return "".join(parts), charts


def headline_section(sentences: Iterable[str], figures: Iterable[tuple[str, str]]) -> str:
    """The answer in a few sentences, and its figures."""
    return f'<section class="headline"><p>{esc(" ".join(sentences))}</p>{tiles(figures)}</section>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Figures, each with its meaning."""
    inside = "".join(f"<div><dt>{esc(meaning)}</dt><dd>{esc(value)}</dd></div>" for value, meaning in figures)
    return f'<dl class="tiles">{inside}</dl>'


def _warnings(word: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    return f'<section class="warn"><h2>{word}</h2><ul>{items}</ul></section>' if lines else ""


def figure(chart: Chart, charts: list[Chart], *, hidden: bool = False, axis: str = "") -> str:
    """A chart with its title, note and values."""
    charts.append(chart)
    values = f'<script type="application/json">{as_json(chart.values)}</script>' if chart.values else ""
    note = f"<p>{esc(chart.note)}</p>" if chart.note else ""
    state = (" hidden" if hidden else "") + (f' data-axis="{axis}"' if axis else "")
    caption = f"<figcaption>{esc(chart.title)}</figcaption>"
    return f'<figure id="{esc(chart.name)}"{state}>{caption}{chart.inline()}{note}{values}</figure>'


def _models_section(run: Run) -> str:
    """Which of the two stored models is which."""
    best = (run.summary or {}).get("best")
    if run.summary is None or not isinstance(best, dict):
        return ""
    stored = (
        ("model.safetensors", "last round", {"round": run.summary.get("rounds", ""), **run.summary["final"]}),
        ("model-best.safetensors", "lowest validation loss", best),
    )
    known = [m for m in run.measures if m.rows in ("validation", "test") and m.name in best]
    shown = [*(m for m in known if m.rows == "validation"), *(m for m in known if m.rows == "test")][:MOST_COLUMNS]
    rows = [(file, which, of.get("round", ""), *(_measure(of, m) for m in shown)) for file, which, of in stored]
    head = ("file", "which", "round", *(m.label for m in shown))
    note = _warnings("Note", [str(best["note"])]) if best.get("note") else ""
    return f"<section><h2>Stored models</h2>{table(head, rows, numbers=2)}</section>{note}"


def _measure(measures: Mapping[str, Any], measure: Measure) -> str:
    """A number of a summary, which may hold anything."""
    value = measures.get(measure.name)
    return measure.text(value) if isinstance(value, int | float) else "–"


def _weights_section(run: Run, charts: list[Chart], name: str) -> str:
    drawn = weight_charts(run, name)
    inside = "".join(figure(chart, charts) for chart in drawn)
    return f'<section><h2>Who helped</h2><div class="figures">{inside}</div></section>' if drawn else ""


def _measures_section(found: Sequence[Group], charts: list[Chart]) -> str:
    drawn = [
        "".join(figure(chart, charts, hidden=x != "round", axis=x) for x, chart in by_axis.items())
        for by_axis in measure_charts(found)
    ]
    buttons = "".join(
        f'<button type="button" data-show="{x}" aria-pressed="{"true" if x == "round" else "false"}">{words}</button>'
        for x, words in AXES.items()
    )
    switch = f'<p class="switch" role="group" aria-label="against what">against {buttons}</p>'
    band = any(len(group.runs) > 1 for group in found)
    note = "<p>Lines are means over seeds; bands go from the least to the most.</p>" if band else ""
    first, rest = "".join(drawn[:FIRST]), "".join(drawn[FIRST:])
    more = f'<details><summary>Further measures</summary><div class="figures">{rest}</div></details>' if rest else ""
    return f'<section><h2>How good it got</h2>{switch}{note}<div class="figures">{first}</div>{more}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 1, wide: bool = False) -> str:
    """An HTML table, which becomes one card per row on a phone where it would not fit.

    Args:
        head: the names of the columns.
        rows: one value per column.
        numbers: columns from this one on are figures.
        wide: whether it is too wide for a phone in spite of few columns.
    """
    cards = wide or len(head) > NARROW

    def cell(tag: str, i: int, value: object) -> str:
        name = f' data-name="{esc(head[i])}"' if cards and tag == "td" and i else ""
        return f"<{tag}{' class=n' if i >= numbers else ''}{name}>{esc(value)}</{tag}>"

    top = "".join(cell("th", i, h) for i, h in enumerate(head))
    body = "".join("<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    kind = ' class="cards"' if cards else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _runs_table(found: Sequence[Group]) -> str:
    measure = headline_measure(found)
    rows = []
    for group in found:
        values = group.finals(measure.name) if measure is not None else []
        outcomes = Counter(run.outcome for run in group.runs)
        rows.append(
            (
                group.name + (" (baseline)" if group.is_baseline else ""),
                ", ".join(outcomes) if len(outcomes) == 1 else ", ".join(f"{n} {o}" for o, n in outcomes.items()),
                spread_text(measure, values) if measure is not None and values else "–",
                len(group.runs),
                f"{statistics.fmean(run.final['round'] for run in group.runs):g}",
                f"{statistics.fmean(run.traffic()['rounds'] for run in group.runs):g}",
                size(statistics.fmean(moved(run.traffic()) for run in group.runs)),
            )
        )
    label = "measure" if measure is None else measure.label
    head = ("trained by", "outcome", label, "seeds", "rounds", "rounds of communication", "moved")
    return f"<section><h2>Side by side</h2>{table(head, rows, numbers=2)}</section>"


def _cost_sections(run: Run, charts: list[Chart], name: str) -> str:
    return _traffic_section(run, charts, name) + _seen_section(run) + _events_section(run) + _again_section(run)


def _seen_section(run: Run) -> str:
    """Who saw what of the clients, in one phase."""
    if not run.seen:
        return ""
    note = "The server also knows each client's number of rows, who took part, and what it made of all this: the model."
    head = ("who", "saw", "by", "numbers at a time", "of clients at once")
    rows = [(who, what, cause, numbers, clients) for who, what, cause, numbers, clients in run.seen]
    return f"<section><h2>Who saw what</h2><p>{esc(note)}</p>{table(head, rows, numbers=3)}</section>"


def _traffic_section(run: Run, charts: list[Chart], name: str) -> str:
    chart = traffic_chart(run, name)
    total = run.traffic()
    up, down = size(total["bytes_up"]), size(total["bytes_down"])
    words = f"{up} up, {down} down, {total['rounds']} rounds of communication."
    inside = "" if chart is None else f'<div class="figures">{figure(chart, charts)}</div>'
    return f"<section><h2>What it cost</h2><p>{esc(words)}</p>{inside}</section>"


def _events_section(run: Run) -> str:
    """How often what happened to whom, and the latest of it."""
    events = run.events
    if not events:
        return "<section><h2>Events</h2><p>No client failed, nothing was rejected or skipped.</p></section>"
    alike: dict[tuple[str, str], list[Any]] = {}
    for e in events:
        alike.setdefault((str(e.get("event", "?")), str(e.get("reason", ""))), []).append(e.get("client"))
    rows = [
        (event, reason, len(clients), len({k for k in clients if isinstance(k, int)}) or "")
        for (event, reason), clients in sorted(alike.items(), key=lambda item: -len(item[1]))[:MOST_EVENTS]
    ]
    latest = [
        (e.get("round", ""), _who(run, e.get("client", "")), e.get("event", ""), e.get("reason", ""))
        for e in events[-MOST_EVENTS:]
    ]
    summary = f"<details><summary>The last {len(latest)} of {len(events)}</summary>"
    summary += table(("round", "client", "event", "reason"), latest, numbers=9) + "</details>"
    return (
        f"<section><h2>Events</h2>{table(('event', 'reason', 'times', 'clients'), rows, numbers=2)}{summary}</section>"
    )


def _who(run: Run, client: object) -> object:
    """A client of an event by its name, where it has one."""
    return run.client(client) if run.names and isinstance(client, int) else client


def _again_section(run: Run) -> str:
    command = f"coterie run {run.folder.name}/config.toml --out {run.folder.name}-again"
    return (
        "<section><h2>Run it again</h2>"
        "<p>The whole configuration is in config.toml; the same seed gives the same result.</p>"
        f'<pre class="copy" tabindex="0">{esc(command)}</pre>'
        f'<details><summary>Configuration</summary><pre tabindex="0">{esc(run.toml)}</pre></details></section>'
    )


def _details(found: Sequence[Group], charts: list[Chart]) -> str:
    """The first run of each group, folded."""
    parts = []
    for i, group in enumerate([g for g in found if not g.is_baseline][:MOST_DETAILS]):
        run = group.runs[0]
        inside = _weights_section(run, charts, f"weights-{i}") + _cost_sections(run, charts, f"communication-{i}")
        which = f", seed {run.seed}" + (f" (of {len(group.runs)} runs)" if len(group.runs) > 1 else "")
        parts.append(f"<details class=run><summary>{esc(group.name + which)}</summary>{inside}</details>")
    return f"<section><h2>Run by run</h2>{''.join(parts)}</section>"
