"""The decision page of `coterie advise` and its text for the terminal, both from advice.json alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from coterie.errors import UsageError
from coterie.report.page import document, figure, headline_section, table, tiles
from coterie.report.results import ADVICE, read_advice
from coterie.report.svg import Chart, esc
from coterie.report.terminal import size_text
from coterie.storage import make_folder, write_atomically

MARKS = {"helps": ("▲", "green", "s0 f0"), "neutral": ("●", "dim", "axis soft"), "harms": ("▼", "red", "s1 f1")}
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
    try:
        text = page(advice)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UsageError(f"{folder / ADVICE} is damaged: {type(error).__name__}: {error}.") from None
    path = (out or folder) / "advice.html"
    make_folder(path.parent)
    write_atomically(path, text.encode())
    return path


def model_text(data: dict[str, Any]) -> str:
    """The model in words."""
    words = MODELS.get(data["model"])
    return str(data["model"]) if words is None else words[0 if data["classes"] else 1]


def page(advice: dict[str, Any]) -> str:
    """A page that needs nothing else: light and dark, also on a phone."""
    data = advice["data"]
    sections = [
        _section("Who helps", _partners(advice["partners"]), figure(intervals(advice["partners"]), [])),
        _section("Is it worth it?", *_worth(advice)),
        _section("What it costs", tiles(_cost(advice["cost"]))),
        _section("How sure is this, and what would make it surer?", *_certainty(advice)),
        _section("How it was found out", *map(_p, method_text(advice))),
    ]
    if advice["contributions"]:
        sections.insert(1, _section("What each partner adds", *_contributions(advice)))
    if advice["notes"]:
        sections.append(_section("To know about the files", _list(advice["notes"])))
    subject = (
        f"{len(advice['partners'])} partners ({data['partner_rows']:,} rows), {data['target_rows']:,} rows of your "
        f"own, predicting {data['label']} by {model_text(data)}."
    )
    end = _p("Everything on this page is also in advice.json.")
    main = f"{headline_section([advice['headline']], ())}{_p(subject)}{''.join(sections)}{end}"
    return document(main, f"With whom to train? Advice for {data['target']}")


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{esc(title)}</h2>{''.join(parts)}</section>"


def _p(text: str) -> str:
    return f"<p>{esc(text)}</p>"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{esc(item)}</li>' for item in items)}</ul>"


def _partners(partners: list[dict[str, Any]]) -> str:
    """The verdicts with gains and weights, and below them the reasons."""
    rows = (
        (
            p["name"],
            f"{MARKS[p['verdict']][0]}\N{NO-BREAK SPACE}{p['verdict']}",
            interval_text(p["gain"]),
            weight_text(p["weight"]),
            f"{p['rows']:,}",
        )
        for p in partners
    )
    head = ("partner", "verdict", "gain [95\N{NO-BREAK SPACE}%]", "learned weight", "rows")
    return table(head, rows, numbers=2) + _list(f"{p['name']}: {p['reason']}" for p in partners)


def weight_text(weight: dict[str, float]) -> str:
    """A weight with its spread over runs and resamples."""
    return f"{weight['value']:.2f} ({weight['low']:.2f}–{weight['high']:.2f})"


def intervals(partners: list[dict[str, Any]]) -> Chart:
    """The change of the error against training alone: one dot and its 95 % interval per partner."""
    low = min(0.0, *(p["gain"]["low"] for p in partners))
    high = max(0.0, *(p["gain"]["high"] for p in partners))
    left = 10 + 7 * min(24, max(len(p["name"]) for p in partners))
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
        parts.append(
            f'<text x="0" y="{y + 4}">{esc(name)}</text><g class="{MARKS[partner["verdict"]][2]}">'
            f"<title>{interval_text(gain)}</title>"
            f'<line stroke-width="3" x1="{x(gain["low"]):.1f}" x2="{x(gain["high"]):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{x(gain["value"]):.1f}" cy="{y}" r="5"/></g>'
        )
    title = "Error on your rows with each partner mixed in, against training alone; 95 % intervals"
    return Chart("gains", title, "".join(parts), height, width=left + WIDTH + 2 * MARGIN)


def _worth(advice: dict[str, Any]) -> list[str]:
    names = {"learned": "together, learned weights", "alone": "alone", "average": "together, plain averaging"}
    rows = []
    for key, strategy in advice["strategies"].items():
        compared = advice["comparison"].get(key)
        gain = "" if compared is None else interval_text(compared["gain"])
        right = "" if strategy["accuracy"] is None else f"{100 * strategy['accuracy']:.1f} %"
        rows.append([names[key], figure_text(strategy["error"]), *([right] if advice["data"]["classes"] else []), gain])
    accuracy = ["accuracy"] if advice["data"]["classes"] else []
    head = ("trained", "error", *accuracy, "gain of learned weights over it")
    return [table(head, rows, wide=True), *map(_p, worth_text(advice))]


def interval_text(gain: dict[str, float]) -> str:
    """A gain with its interval."""
    return f"{signed(gain['value'])} [{signed(gain['low'])}, {signed(gain['high'])}]"


def figure_text(value: float, sign: str = "") -> str:
    """An error: four decimals, or three digits where it is large.

    Example:
        >>> figure_text(0.03871), figure_text(29539307.0)
        ('0.0387', '2.95e+07')
    """
    return f"{value:{sign}{'.4f' if abs(value) < 100 else '.3g'}}"


def signed(gain: float) -> str:
    """A gain with its sign.

    Example:
        >>> signed(0.2), signed(-0.03871)
        ('+0.2000', '-0.0387')
    """
    return figure_text(gain, "+")


def worth_text(advice: dict[str, Any]) -> list[str]:
    """Learned weights against alone, in words."""
    one = advice["comparison"]["alone"]
    low, high = one["gain"]["low"], one["gain"]["high"]
    answer = {
        "yes": "Yes: training together with learned weights predicts your held-out rows better than training alone.",
        "no": "No: stay alone; training together gains too little to matter, or loses.",
        "not shown": "Undecided: the difference between training together and training alone may be chance.",
    }[advice["worth_it"]]
    change = f"{100 * abs(one['relative']):.0f} % {'lower' if one['relative'] > 0 else 'higher'}"
    detail = (
        f"The error is {change} than alone (95 % interval of the gain {signed(low)} to {signed(high)}; one-sided "
        f"p = {one['p_better']:.2g}; effect size {one['effect_size']:+.2f} deviations of the difference by row)."
    )
    return [answer, detail]


def _cost(cost: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures and their meanings."""
    moved = {key: f"{cost[key]['rounds']} rounds, {size_text(cost[key]['bytes'])}" for key in ("training", "screening")}
    return [
        (moved["training"], "one training together"),
        (moved["screening"], "the screening of partners"),
        (f"{cost['trainings']}", "trainings for this advice"),
    ]


