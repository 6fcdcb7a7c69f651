"""Draw speed.svg (how a FedAvg round grows with clients and with parameters) from what `make bench` wrote:

python docs/images/speed.py runs/bench.json docs/images/speed.svg
"""

import json
import sys
from pathlib import Path

from panels import GAP, Panel, picture

from coterie.report.svg import Line, lines

CURVES = (
    ("clients", "clients, logistic regression, 5 steps of 20 rows"),
    ("parameters", "parameters, 10 clients, 1 step of 20 rows"),
)
MEASURES = (("cpu_s", "processor seconds per round", 0), ("peak_mb", "peak memory of the whole process, MB", 1))


def main(source: Path, out: Path) -> None:
    found = json.loads(source.read_text())["curves"]
    panels: list[Panel] = []
    y = 0.0
    for field, label, colour in MEASURES:
        row: list[Panel] = []
        for key, title in CURVES:
            points = found[key]
            line = Line(label, [p[key] for p in points], [p[field] for p in points], label, colour)
            chart = lines("speed", title, [line], x=key, log=True, log_x=True)
            row.append(Panel(chart, row[-1].right + GAP if row else 0.0, y))
        panels += row
        y = max(one.bottom for one in row) + GAP
    out.write_text(picture("speed", "a FedAvg round by clients and by parameters", panels).file())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
