"""Draw toy-cosine.svg (figures 1 and 2 of the primal–dual paper) from what benchmarks.toy_cosine wrote:

python docs/images/toy_cosine.py runs/toy/toy_cosine.json OUT.svg

F(w) − F* against outer iterations, mean over repeats, on a logarithmic axis; one column per number of inner steps.
"""

import json
import sys
from pathlib import Path

from panels import GAP, Panel, picture

from coterie.report.svg import Chart, Line, lines

METHODS = ("primal-dual", "exact-gd", "sustain", "rfho", "rfho, Z carried", "fednest", "afl")
LOWEST = 10.0**-3.5


def curve(line: dict, least: list[float]) -> Line:
    base = sum(least[: line["repeats"]]) / line["repeats"]
    values = [max(value - base, LOWEST) for value in line["objective"]]
    number = METHODS.index(line["method"])
    return Line(line["method"], line["round"], values, line["method"], number % 6, number // 6)


def panel(drawn: list[dict], least: list[float], title: str) -> Chart:
    return lines("toy", title, [curve(line, least) for line in drawn], log=True)


def main(source: Path, out: Path) -> None:
    found = json.loads(source.read_text())["lines"]
    finals = [line["final"] for line in found]
    least = [min(final[i] for final in finals if i < len(final)) for i in range(max(map(len, finals)))]
    panels: list[Panel] = []
    y = 0.0
    for noisy, title in ((False, "deterministic"), (True, "noisy")):
        row: list[Panel] = []
        for k in (1, 5, 10):
            chosen = [line for line in found if line["noisy"] == noisy and (line["K"] == k or line["method"] == "afl")]
            x = row[-1].right + GAP if row else 0.0
            row.append(Panel(panel(chosen, least, f"{title}, K = {k}"), x, y))
        panels += row
        y = max(one.bottom for one in row) + GAP
    title = "F(w) − F* against outer iterations, mean of 20 problems (fednest: of 5)"
    out.write_text(picture("toy-cosine", title, panels).file())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
