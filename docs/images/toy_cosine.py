"""Draw toy-cosine.svg (figures 1 and 2 of the primal–dual paper) from what benchmarks.toy_cosine wrote:

python docs/images/toy_cosine.py runs/toy/toy_cosine.json OUT.svg

F(w) − F* against outer iterations, mean over repeats, on a logarithmic axis; a column a number of inner steps.
"""

import json
import sys
from math import log10
from pathlib import Path

WIDTH, HEIGHT = 880, 530
LEFT, TOP, PANEL_W, PANEL_H, GAP = 60, 46, 210, 190, 24
LOW, HIGH = -3.5, 0.7
COLOURS = {
    "primal-dual": ("#0969da", "#58a6ff"),
    "exact-gd": ("#24292f", "#e6edf3"),
    "sustain": ("#8250df", "#bc8cff"),
    "rfho": ("#bc4c00", "#f0883e"),
    "rfho, Z carried": ("#1a7f37", "#3fb950"),
    "fednest": ("#bf3989", "#f778ba"),
    "afl": ("#8c959f", "#8c959f"),
}


def style() -> str:
    light = " ".join(f".c{i} {{ stroke: {pair[0]} }}" for i, pair in enumerate(COLOURS.values()))
    dark = " ".join(f".c{i} {{ stroke: {pair[1]} }}" for i, pair in enumerate(COLOURS.values()))
    return f"""
  text {{ font: 13px system-ui, sans-serif; fill: #24292f }} .title {{ font-weight: 600 }} .small {{ font-size: 11px }}
  .grid {{ stroke: #8c959f; stroke-opacity: .25 }} polyline {{ fill: none; stroke-width: 2 }} {light}
  @media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} {dark} }}
"""


def panel(lines: list[dict], least: list[float], left: float, top: float, labels: bool) -> list[str]:
    parts = []
    for power in range(-3, 1):
        y = top + height(10.0**power)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if labels:
            parts.append(f'<text class="small" text-anchor="end" x="{left - 6}" y="{y + 4:.1f}">1e{power}</text>')
    for line in lines:
        base = sum(least[: line["repeats"]]) / line["repeats"]
        last = line["round"][-1]
        points = " ".join(
            f"{left + PANEL_W * t / last:.1f},{top + height(value - base):.1f}"
            for t, value in zip(line["round"], line["objective"], strict=True)
        )
        parts.append(f'<polyline class="c{list(COLOURS).index(line["method"])}" points="{points}"/>')
    for t in (0, 100, 200):
        x = left + PANEL_W * t / 200
        parts.append(f'<text class="small" text-anchor="middle" x="{x}" y="{top + PANEL_H + 16}">{t}</text>')
    return parts


def height(value: float) -> float:
    return PANEL_H * (HIGH - min(max(log10(max(value, 1e-9)), LOW), HIGH)) / (HIGH - LOW)


def main(source: Path, out: Path) -> None:
    lines = json.loads(source.read_text())["lines"]
    finals = [line["final"] for line in lines]
    least = [min(final[i] for final in finals if i < len(final)) for i in range(max(map(len, finals)))]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f"<style>{style()}</style>")
    for row, (noisy, title) in enumerate(((False, "deterministic"), (True, "noisy"))):
        top = TOP + row * (PANEL_H + 60)
        for column, k in enumerate((1, 5, 10)):
            left = LEFT + column * (PANEL_W + GAP)
            chosen = [line for line in lines if line["noisy"] == noisy and (line["K"] == k or line["method"] == "afl")]
            parts += panel(chosen, least, left, top, labels=column == 0)
            parts.append(f'<text class="title" x="{left}" y="{top - 10}">{title}, K = {k}</text>')
    for i, name in enumerate(COLOURS):
        y = TOP + 14 + 22 * i
        x = LEFT + 3 * (PANEL_W + GAP)
        parts.append(f'<line class="c{i}" stroke-width="2" x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text class="small" x="{x + 26}" y="{y}">{name}</text>')
    caption = "F(w) − F* against outer iterations, mean of 20 problems (fednest: of 5)"
    parts.append(f'<text class="small" x="{LEFT}" y="{HEIGHT - 6}">{caption}</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
