"""The decision page of `coterie advise` and its text for the terminal, both from advice.json alone."""

from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from coterie.report.terminal import size_text

MARKS = {"helps": ("▲", "green"), "neutral": ("●", "dim"), "harms": ("▼", "red")}
WIDTH, ROW, MARGIN = 320, 26, 12

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--line:#d9dee5;--page:#fff;--card:#f6f8fa;--good:#1a7f4b;
--bad:#b3261e;--even:#6b7684;--blue:#2c64c4}
@media(prefers-color-scheme:dark){:root{--ink:#e8ecf1;--soft:#9aa6b5;--line:#333c48;--page:#12161c;--card:#1b2129;
--good:#4cc38a;--bad:#f2796f;--even:#97a3b1;--blue:#7aa7f0}}
*{box-sizing:border-box}body{margin:0 auto;padding:1.25rem;max-width:60rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.4rem 0}
.answer{background:var(--card);border-left:4px solid var(--blue);padding:.8rem 1rem;border-radius:.3rem;
font-size:1.1rem}
.soft{color:var(--soft)}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{padding:.35rem .6rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}th{font-weight:600;color:var(--soft)}
.top td{border-bottom:0;padding-bottom:0}.helps,.harms,.neutral{white-space:nowrap}
.helps{color:var(--good);font-weight:600}.harms{color:var(--bad);font-weight:600}.neutral{color:var(--even);font-weight:600}
svg{max-width:100%;height:auto}svg text{fill:var(--ink);font:12px system-ui,sans-serif}.axis{stroke:var(--line)}
.zero{stroke:var(--soft);stroke-dasharray:3 3}.bar-helps{stroke:var(--good);fill:var(--good)}
.bar-harms{stroke:var(--bad);fill:var(--bad)}.bar-neutral{stroke:var(--even);fill:var(--even)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.6rem;margin:.8rem 0}
dl div{background:var(--card);padding:.5rem .8rem;border-radius:.3rem}dt{color:var(--soft);font-size:.85rem}
dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
"""


def page(advice: dict[str, Any]) -> str:
    """A page that needs nothing else: light and dark, also on a phone."""
    about = advice["data"]
    sections = [
        _section("Who helps", _partners(advice), intervals(advice["partners"])),
        _section("Is it worth it?", *_worth(advice)),
        _section("What it costs", _cost(advice)),
        _section("How sure is this, and what would make it surer?", *_certainty(advice)),
        _section("How it was found out", *map(_p, method_text(advice))),
    ]
    if advice["contributions"]:
        sections.insert(1, _section("What each partner adds", *_contributions(advice)))
    if advice["notes"]:
        items = "".join(f"<li>{escape(note)}</li>" for note in advice["notes"])
        sections.append(_section("To know about the files", f"<ul>{items}</ul>"))
    subject = (
        f"{len(advice['partners'])} partners ({about['partner_rows']:,} rows), {about['target_rows']:,} rows of your "
        f"own, predicting {about['label']} by {about['model']}"
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>Advice: {escape(str(about['target']))}</title><style>{STYLE}</style></head><body>"
        f"<h1>With whom to train?</h1><p class='soft'>{escape(subject)}</p>"
        f"<p class='answer'>{escape(advice['headline'])}</p>{''.join(sections)}"
        "<p class='soft'>Everything here is also in advice.json.</p></body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>{''.join(parts)}"


def _p(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _cells(row: list[tuple[str, bool]], tag: str = "td") -> str:
    cells = (f"<{tag} class='n'>{text}</{tag}>" if number else f"<{tag}>{text}</{tag}>" for text, number in row)
    return f"<tr>{''.join(cells)}</tr>"


def _table(header: list[tuple[str, bool]], rows: list[list[tuple[str, bool]]]) -> str:
    return f"<div class='wide'><table>{_cells(header, 'th')}{''.join(map(_cells, rows))}</table></div>"


def _partners(advice: dict[str, Any]) -> str:
    """A row a partner, and below it why: so it can be read on a phone too."""
    header = [("partner", False), ("rows", True), ("verdict", False), ("learned weight", True)]
    rows = []
    for one in advice["partners"]:
        verdict = f"<span class='{one['verdict']}'>{MARKS[one['verdict']][0]} {one['verdict']}</span>"
        cells = [(f"{one['rows']:,}", True), (verdict, False), (weight_text(one["weight"]), True)]
        rows.append(_cells([(escape(one["name"]), False), *cells]).replace("<tr>", "<tr class='top'>"))
        rows.append(f"<tr><td class='soft' colspan='4'>{escape(one['reason'])}</td></tr>")
    return f"<div class='wide'><table>{_cells(header, 'th')}{''.join(rows)}</table></div>"


def weight_text(weight: dict[str, float]) -> str:
    """A weight with its spread over runs and resamples."""
    return f"{weight['value']:.2f} ({weight['low']:.2f}–{weight['high']:.2f})"


def intervals(partners: list[dict[str, Any]]) -> str:
    """The change of the error against training alone: a dot and its 95 % interval a partner."""
    low = min(0.0, *(one["gain"]["low"] for one in partners))
    high = max(0.0, *(one["gain"]["high"] for one in partners))
    left = 10 + 7 * min(24, max(len(one["name"]) for one in partners))
    scale = WIDTH / max(1e-12, high - low)

    def x(value: float) -> float:
        return left + MARGIN + (value - low) * scale

    height = ROW * len(partners) + 40
    parts = [
        f"<line class='zero' x1='{x(0):.1f}' x2='{x(0):.1f}' y1='4' y2='{height - 34}'/>",
        f"<text x='{x(0):.1f}' y='{height - 20}' text-anchor='middle'>as alone</text>",
        f"<text x='{left + MARGIN}' y='{height - 4}'>worse</text>",
        f"<text x='{left + MARGIN + WIDTH}' y='{height - 4}' text-anchor='end'>better</text>",
    ]
    for i, one in enumerate(partners):
        y = ROW * i + 18
        gain, name = one["gain"], one["name"] if len(one["name"]) <= 24 else f"…{one['name'][-23:]}"
        parts.append(
            f"<text x='0' y='{y + 4}'>{escape(name)}</text><g class='bar-{one['verdict']}'>"
            f"<title>{gain['value']:+.4f} [{gain['low']:+.4f}, {gain['high']:+.4f}]</title>"
            f"<line stroke-width='3' x1='{x(gain['low']):.1f}' x2='{x(gain['high']):.1f}' y1='{y}' y2='{y}'/>"
            f"<circle cx='{x(gain['value']):.1f}' cy='{y}' r='5'/></g>"
        )
    wide = left + WIDTH + 2 * MARGIN
    caption = "Error on your rows with each partner mixed in, against training alone; 95 % intervals."
    return (
        f"<svg role='img' aria-label='{caption}' viewBox='0 0 {wide} {height}' width='{wide}'>{''.join(parts)}</svg>"
        f"<p class='soft'>{caption}</p>"
    )


def _worth(advice: dict[str, Any]) -> list[str]:
    names = {"learned": "together, learned weights", "alone": "alone", "average": "together, plain averaging"}
    header = [("trained", False), ("error", True), ("accuracy", True), ("against it, learned weights gain", True)]
    rows = []
    for key, one in advice["strategies"].items():
        other = advice["comparison"].get(key)
        gain = "" if other is None else interval_text(other["gain"])
        right = "" if one["accuracy"] is None else f"{100 * one['accuracy']:.1f} %"
        rows.append([(names[key], False), (f"{one['error']:.4f}", True), (right, True), (gain, True)])
    return [_table(header, rows), *map(_p, worth_text(advice))]


def interval_text(gain: dict[str, float]) -> str:
    """A gain with its interval."""
    return f"{gain['value']:+.4f} [{gain['low']:+.4f}, {gain['high']:+.4f}]"


def worth_text(advice: dict[str, Any]) -> list[str]:
    """Learned weights against alone, in words."""
    one = advice["comparison"]["alone"]
    low, high = one["gain"]["low"], one["gain"]["high"]
    answer = {
        "yes": "Yes: training together with learned weights predicts your held-out rows better than training alone.",
        "no": "No: training together is not better than training alone.",
        "not shown": "Not shown: the difference may be chance.",
    }[advice["worth_it"]]
    detail = (
        f"The error is {abs(one['relative']):.0%} {'lower' if one['relative'] > 0 else 'higher'} than alone (95 % "
        f"interval of the gain {low:+.4f} to {high:+.4f}; one-sided p = {one['p_better']:.2g}; effect size "
        f"{one['effect_size']:+.2f} deviations of the difference by row)."
    )
    return [answer, detail]


def _cost(advice: dict[str, Any]) -> str:
    cost = advice["cost"]
    items = {
        "one training together": f"{cost['training']['rounds']} rounds, {size_text(cost['training']['bytes'])}",
        "the screening of partners": f"{cost['screening']['rounds']} rounds, {size_text(cost['screening']['bytes'])}",
        "trainings for this advice": f"{cost['trainings']}",
    }
    return f"<dl>{''.join(f'<div><dt>{k}</dt><dd>{v}</dd></div>' for k, v in items.items())}</dl>"


def certainty_text(advice: dict[str, Any]) -> list[str]:
    """How sure, and what would help, in words."""
    sure = advice["certainty"]
    rows, needed = sure["target_rows"], sure["rows_needed"]
    if advice["worth_it"] == "yes":
        first = f"With your {rows:,} rows the gain over training alone is beyond chance (5 % level)."
    elif needed is None:
        first = f"With your {rows:,} rows no gain over training alone is seen; more rows alone would not show one."
    else:
        first = (
            f"With your {rows:,} rows a gain as large as the one seen cannot be told from chance; about {needed:,} "
            "labelled rows of your own would show it in four cases of five, if it is real."
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
    header = [("rows of your own", True), ("term of your rows", True), ("term of the partners' rows", True)]
    rows = [
        [(f"{b['target_rows']:,}", True), (f"{b['validation_term']:.3f}", True), (f"{b['training_term']:.3f}", True)]
        for b in advice["certainty"]["bound"]
    ]
    return [*map(_p, certainty_text(advice)), _table(header, rows)]


def _contributions(advice: dict[str, Any]) -> list[str]:
    found = advice["contributions"]
    header = [("partner", False), (found["kind"], True), ("learned weight", True)]
    rows = [
        [(escape(one["name"]), False), (f"{one['contribution']:+.4f}", True), (f"{one['weight']['value']:.2f}", True)]
        for one in advice["partners"]
    ]
    return [_table(header, rows), *map(_p, contributions_text(advice))]


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
        f"partners, {plan['level']:.0%} level), the mixture does not look worse than training alone, and the change is "
        "not negligible. It harms if the mixture is worse than training alone beyond chance. Else it is neutral: not "
        "shown to be of use. So a partner can help without a yes to the second question, where your own rows are "
        "enough, or too few to tell.",
        f"Learned weights, training alone and plain averaging were compared on {plan['repeats']} random orders of your "
        f"rows, the weights also on {plan['bootstraps']} bootstrap resamples; intervals allow for shared rows.",
    ]


def show(console: Console, advice: dict[str, Any], folder: Path) -> None:
    """The same for the terminal."""
    table = Table(box=None, pad_edge=False)
    table.add_column("partner")
    table.add_column("rows", justify="right")
    table.add_column("verdict")
    table.add_column("gain over alone [95 %]", justify="right")
    table.add_column("weight", justify="right")
    if advice["contributions"]:
        table.add_column(advice["contributions"]["kind"], justify="right")
    for one in advice["partners"]:
        mark, style = MARKS[one["verdict"]]
        more = [f"{one['contribution']:+.4f}"] if advice["contributions"] else []
        table.add_row(
            plain(one["name"]),
            f"{one['rows']:,}",
            f"[{style}]{mark} {one['verdict']}[/{style}]",
            plain(interval_text(one["gain"])),
            weight_text(one["weight"]),
            *more,
        )
    console.print(f"\n[bold]{plain(advice['headline'])}[/bold]\n", soft_wrap=True)
    console.print(table)
    console.print()
    cost = advice["cost"]["training"]
    compared = ", ".join(
        f"{key} {one['error']:.4f}" + ("" if one["accuracy"] is None else f" ({100 * one['accuracy']:.1f} % right)")
        for key, one in advice["strategies"].items()
    )
    lines = [
        *worth_text(advice),
        f"Errors ({advice['measure']}): {compared}.",
        f"A training together takes {cost['rounds']} rounds and moves {size_text(cost['bytes'])}.",
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
