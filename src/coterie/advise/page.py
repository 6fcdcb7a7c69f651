"""The decision page of `coterie advise` and its text for the terminal, both from advice.json alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from coterie.advise.sentences import (
    MEANINGS,
    curve_text,
    gain_text,
    interval_text,
    measure_of,
    measures_of,
    method_text,
    own_text,
    sure_text,
    value_text,
)
from coterie.errors import UsageError
from coterie.measures import Measure
from coterie.report.page import document, figure, headline_section, table, tiles
from coterie.report.results import ADVICE, read_advice
from coterie.report.svg import Chart, esc
from coterie.report.terminal import size_text
from coterie.storage import make_folder, write_atomically

VERSION = 3  # of advice.json
MARKS = {  # a mark, the terminal's colour, and the chart's classes
    "helps": ("▲", "green", "s0 f0"),
    "nothing": ("●", "dim", "axis soft"),
    "left out": ("–", "dim", "axis soft"),
    "differs": ("?", "yellow", "s2 f2"),
    "copy": ("=", "dim", "axis soft"),
}
WIDTH, ROW, MARGIN = 260, 26, 12


def write(folder: Path, out: Path | None = None) -> Path:
    """advice.html, made of the advice.json of a folder; where the page is.

    Args:
        folder: a result folder of `coterie advise`.
        out: the folder for the page; by default the same.
    """
    advice = read_advice(folder)
    if "version" in advice and advice["version"] != VERSION:
        raise UsageError(f"{folder / ADVICE} was written by another version of coterie; run `coterie advise` again.")
    try:
        text = page(advice)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(f"{folder / ADVICE} is damaged: {type(error).__name__}: {error}.") from None
    path = (out or folder) / "advice.html"
    make_folder(path.parent)
    write_atomically(path, text.encode())
    return path


def page(advice: dict[str, Any]) -> str:
    """A page that needs nothing else: light and dark, on a phone and on paper."""
    data, measure = advice["data"], measure_of(advice)
    partners = sorted(advice["partners"], key=lambda p: -float(p["gain"]["value"]))
    sections = [
        _section("What to do next", _p(advice["next"])),
        _section("Who helps", figure(intervals(partners, measure), []), _partners(partners, measure)),
        _section("Is it worth it?", _p(own_text(advice)), _shares(advice), _curve(advice, measure)),
        _section("What it costs", tiles(_cost(advice["cost"]))),
    ]
    if advice["notes"]:
        sections.append(_section("To know about the files", _list(advice["notes"])))
    details = [
        "<h3>What the verdicts mean</h3>",
        _list(f"{verdict}: {meaning}" for verdict, meaning in MEANINGS.items()),
        "<h3>All measures</h3>",
        _measures(advice),
        _list(f"{one.label}: {explained}" for one, explained in measures_of(advice)),
        "<h3>How it was found out</h3>",
        *map(_p, method_text(advice)),
    ]
    sections.append(f"<details><summary>Details</summary>{''.join(details)}</details>")
    subject = (
        f"{len(advice['partners'])} partners ({data['partner_rows']:,} rows), {data['target_rows']:,} rows of your "
        f"own, predicting {data['label']} from {data['columns']} inputs."
    )
    warnings = _list(f"Warning: {text}" for text in advice["warnings"]) if advice["warnings"] else ""
    end = _p("Everything on this page is also in advice.json.")
    main = f"{headline_section([advice['headline']], ())}{warnings}{_p(subject)}{''.join(sections)}{end}"
    return document(main, f"With whom to train? Advice for {Path(data['target']).name}")


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{esc(title)}</h2>{''.join(parts)}</section>"


def _p(text: str) -> str:
    return f"<p>{esc(text)}</p>"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{esc(item)}</li>' for item in items)}</ul>"


def _partners(partners: list[dict[str, Any]], measure: Measure) -> str:
    """One table, the largest gain first, and below it the reasons."""
    rows = (
        (
            p["name"],
            f"{MARKS[p['verdict']][0]}\N{NO-BREAK SPACE}{p['verdict']}",
            *figures(p, measure),
            f"{p['rows']:,}",
        )
        for p in partners
    )
    unit = ", points" if measure.share else ""
    gain = f"gain in {measure.label}{unit} [95\N{NO-BREAK SPACE}%]"
    head = ("partner", "verdict", gain, "probability", "share of the model", "rows")
    return table(head, rows, numbers=2) + _list(f"{p['name']}: {p['reason']}" for p in partners)


def figures(partner: dict[str, Any], measure: Measure) -> tuple[str, str, str]:
    """Gain, probability and share of a partner; empty where they mean nothing."""
    judged = partner["verdict"] in ("helps", "nothing")
    gain = interval_text(measure, partner["gain"]) if judged or partner["share"] else ""
    return gain, sure_text(partner["probability"]) if judged else "", share_text(partner["share"])


def share_text(share: float) -> str:
    """A share in per cent; empty for none."""
    return f"{100 * share:.0f} %" if share else ""


def intervals(partners: list[dict[str, Any]], measure: Measure) -> Chart:
    """The gain over training alone: one dot and its 95 % interval per partner, the best first."""
    partners = sorted(partners, key=lambda p: -float(p["gain"]["value"]))
    low = min(0.0, *(p["gain"]["low"] for p in partners))
    high = max(0.0, *(p["gain"]["high"] for p in partners))
    left = 10 + 7 * min(24, max(len(p["name"]) for p in partners))
    right = 84
    scale = WIDTH / max(1e-12, high - low)

    def x(value: float) -> float:
        return left + MARGIN + (value - low) * scale

    height = ROW * len(partners) + 40
    middle = min(max(x(0), left + MARGIN + 28), left + MARGIN + WIDTH - 28)  # so that the words are not cut
    parts = [
        f'<line class="axis" stroke-dasharray="3 3" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="4" y2="{height - 34}"/>',
        f'<text x="{middle:.1f}" y="{height - 20}" text-anchor="middle">as alone</text>',
        f'<text x="{left + MARGIN}" y="{height - 4}">{gain_text(measure, low)}</text>',
        f'<text x="{left + MARGIN + WIDTH}" y="{height - 4}" text-anchor="end">{gain_text(measure, high)}</text>',
    ]
    for i, partner in enumerate(partners):
        y = ROW * i + 18
        gain, name = partner["gain"], partner["name"]
        name = name if len(name) <= 24 else f"…{name[-23:]}"
        mark, _, classes = MARKS[partner["verdict"]]
        parts.append(
            f'<text x="0" y="{y + 4}">{esc(name)}</text><g class="{classes}">'
            f"<title>{interval_text(measure, gain)}</title>"
            f'<line stroke-width="3" x1="{x(gain["low"]):.1f}" x2="{x(gain["high"]):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{x(gain["value"]):.1f}" cy="{y}" r="5"/></g>'
            f'<text x="{left + WIDTH + 2 * MARGIN}" y="{y + 4}">{mark} {esc(partner["verdict"])}</text>'
        )
    title = f"Gain in {measure.label} on your rows with each partner beside you, against training alone; 95 % intervals"
    return Chart("gains", title, "".join(parts), height, width=left + WIDTH + 2 * MARGIN + right)


def _shares(advice: dict[str, Any]) -> str:
    """Whose models the delivered one consists of."""
    names = {"you": "your own models", "together": "your linear model with the partners' predictions as inputs"}
    shares = sorted(advice["delivered"]["shares"].items(), key=lambda one: -one[1])
    return table(("part of the delivered model", "share"), ((names.get(k, k), share_text(v)) for k, v in shares))


def _curve(advice: dict[str, Any], measure: Measure) -> str:
    """The gain to expect with more rows, as a band of one standard error."""
    points = advice["curve"]
    if not points:
        return ""
    band = [(p["gain"] - p["error"], p["gain"] + p["error"]) for p in points]
    low, high = min(0.0, *(b[0] for b in band)), max(0.0, *(b[1] for b in band))
    height, left = 120.0, 60.0
    step = WIDTH / max(1, len(points) - 1)

    def y(value: float) -> float:
        return 10.0 + (high - value) / max(1e-12, high - low) * (height - 20.0)

    upper = [f"{left + step * i:.1f},{y(b[1]):.1f}" for i, b in enumerate(band)]
    lower = [f"{left + step * i:.1f},{y(b[0]):.1f}" for i, b in enumerate(band)]
    parts = [
        f'<polygon class="f0" fill-opacity="0.25" points="{" ".join([*upper, *reversed(lower)])}"/>',
        f'<line class="axis" stroke-dasharray="3 3" x1="{left}" x2="{left + WIDTH}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>',
        f'<text x="0" y="{y(high) + 4:.1f}">{gain_text(measure, high)}</text>',
        f'<text x="0" y="{y(low) + 4:.1f}">{gain_text(measure, low)}</text>',
        *(
            f'<text x="{left + step * i:.1f}" y="{height + 14}" text-anchor="middle">{p["rows"]:,}</text>'
            for i, p in enumerate(points)
        ),
    ]
    title = f"Gain in {measure.label} to expect by rows of your own"
    chart = Chart("curve", title, "".join(parts), int(height) + 24, width=int(left) + WIDTH + 120)
    return figure(chart, []) + _p(curve_text(advice))


def _measures(advice: dict[str, Any]) -> str:
    """The delivered model and each of one's own in every measure."""
    by_name = {"delivered": advice["delivered"]["values"]}
    by_name |= {f"alone: {kind}": values for kind, values in advice["alone"]["values"].items()}
    shown = measures_of(advice)
    rows = ((name, *(value_text(one, values[one.name]) for one, _ in shown)) for name, values in by_name.items())
    return table(("model", *(one.label for one, _ in shown)), rows, wide=True)