def certainty_text(advice: dict[str, Any]) -> list[str]:
    """How sure, and what would help, in words."""
    sure = advice["certainty"]
    rows, needed = sure["target_rows"], sure["rows_needed"]
    if advice["worth_it"] == "yes":
        first = f"With your {rows:,} rows the gain over training alone is beyond chance (5 % level)."
    elif needed is None:
        first = f"On your {rows:,} rows training alone did at least as well; more rows are unlikely to change that."
    else:
        first = (
            f"With your {rows:,} rows the gain may be chance. If it is real, about {needed:,} labelled rows of your "
            "own would show it in four cases of five."
        )
    now = sure["bound"][0]
    larger = now["validation_term"] >= now["training_term"]
    second = (
        "The theory's bound (Theorem 1 of 'Adaptively weighted nodes', without its constants) has a term "
        f"for your rows, {now['validation_term']:.2f}, and one for the partners' rows, {now['training_term']:.2f}: "
        f"more rows {'of your own' if larger else 'at the partners'} would tighten it most."
    )
    return [first, second]


def _certainty(advice: dict[str, Any]) -> list[str]:
    head = ("rows of your own", "term of your rows", "term of the partners' rows")
    rows = (
        (f"{b['target_rows']:,}", f"{b['validation_term']:.3f}", f"{b['training_term']:.3f}")
        for b in advice["certainty"]["bound"]
    )
    return [*map(_p, certainty_text(advice)), table(head, rows, numbers=0)]


