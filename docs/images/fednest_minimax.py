"""Draw fednest-minimax.svg (figure 4 of the FedNest paper): python docs/images/fednest_minimax.py OUT.svg [EPOCHS].

minimax-quadratic, 100 clients, b_i ~ N(0, 5²) kept and centred, curvatures spread by ± 50 %, τ = 5, the same steps for
all methods, float64, seed 0. Distance to the true saddle point, on a logarithmic axis.
"""

import sys
from pathlib import Path

from coterie.experiment.build import assemble
from coterie.experiment.config import resolve
from coterie.experiment.loop import run_rounds
from coterie.report.svg import Line, lines

LOWEST = 1e-14
CURVES = (
    ("fednest", {}, "FedNest", 0, 0),
    ("lfednest", {}, "LFedNest", 1, 0),
    ("fedavg-s", {}, "FedAvg-S", 3, 0),
    ("fednest", {"count": 10}, "FedNest, 10 of 100 per round", 0, 1),
)


def distances(method: str, federation: dict, epochs: int) -> list[float]:
    run = {"method": method, "problem": "minimax-quadratic", "rounds": epochs, "dtype": "float64", "threads": 1}
    config = resolve({"run": run, "problem": {"scale": 5.0}, "federation": {"mode": "vmap", **federation}})
    return [line["distance_to_optimum"] for line in run_rounds(assemble(config), None).history]


def main(out: Path, epochs: int = 60) -> None:
    drawn = []
    for method, federation, label, colour, dash in CURVES:
        values = distances(method, federation, epochs)
        print(f"{label}: " + ", ".join(f"{values[t]:.2e}" for t in range(0, epochs + 1, 10)))
        floored = [max(value, LOWEST) for value in values]
        drawn.append(Line(label, range(epochs + 1), floored, label, colour, dash))
    chart = lines("fednest-minimax", "distance to the saddle point over the epochs", drawn, log=True)
    out.write_text(chart.file())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(n) for n in sys.argv[2:]))
