"""The decision page of `coterie advise` and its text for the terminal, both from advice.json alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from coterie.advise.sentences import (
    MEANINGS,
    STRATEGIES,
    WITH_TREES,
    bound_text,
    certainty_text,
    choice_text,
    contributions_text,
    interval_text,
    measure_of,
    measures_of,
    method_text,
    next_text,
    sure_text,
    trees_text,
    value_text,
)
from coterie.errors import UsageError
from coterie.measures import Measure
from coterie.report.page import document, figure, headline_section, table, tiles
from coterie.report.results import ADVICE, read_advice
from coterie.report.svg import Chart, esc
from coterie.report.terminal import size_text
from coterie.storage import make_folder, write_atomically

VERSION = 2  # of advice.json
MARKS = {  # a mark, the terminal's colour, and the chart's classes
    "helps": ("▲", "green", "s0 f0"),
    "may help": ("△", "green", "s2 f2"),
    "no use": ("●", "dim", "axis soft"),
    "harms": ("▼", "red", "s1 f1"),
    "cannot tell": ("?", "dim", "axis soft"),
}
WIDTH, ROW, MARGIN = 260, 26, 12
MODELS = {  # what people call the models, for a class and for a number
    "logistic": ("logistic regression", "linear regression"),
    "mlp": ("a neural network (mlp)",) * 2,
    "cnn": ("a convolutional network (cnn)",) * 2,
}


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


def model_text(data: dict[str, Any]) -> str:
    """The model in words."""
    if data["kind"] == "survival" and data["model"] == "logistic":
        return "proportional hazards"
    words = MODELS.get(data["model"])
    return str(data["model"]) if words is None else words[0 if data["classes"] else 1]


def page(advice: dict[str, Any]) -> str:
    """A page that needs nothing else: light and dark, on a phone and on paper."""
    data, measure = advice["data"], measure_of(advice)
    sections = [
        _section(
            "Who helps", figure(intervals(advice["partners"], measure), []), _partners(advice["partners"], measure)
        ),
        _section("Is it worth it?", *_worth(advice)),
        _section("What to do next", _list(next_text(advice))),
        _section("What it costs", tiles(_cost(advice["cost"]))),
        _section("How sure is this?", *map(_p, certainty_text(advice))),
    ]
    if advice["contributions"]:
        sections.insert(1, _section("What each partner adds", *_contributions(advice)))
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
        "<h3>What theory says</h3>",
        _p(bound_text(advice)),
        _bound(advice),
    ]
    sections.append(f"<details><summary>Details</summary>{''.join(details)}</details>")
    subject = (
        f"{len(advice['partners'])} partners ({data['partner_rows']:,} rows), {data['target_rows']:,} rows of your "
        f"own, predicting {data['label']} by {model_text(data)}."
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
    """The verdicts with probabilities, gains, agreement and weights, and below them the reasons."""
    rows = (
        (
            p["name"],
            f"{MARKS[p['verdict']][0]}\N{NO-BREAK SPACE}{p['verdict']}",
            sure_text(p["probability"]),
            interval_text(measure, p["gain"]),
            f"{p['agreement']['value']:.2f}",
            weight_text(p["weight"]),
            f"{p['rows']:,}",
        )
        for p in partners
    )
    unit = ", points" if measure.share else ""
    gain = f"gain in {measure.label}{unit} [95\N{NO-BREAK SPACE}%]"
    head = ("partner", "verdict", "helps with probability", gain, "agreement", "learned weight", "rows")
    return table(head, rows, numbers=2) + _list(f"{p['name']}: {p['reason']}" for p in partners)


def weight_text(weight: dict[str, float]) -> str:
    """A weight with its spread over runs and resamples."""
    return f"{weight['value']:.2f} ({weight['low']:.2f}–{weight['high']:.2f})"


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
        f'<text x="{left + MARGIN}" y="{height - 4}">worse</text>',
        f'<text x="{left + MARGIN + WIDTH}" y="{height - 4}" text-anchor="end">better</text>',
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


def _worth(advice: dict[str, Any]) -> list[str]:
    measure = measure_of(advice)
    rows = [
        (
            STRATEGIES[key],
            value_text(measure, strategy["values"][measure.name]),
            "" if key == "alone" else interval_text(measure, strategy["gain"]),
            "" if key == "alone" else sure_text(strategy["probability"]),
        )
        for key, strategy in advice["strategies"].items()
    ]
    if advice["trees"] is not None:
        rows.append((WITH_TREES, value_text(measure, advice["trees"]["values"][measure.name]), "", ""))
    head = ("trained", measure.label, "gain over alone [95\N{NO-BREAK SPACE}%]", "better with probability")
    return [*map(_p, choice_text(advice)), table(head, rows), *map(_p, trees_text(advice))]


def _measures(advice: dict[str, Any]) -> str:
    """Every strategy in every measure: strategies are columns, so that it fits a phone."""
    by_name = {STRATEGIES[key]: found["values"] for key, found in advice["strategies"].items()}
    if advice["trees"] is not None:
        by_name[WITH_TREES] = advice["trees"]["values"]
    shown = measures_of(advice)
    rows = ((name, *(value_text(one, values[one.name]) for one, _ in shown)) for name, values in by_name.items())
    return table(("trained", *(one.label for one, _ in shown)), rows, wide=True)


def _cost(cost: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures and their meanings."""
    moved = {key: f"{cost[key]['rounds']} rounds, {size_text(cost[key]['bytes'])}" for key in ("training", "screening")}
    return [
        (moved["training"], "one training together, weights learned"),
        (moved["screening"], "comparing partners and strategies"),
        (f"{cost['trainings']}", "trainings that learned weights"),
    ]