def _cost(cost: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures and their meanings."""
    return [(f"{cost['exchanges']}", "message of each partner"), (size_text(cost["bytes"]), "moved in all")]


def show(console: Console, advice: dict[str, Any], folder: Path) -> None:
    """The same for the terminal."""
    measure = measure_of(advice)
    partners = Table(box=None, pad_edge=False)
    for column in ("partner", "rows", "verdict", "gain [95 %]", "probability", "share"):
        words = column in ("partner", "verdict")
        partners.add_column(column, justify="left" if words else "right", no_wrap=column != "partner", overflow="fold")
    for partner in advice["partners"]:
        mark, style, _ = MARKS[partner["verdict"]]
        partners.add_row(
            plain(partner["name"]),
            f"{partner['rows']:,}",
            f"[{style}]{mark} {partner['verdict']}[/{style}]",
            *map(plain, figures(partner, measure)),
        )
    console.print(f"\n[bold]{plain(advice['headline'])}[/bold]\n", soft_wrap=True)
    for warning in advice["warnings"]:
        console.print(f"[yellow]Warning: {plain(warning)}.[/yellow]", soft_wrap=True)
    console.print(partners)
    unit = " points of" if measure.share else ""
    console.print(
        plain(
            f"gain: with this partner alone beside you, in{unit} {measure.label}. probability: that the partner "
            "improves your model. share: of the delivered model.\n"
        ),
        style="dim",
        soft_wrap=True,
    )
    lines = [
        f"Next: {advice['next']}",
        own_text(advice),
        curve_text(advice),
        *(
            f"{p['name']}: {p['reason']}."
            for p in advice["partners"]
            if p["verdict"] in ("differs", "copy", "left out")
        ),
        *(f"Note: {note}." for note in advice["notes"]),
    ]
    for line in filter(None, lines):
        console.print(plain(line), soft_wrap=True)
    console.print(
        f"\nThe page is [bold]{plain(str(folder / 'advice.html'))}[/bold]; the model for `coterie predict` is in "
        f"[bold]{plain(str(folder / 'model'))}[/bold].",
        soft_wrap=True,
    )