def _contributions(advice: dict[str, Any]) -> list[str]:
    rows = ((p["name"], f"{p['contribution']:+.4f}", f"{p['weight']['value']:.2f}") for p in advice["partners"])
    head = ("partner", advice["contributions"]["kind"], "learned weight")
    return [table(head, rows), *map(_p, contributions_text(advice))]


def contributions_text(advice: dict[str, Any]) -> list[str]:
    """What the numbers mean, what they cost, and whether the weights agree."""
    found = advice["contributions"]
    what = (
        "How much lower the error is with the partner than without it, all others present."
        if found["kind"] == "loo"
        else "How much the partner lowers the error, on average over the orders in which partners may join."
    )
    agreement = found["agreement_with_weights"]
    rank = "" if agreement is None else f" Their rank correlation with the learned weights is {agreement:+.2f}."
    cost = f"{found['trainings']} trainings (at most {found['most']}), {size_text(found['bytes'])} moved."
    return [f"{what} {cost}{rank}"]


def method_text(advice: dict[str, Any]) -> list[str]:
    """What the verdicts mean and how they were reached."""
    plan = advice["plan"]
    return [
        f"Your rows were split into {plan['folds']} parts; models were trained without one part and judged on it by "
        f"the {advice['measure']}: lower is better. For each partner, models were trained on your rows and its rows, "
        f"once with its labels and {plan['placebos']} times with its labels shuffled.",
        "A partner helps if its true labels do better than shuffled ones beyond chance (corrected for the number of "
        f"partners, {plan['level']:.0%} level), the mixture looks about as good as training alone or better, and the "
        "change is large enough to matter. It harms if the mixture is worse than training alone beyond chance. "
        "Otherwise it is neutral. A partner may help while the second question is undecided: your own rows may be "
        "enough already, or too few to tell.",
        f"Learned weights, training alone and plain averaging were compared on {plan['repeats']} random "
        f"order{'s' if plan['repeats'] > 1 else ''} of your rows, the weights also on {plan['bootstraps']} bootstrap "
        f"resample{'s' if plan['bootstraps'] != 1 else ''}; intervals allow for shared rows.",
    ]


def _right(accuracy: float | None) -> str:
    return "" if accuracy is None else f" ({100 * accuracy:.1f} % right)"


def show(console: Console, advice: dict[str, Any], folder: Path) -> None:
    """The same for the terminal."""
    partners = Table(box=None, pad_edge=False)
    kind = [advice["contributions"]["kind"]] if advice["contributions"] else []
    for column in ("partner", "rows", "verdict", "gain over alone [95 %]", "weight", *kind):
        words, gain = column in ("partner", "verdict"), column.startswith("gain")
        partners.add_column(column, justify="left" if words else "right", no_wrap=gain, overflow="fold")
    for partner in advice["partners"]:
        mark, style, _ = MARKS[partner["verdict"]]
        more = [f"{partner['contribution']:+.4f}"] if advice["contributions"] else []
        partners.add_row(
            plain(partner["name"]),
            f"{partner['rows']:,}",
            f"[{style}]{mark} {partner['verdict']}[/{style}]",
            plain(interval_text(partner["gain"])),
            weight_text(partner["weight"]) if not more else f"{partner['weight']['value']:.2f}",
            *more,
        )
    console.print(f"\n[bold]{plain(advice['headline'])}[/bold]\n", soft_wrap=True)
    console.print(partners)
    console.print()
    cost = advice["cost"]["training"]
    compared = ", ".join(
        f"{key} {figure_text(found['error'])}" + _right(found["accuracy"])
        for key, found in advice["strategies"].items()
    )
    lines = [
        *worth_text(advice),
        f"Errors ({advice['measure']}): {compared}.",
        f"One training together takes {cost['rounds']} rounds and moves {size_text(cost['bytes'])}.",
        *certainty_text(advice),
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
