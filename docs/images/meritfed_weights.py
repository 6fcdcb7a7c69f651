"""Draw weights over the rounds as heat maps (figures 20 to 31 of MeritFed), one panel per run:

    python docs/images/meritfed_weights.py OUT.svg RUN [RUN …]

A run is a folder with weights.csv, such as those that `coterie reproduce meritfed-cifar10 --out runs/mixture` leaves.
"""

import sys
from pathlib import Path

from panels import GAP, Panel, picture

from coterie.report.charts import weight_charts
from coterie.report.results import read


def main(out: Path, runs: list[Path]) -> None:
    panels, top = [], 0.0
    for folder in runs:
        maps = [c for c in weight_charts(read(folder, with_baselines=False), folder.name) if c.name.endswith("-map")]
        if not maps:
            raise SystemExit(f"{folder} has no weights.csv; give a run of a method that learns weights.")
        chart = maps[0]
        panels.append(Panel(chart, 0.0, top))
        top = panels[-1].bottom + GAP
    out.write_text(picture("meritfed-weights", "client weights over the rounds", panels).file())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
