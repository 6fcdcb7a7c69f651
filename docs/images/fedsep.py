"""Draw fedsep.svg (Figure 2 of the FedSep paper) from what `coterie reproduce fedsep-figure2[-classes] --out DIR` left:

python docs/images/fedsep.py DIR OUT.svg

A row a partition. Left: test accuracy at the end against all bytes moved, a point a size p. Right: test accuracy of
FedSep against rounds, a line a size p.
"""

import json
import sys
from collections import defaultdict
from math import log10
from pathlib import Path
from statistics import mean

WIDTH, LEFT, TOP, PANEL_W, PANEL_H, GAP = 920, 50, 46, 300, 190, 50
METHODS = {
    "fedsep": ("#0969da", "#58a6ff"),
    "fedsep-redraw": ("#8250df", "#bc8cff"),
    "top-k": ("#1a7f37", "#3fb950"),
    "top-k, dense down": ("#9a6700", "#d29922"),
    "count-sketch": ("#bf3989", "#f778ba"),
    "uncompressed": ("#24292f", "#e6edf3"),
}
TITLES = {"iid": "i.i.d.", "classes": "two classes each"}
FADES = (0.25, 0.4, 0.55, 0.75, 1.0)


def style() -> str:
    def rules(which: int) -> str:
        return " ".join(
            f".c{i} {{ stroke: {pair[which]} }} .f{i} {{ fill: {pair[which]} }}"
            for i, pair in enumerate(METHODS.values())
        )

    return f"""
  text {{ font: 13px system-ui, sans-serif; fill: #24292f }} .title {{ font-weight: 600 }} .small {{ font-size: 11px }}
  .grid {{ stroke: #8c959f; stroke-opacity: .25 }} polyline {{ fill: none; stroke-width: 2 }} {rules(0)}
  @media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} {rules(1)} }}
"""


def grid(left: float, top: float) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        y = top + PANEL_H * (1 - tenth / 10)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" text-anchor="end" x="{left - 6}" y="{y + 4:.1f}">{tenth / 10:g}</text>')
    return parts


def line(points: list[tuple[float, float]], name: str, left: float, top: float, fade: float = 1.0) -> list[str]:
    """Points in [0, 1]², drawn and joined."""
    i = list(METHODS).index(name)
    placed = [(left + PANEL_W * x, top + PANEL_H * (1 - y)) for x, y in points]
    parts = [f'<polyline class="c{i}" opacity="{fade}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}"/>']
    if len(points) < 8:
        parts += [f'<circle class="f{i}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    return parts


def by_bytes(lines: list[dict], left: float, top: float) -> list[str]:
    ends: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for one in lines:
        ends[one["method"], one["size"]].append((one["bytes"][-1] / 1e6, one["accuracy"][-1]))
    low, high = (f(log10(b) for some in ends.values() for b, _ in some) for f in (min, max))
    span = high - low or 1.0
    parts = grid(left, top)
    for name in METHODS:
        sizes = sorted(size for method, size in ends if method == name)
        points = [tuple(mean(column) for column in zip(*ends[name, size], strict=True)) for size in sizes]
        parts += line([((log10(b) - low) / span, a) for b, a in points], name, left, top)
    for power in range(-3, 6):
        if low <= power <= high:
            x = left + PANEL_W * (power - low) / span
            parts.append(
                f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{top + PANEL_H + 16}">{10**power:g} MB</text>'
            )
    return parts


def by_round(lines: list[dict], left: float, top: float) -> list[str]:
    runs = sorted((one for one in lines if one["method"] == "fedsep" and one["seed"] == 0), key=lambda o: o["size"])
    parts = grid(left, top)
    last = max((one["round"][-1] for one in runs), default=1)
    ends: list[tuple[float, int]] = []
    for one, fade in zip(runs, FADES[-len(runs) :], strict=False):
        points = [(t / last, a) for t, a in zip(one["round"], one["accuracy"], strict=True)]
        parts += line(points, "fedsep", left, top, fade)
        ends.append((points[-1][1], one["size"]))
    lowest = top - 8.0
    for height, size in sorted(ends, reverse=True):  # labels keep their distance
        lowest = max(lowest + 11, top + PANEL_H * (1 - height) + 4)
        parts.append(f'<text class="small" x="{left + PANEL_W + 6}" y="{lowest:.1f}">{size}</text>')
    for t in (0, last // 2, last):
        x = left + PANEL_W * t / last
        parts.append(f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{top + PANEL_H + 16}">{t}</text>')
    return parts


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
    lines = [recorded(path.parent) for path in sorted(source.glob("*/summary.json"))]
    partitions = [name for name in TITLES if any(one["partition"] == name for one in lines)]
    height = TOP + len(partitions) * (PANEL_H + 60)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">']
    parts.append(f"<style>{style()}</style>")
    second = LEFT + PANEL_W + GAP
    for row, partition in enumerate(partitions):
        top = TOP + row * (PANEL_H + 60)
        here = [one for one in lines if one["partition"] == partition and one["method"] in METHODS]
        parts += [*by_bytes(here, LEFT, top), *by_round(here, second, top)]
        title = TITLES[partition]
        parts.append(f'<text class="title" x="{LEFT}" y="{top - 10}">{title}: accuracy by bytes moved</text>')
        parts.append(f'<text class="title" x="{second}" y="{top - 10}">{title}: FedSep by rounds, p at the end</text>')
    drawn = [name for name in METHODS if any(one["method"] == name for one in lines)]
    for place, name in enumerate(drawn):
        i = list(METHODS).index(name)
        x, y = second + PANEL_W + 44, TOP + 14 + 22 * place
        parts.append(f'<line class="c{i}" stroke-width="2" x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text class="small" x="{x + 24}" y="{y}">{name}</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
