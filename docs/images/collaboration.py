"""Draw collaboration.svg from a result folder of `collaborate`.

python docs/images/collaboration.py runs/collaborate/digits-4-0-collaborate docs/images/collaboration.svg
"""

import csv
import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 860, 500
LEFT, TOP, SIDE = 78, 74, 390
SMALL, SMALL_LEFT = 112, 560
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .small { font-size: 11px }
  .cell { fill: #0969da } .frame { fill: none; stroke: #8c959f } .block { fill: none; stroke: #bc4c00; stroke-width: 2 }
  .number { font-size: 9.5px; text-anchor: middle } .on-dark { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .cell { fill: #58a6ff } .block { stroke: #f0883e } .on-dark { fill: #0d1117 }
  }
"""

Matrix = list[list[float]]


def main(folder: Path, out: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    rounds: dict[int, Matrix] = {}
    with (folder / "weights.csv").open() as file:
        for row in list(csv.reader(file))[1:]:
            rounds.setdefault(int(row[0]), []).append([float(value) for value in row[2:]])
    last = max(rounds)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts += [f"<style>{STYLE}</style>", *large(rounds[last], summary, last)]
    early = [t for t in sorted(rounds) if t != last]
    shown = [early[0], *early[1:3]]
    for i, t in enumerate(shown):
        y = TOP + i * (SMALL + 27)
        parts += [f'<text class="small" x="{SMALL_LEFT + SMALL + 14}" y="{y + SMALL / 2:.0f}">{label(t)}</text>']
        parts += cells(rounds[t], max(map(max, rounds[last])), SMALL_LEFT, y, SMALL) + frames(
            summary, SMALL_LEFT, y, SMALL
        )
    parts.append(f'<text class="title" x="{SMALL_LEFT}" y="24">how it came about</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")


def label(t: int) -> str:
    return "at the start: equal weights" if t == 0 else f"after {t} rounds"


def large(w: Matrix, summary: dict, last: int) -> list[str]:
    n, size = len(w), SIDE / len(w)
    parts = [f'<text class="title" x="{LEFT}" y="24">who learns from whom, after {last} rounds</text>']
    parts.append(f'<text class="small" x="{LEFT}" y="42">client that helps</text>')
    turned = f'transform="rotate(-90 40 {TOP + SIDE / 2})" x="40" y="{TOP + SIDE / 2}"'
    parts.append(f'<text class="small" text-anchor="middle" {turned}>target</text>')
    for k in range(n):
        at = (k + 0.5) * size
        parts.append(f'<text class="small" text-anchor="middle" x="{LEFT + at:.1f}" y="{TOP - 7}">{k}</text>')
        parts.append(f'<text class="small" text-anchor="end" x="{LEFT - 7}" y="{TOP + at + 4:.1f}">{k}</text>')
    top = max(map(max, w))
    parts += cells(w, top, LEFT, TOP, SIDE) + frames(summary, LEFT, TOP, SIDE)
    for i, row in enumerate(w):
        for k, value in enumerate(row):
            if value >= 0.02:
                kind = "number on-dark" if shade(value, top) > 0.6 else "number"
                x, y = LEFT + (k + 0.5) * size, TOP + (i + 0.5) * size + 3.5
                parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{100 * value:.0f}</text>')
    share = summary["final"]
    text = f"per cent of a row's weight (below 2: blank). Inside the own group: {share['group_weight']:.3f} on average,"
    parts.append(f'<text class="small" x="{LEFT}" y="{TOP + SIDE + 18}">{text}</text>')
    text = f"{share['group_weight_least']:.3f} at least. Frames: the clusters that were found."
    return [*parts, f'<text class="small" x="{LEFT}" y="{TOP + SIDE + 34}">{text}</text>']


def shade(value: float, top: float) -> float:
    return (value / top) ** 0.5


def cells(w: Matrix, most: float, left: float, top: float, side: float) -> list[str]:
    size = side / len(w)
    squares = [
        f'<rect fill-opacity="{shade(value, most):.2f}" x="{left + k * size:.1f}" y="{top + i * size:.1f}" '
        f'width="{size:.1f}" height="{size:.1f}"/>'
        for i, row in enumerate(w)
        for k, value in enumerate(row)
        if value >= 0.002
    ]
    return ['<g class="cell">', *squares, "</g>"]


def frames(summary: dict, left: float, top: float, side: float) -> list[str]:
    """The clusters, where they are neighbours."""
    size = side / len(summary["weights"])
    parts = [f'<rect class="frame" x="{left}" y="{top}" width="{side}" height="{side}"/>']
    for cluster in summary["clusters"]:
        if cluster == list(range(cluster[0], cluster[-1] + 1)):
            at, width = cluster[0] * size, len(cluster) * size
            parts.append(
                f'<rect class="block" x="{left + at:.1f}" y="{top + at:.1f}" width="{width:.1f}" height="{width:.1f}"/>'
            )
    return parts


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
