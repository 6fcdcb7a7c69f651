"""Draw toy-cosine.svg (Figures 1 and 2 of the primal–dual paper) from the stored results of both:

python docs/images/toy_cosine.py docs/results/primal-dual-figure{1,2}-paper.json docs/images/toy-cosine.svg

F(w) − F* against outer iterations, mean over the problems, on a logarithmic axis; one column per number of inner steps.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from panels import GAP, Panel, picture

from coterie.report.svg import Chart, Line, lines

LOWEST = 10.0**-3.5
KS = (1, 5, 10)
COLOURS = 6


def above_the_least(line: dict[str, Any], least: float, number: int) -> Line:
    """A stored line, less the mean of F* over the problems."""
    values = [max(value - least, LOWEST) for value in line["y"]]
    return Line(line["name"], line["x"], values, line["name"], number % COLOURS, number // COLOURS)


def panel(result: dict[str, Any], k: int, title: str) -> Chart:
    """All methods at K inner steps; one without inner steps is stored with K = 1."""
    names = [row["name"] for row in result["rows"]]
    found = {f["panel"].rpartition(" ")[2]: {line["name"]: line for line in f["lines"]} for f in result["curves"]}
    drawn = {**found["1"], **found[str(k)]}
    least = fmean(result["least"])
    ordered = [above_the_least(drawn[name], least, number) for number, name in enumerate(names)]
    return lines("toy", title, ordered, log=True)


def main(exact: Path, noisy: Path, out: Path) -> None:
    panels: list[Panel] = []
    y = 0.0
    for source, title in ((exact, "deterministic"), (noisy, "noisy")):
        result = json.loads(source.read_text(encoding="utf-8"))
        row: list[Panel] = []
        for k in KS:
            x = row[-1].right + GAP if row else 0.0
            row.append(Panel(panel(result, k, f"{title}, K = {k}"), x, y))
        panels += row
        y = max(one.bottom for one in row) + GAP
    title = f"F(w) − F* against outer iterations, mean of {len(result['seeds'])} problems"
    out.write_text(picture("toy-cosine", title, panels).file())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
