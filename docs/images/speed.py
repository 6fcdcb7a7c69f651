"""Draw speed.svg (how a FedAvg round grows with clients and with parameters) from what `make bench` wrote:

python docs/images/speed.py runs/bench.json docs/images/speed.svg
"""

import json
import sys
from math import log10
from pathlib import Path

WIDTH, HEIGHT = 880, 320
LEFT, TOP, PANEL_W, PANEL_H, GAP = 70, 46, 320, 200, 110
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .small { font-size: 11px }
  .grid { stroke: #8c959f; stroke-opacity: .25 } polyline { fill: none; stroke-width: 2 }
  .time { stroke: #0969da } .memory { stroke: #bc4c00 } circle.time { fill: #0969da } circle.memory { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .time { stroke: #58a6ff } .memory { stroke: #f0883e }
    circle.time { fill: #58a6ff } circle.memory { fill: #f0883e } }
"""


def across(value: float, low: float, high: float) -> float:
    return (log10(value) - log10(low)) / (log10(high) - log10(low))


def panel(points: list[dict], key: str, title: str, left: float) -> list[str]:
    """Seconds (left axis) and megabytes (right axis) against the key, all logarithmic."""
    xs = [p[key] for p in points]
    parts = [f'<text class="title" x="{left}" y="{TOP - 16}">{title}</text>']
    scales = {"time": ("cpu_s", 1e-3, 1e2, "s", left - 6, "end"), "memory": ("peak_mb", 1e2, 1e4, "MB", 0, "start")}
    for name, (field, low, high, unit, place, anchor) in scales.items():
        powers = range(round(log10(low)), round(log10(high)) + 1)
        for power in powers:
            y = TOP + PANEL_H * (1 - across(10.0**power, low, high))
            x = place or left + PANEL_W + 6
            label = f"{10.0**power:g} {unit}"
            parts.append(f'<text class="small" text-anchor="{anchor}" x="{x}" y="{y + 4:.1f}">{label}</text>')
            if name == "time":
                parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        places = [
            (left + PANEL_W * across(x, xs[0], xs[-1]), TOP + PANEL_H * (1 - across(p[field], low, high)))
            for x, p in zip(xs, points, strict=True)
        ]
        parts.append(f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        parts += [f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    for x in xs:
        at = left + PANEL_W * across(x, xs[0], xs[-1])
        parts.append(
            f'<text class="small" text-anchor="middle" x="{at:.1f}" y="{TOP + PANEL_H + 18}">{_name(x)}</text>'
        )
    return parts


def _name(value: int) -> str:
    """A power of ten as such."""
    return f"{value:,}" if value <= 10_000 and f"{value}".startswith("10") else f"1e{round(log10(value))}"


def main(source: Path, out: Path) -> None:
    found = json.loads(source.read_text())["curves"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f"<style>{STYLE}</style>")
    parts += panel(found["clients"], "clients", "clients, logistic regression, 5 steps of 20 rows", LEFT)
    second = LEFT + PANEL_W + GAP
    parts += panel(found["parameters"], "parameters", "parameters, 10 clients, 1 step of 20 rows", second)
    y = HEIGHT - 10
    for i, (name, label) in enumerate((("time", "processor seconds a round"), ("memory", "peak of the whole process"))):
        x = LEFT + 220 * i
        parts.append(f'<line class="{name}" stroke-width="2" x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text class="small" x="{x + 26}" y="{y}">{label}</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
