"""Draw fedsep.svg (Figure 2 of the FedSep paper) from a stored result of `coterie reproduce fedsep-figure2`:

python docs/images/fedsep.py docs/results/fedsep-figure2-paper.json docs/images/fedsep.svg

One panel per partition: test accuracy at the end against p, the numbers that are sent each way, one line per method.
"""

import json
import re
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from panels import GAP, Panel, picture

from coterie.report.svg import Chart, Line, lines

METHODS = ("fedsep", "fedsep-redraw", "top-k", "count-sketch", "uncompressed")
PARTITIONS = {"i.i.d.": "i.i.d.", "two classes": "two classes per client"}
ROW = re.compile(r"p = (\d+), (.*)")


def by_size(rows: list[dict[str, Any]], column: int, title: str) -> Chart:
    """Means over the seeds; what p does not change is a level line."""
    values = {row["name"]: mean(row["cells"][column]["values"]) for row in rows}
    points = {(found[2], int(found[1])): value for name, value in values.items() if (found := ROW.fullmatch(name))}
    sizes = sorted({size for _, size in points})
    drawn = []
    for number, name in enumerate(METHODS):
        own = [size for size in sizes if (name, size) in points] or (sizes if name in values else [])
        if own:
            heights = [points.get((name, size), values.get(name)) for size in own]
            drawn.append(Line(name, own, heights, name, number))
    return lines("sizes", f"{title}: accuracy by p, the numbers sent", drawn, x="p", y="percent", log_x=True)


def main(source: Path, out: Path) -> None:
    result = json.loads(source.read_text(encoding="utf-8"))
    panels: list[Panel] = []
    for number, name in enumerate(column["name"] for column in result["columns"]):
        if name in PARTITIONS:
            left = panels[-1].right + GAP if panels else 0.0
            panels.append(Panel(by_size(result["rows"], number, PARTITIONS[name]), left, 0.0))
    out.write_text(picture("fedsep", "FedSep and other compressed methods", panels).file())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