def _bound(advice: dict[str, Any]) -> str:
    head = ("rows of your own", "term of your rows", "term of the partners' rows")
    rows = (
        (f"{b['target_rows']:,}", f"{b['validation_term']:.3f}", f"{b['training_term']:.3f}")
        for b in advice["certainty"]["bound"]
    )
    return table(head, rows, numbers=0)


def _contributions(advice: dict[str, Any]) -> list[str]:
    rows = ((p["name"], f"{p['contribution']:+.4f}", f"{p['weight']['value']:.2f}") for p in advice["partners"])
    head = ("partner", advice["contributions"]["kind"], "learned weight")
    return [table(head, rows), *map(_p, contributions_text(advice))]


def show(console: Console, advice: dict[str, Any], folder: Path) -> None:
    """The same for the terminal."""
    measure = measure_of(advice)
    partners = Table(box=None, pad_edge=False)
    kind = [advice["contributions"]["kind"]] if advice["contributions"] else []
    for column in ("partner", "rows", "verdict", "helps", "gain [95 %]", "weight", *kind):
        words, whole = column in ("partner", "verdict"), column != "partner"
        partners.add_column(column, justify="left" if words else "right", no_wrap=whole, overflow="fold")
    for partner in advice["partners"]:
        mark, style, _ = MARKS[partner["verdict"]]
        partners.add_row(
            plain(partner["name"]),
            f"{partner['rows']:,}",
            f"[{style}]{mark} {partner['verdict']}[/{style}]",
            sure_text(partner["probability"]),
            plain(interval_text(measure, partner["gain"])),
            f"{partner['weight']['value']:.2f}",
            *([f"{partner['contribution']:+.4f}"] if kind else []),
        )
    console.print(f"\n[bold]{plain(advice['headline'])}[/bold]\n", soft_wrap=True)
    for warning in advice["warnings"]:
        console.print(f"[yellow]Warning: {plain(warning)}.[/yellow]", soft_wrap=True)
    console.print(partners)
    unit = " points" if measure.share else ""
    lead = "helps: with this probability. gain: of training with this partner over training alone, in"
    console.print(
        plain(f"{lead}{unit} {measure.label}.\n".replace("in points", "in points of")), style="dim", soft_wrap=True
    )
    cost = advice["cost"]["training"]
    compared = ", ".join(
        f"{STRATEGIES[key]} {value_text(measure, found['values'][measure.name])}"
        for key, found in advice["strategies"].items()
    )
    lines = [
        f"{measure.label} on rows that no model has seen: {compared}.",
        *choice_text(advice),
        *trees_text(advice),
        *certainty_text(advice),
        f"One training together takes {cost['rounds']} rounds and moves {size_text(cost['bytes'])}.",
        *(contributions_text(advice) if advice["contributions"] else []),
        *(f"Note: {note}." for note in advice["notes"]),
    ]
    for line in lines:
        console.print(plain(line), soft_wrap=True)
    console.print(
        f"\nThe page is [bold]{plain(str(folder / 'advice.html'))}[/bold]; the model for `coterie predict` is in "
        f"[bold]{plain(str(folder / 'model'))}[/bold].",
        soft_wrap=True,
    )
