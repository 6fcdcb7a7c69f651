"""Draw fednest-minimax.svg (figure 4 of the FedNest paper): python docs/images/fednest_minimax.py OUT.svg [EPOCHS].

minimax-quadratic, 100 clients, b_i ~ N(0, 5²) kept and centred, curvatures spread by ± 50 %, τ = 5, the same steps for
all methods, float64, seed 0. Distance to the true saddle point, on a logarithmic axis.
"""

import sys
from math import log10
from pathlib import Path

from coterie.experiment.build import assemble
from coterie.experiment.config import resolve
from coterie.experiment.loop import run_rounds

WIDTH, HEIGHT = 640, 340
LEFT, TOP, PLOT_W, PLOT_H = 56, 40, 400, 240
LOWEST = -14
CURVES = (
    ("fednest", {}, "FedNest", "a"),
    ("lfednest", {}, "LFedNest", "b"),
    ("fedavg-s", {}, "FedAvg-S", "c"),
    ("fednest", {"count": 10}, "FedNest, 10 of 100 a round", "d"),
)
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .small { font-size: 11px }
  .grid { stroke: #8c959f; stroke-opacity: .25 } polyline { fill: none; stroke-width: 2 }
  .a { stroke: #0969da } .b { stroke: #bc4c00 } .c { stroke: #8250df } .d { stroke: #0969da; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .a, .d { stroke: #58a6ff } .b { stroke: #f0883e } .c { stroke: #bc8cff }
  }
"""


def distances(method: str, federation: dict, epochs: int) -> list[float]:
    run = {"method": method, "problem": "minimax-quadratic", "rounds": epochs, "dtype": "float64", "threads": 1}
    config = resolve({"run": run, "problem": {"scale": 5.0}, "federation": {"mode": "vmap", **federation}})
    return [line["distance_to_optimum"] for line in run_rounds(assemble(config), None).history]


def main(out: Path, epochs: int = 60) -> None:
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts += [f"<style>{STYLE}</style>", *axes(epochs)]
    for i, (method, federation, label, colour) in enumerate(CURVES):
        values = distances(method, federation, epochs)
        print(f"{label}: " + ", ".join(f"{values[t]:.2e}" for t in range(0, epochs + 1, 10)))
        points = " ".join(f"{across(t, epochs):.1f},{height(v):.1f}" for t, v in enumerate(values))
        parts.append(f'<polyline class="{colour}" points="{points}"/>')
        y = TOP + 14 + 22 * i
        parts.append(f'<line class="{colour}" stroke-width="2" x1="470" x2="494" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text class="small" x="500" y="{y}">{label}</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")


def across(t: int, epochs: int) -> float:
    return LEFT + PLOT_W * t / epochs


def height(value: float) -> float:
    return TOP + PLOT_H * (1 - log10(max(value, 10.0**LOWEST))) / (1 - LOWEST)


def axes(epochs: int) -> list[str]:
    parts = [f'<text class="title" x="{LEFT}" y="22">distance to the saddle point over the epochs</text>']
    for power in range(0, LOWEST - 1, -2):
        y = height(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">1e{power}</text>')
    for t in range(0, epochs + 1, 10):
        x, y = across(t, epochs), TOP + PLOT_H + 18
        parts.append(f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{y}">{t}</text>')
    return parts


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(n) for n in sys.argv[2:]))
