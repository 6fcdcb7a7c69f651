"""Draw who-helped.svg from a result folder: python docs/images/who_helped.py runs/first docs/images/who-helped.svg."""

import csv
import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 860, 300
LEFT, TOP, PLOT_W, PLOT_H = 52, 44, 430, 200
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .small { font-size: 11px }
  .axis { stroke: #8c959f; stroke-width: 1 } .grid { stroke: #8c959f; stroke-opacity: .25 }
  .friend { stroke: #0969da; fill: none; stroke-width: 2 } .stranger { stroke: #bc4c00; fill: none; stroke-opacity: .7 }
  .bar { fill: #0969da } .other { fill: #8c959f } .key-friend { fill: #0969da } .key-stranger { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .friend { stroke: #58a6ff } .stranger { stroke: #f0883e } .bar { fill: #58a6ff }
    .key-friend { fill: #58a6ff } .key-stranger { fill: #f0883e }
  }
"""


def main(folder: Path, out: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    with (folder / "weights.csv").open() as file:
        rows = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts += [f"<style>{STYLE}</style>", *weights(rows, summary["friends"]), *accuracies(summary), "</svg>"]
    out.write_text("\n".join(parts) + "\n")


def weights(rows: list[list[float]], friends: int) -> list[str]:
    last, top = rows[-1][0], 1.05 * max(max(row[1:]) for row in rows)
    parts = [f'<text class="title" x="{LEFT}" y="24">client weights over the rounds</text>']
    for i in range(5):
        value = top * i / 4
        y = TOP + PLOT_H * (1 - i / 4)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{value:.2f}</text>')
    for i in range(5):
        x = LEFT + PLOT_W * i / 4
        parts.append(
            f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{TOP + PLOT_H + 18}">{last * i / 4:.0f}</text>'
        )
    for client in range(len(rows[0]) - 1, 0, -1):
        kind = "friend" if client <= friends else "stranger"
        points = " ".join(
            f"{LEFT + PLOT_W * row[0] / last:.1f},{TOP + PLOT_H * (1 - row[client] / top):.1f}" for row in rows[::2]
        )
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    keys = TOP + PLOT_H + 40
    parts.append(f'<rect class="key-friend" x="{LEFT}" y="{keys - 10}" width="18" height="4"/>')
    parts.append(f'<text x="{LEFT + 26}" y="{keys - 3}">{friends} friends</text>')
    parts.append(f'<rect class="key-stranger" x="{LEFT + 120}" y="{keys - 10}" width="18" height="4"/>')
    parts.append(f'<text x="{LEFT + 146}" y="{keys - 3}">{len(rows[0]) - 1 - friends} strangers</text>')
    return parts


def accuracies(summary: dict) -> list[str]:
    x, width = 560, 200
    parts = [f'<text class="title" x="{x}" y="24">test accuracy for the target</text>']
    named = [(f"{summary['method']} (learned weights)", summary)]
    labels = {"local-train": "the target alone", "fedavg": "plain averaging"}
    named += [(f"{name} ({labels.get(name, 'baseline')})", one) for name, one in summary["baselines"].items()]
    for i, (name, one) in enumerate(named):
        value, y = one["final"]["test_accuracy"], TOP + 16 + 66 * i
        parts.append(f'<text x="{x}" y="{y}">{name}</text>')
        kind = "bar" if i == 0 else "other"
        parts.append(f'<rect class="{kind}" x="{x}" y="{y + 8}" width="{width * value:.1f}" height="22" rx="3"/>')
        parts.append(f'<text x="{x + width * value + 8:.1f}" y="{y + 24}">{100 * value:.1f} %</text>')
    return parts


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
