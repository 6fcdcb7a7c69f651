"""Draw fedsep.svg (Figure 2 of the FedSep paper) from what `coterie reproduce fedsep-figure2 --out DIR` left:

python docs/images/fedsep.py DIR OUT.svg

One row per partition. Left: test accuracy at the end against all megabytes moved, one point per size p. Right: test
accuracy of FedSep against rounds, one line per size p.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from panels import GAP, Panel, picture

from coterie.report.svg import Chart, Line, lines

METHODS = ("fedsep", "fedsep-redraw", "top-k", "top-k, dense down", "count-sketch", "uncompressed")
TITLES = {"iid": "i.i.d.", "classes": "two classes each", "ring": "two classes each, neighbours on a ring"}


def by_bytes(runs: list[dict], title: str) -> Chart:
    ends: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        ends[run["method"], run["size"]].append((run["bytes"][-1] / 1e6, run["accuracy"][-1]))
    drawn = []
    for number, name in enumerate(METHODS):
        sizes = sorted(size for method, size in ends if method == name)
        points = [tuple(mean(column) for column in zip(*ends[name, size], strict=True)) for size in sizes]
        if points:
            drawn.append(Line(name, *zip(*points, strict=True), name, number))
    return lines("bytes", f"{title}: accuracy by megabytes moved", drawn, x="MB", y="percent", log_x=True)


def by_round(runs: list[dict], title: str) -> Chart:
    chosen = sorted((run for run in runs if run["method"] == "fedsep" and run["seed"] == 0), key=lambda r: r["size"])
    drawn = [
        Line(f"p = {run['size']}", run["round"], run["accuracy"], f"p = {run['size']}", number % 6, number // 6)
        for number, run in enumerate(chosen)
    ]
    return lines("rounds", f"{title}: FedSep by rounds", drawn, y="percent")


def recorded(folder: Path) -> dict:
    """A run's accuracy and bytes moved by round; its folder is called data-partition-p-method-seed."""
    _, partition, size, *words, seed = folder.name.split("-")
    name = "-".join(words).replace("top-k-dense-down", "top-k, dense down")
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "partition": partition,
        "size": int(size),
        "method": name,
        "seed": int(seed),
        "round": [r["round"] for r in records],
        "bytes": [r["communication"]["bytes_up"] + r["communication"]["bytes_down"] for r in records],
        "accuracy": [r["test_accuracy"] for r in records],
    }


def main(source: Path, out: Path) -> None:
    runs = [recorded(path.parent) for path in sorted(source.glob("*/summary.json"))]
    panels: list[Panel] = []
    y = 0.0
    for partition, title in TITLES.items():
        here = [run for run in runs if run["partition"] == partition and run["method"] in METHODS]
        if here:
            left = Panel(by_bytes(here, title), 0.0, y)
            panels += [left, Panel(by_round(here, title), left.right + GAP, y)]
            y = max(panel.bottom for panel in panels[-2:]) + GAP
    out.write_text(picture("fedsep", "FedSep and other compressed methods", panels).file())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
