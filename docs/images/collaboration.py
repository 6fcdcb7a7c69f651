"""Draw collaboration.svg from a result folder of `collaborate`.

python docs/images/collaboration.py runs/collaborate/digits-200-collaborate-0 docs/images/collaboration.svg
"""

import csv
import sys
from pathlib import Path

from panels import GAP, Panel, picture

from coterie.report.charts import clusters_of
from coterie.report.results import read
from coterie.report.svg import Chart, matrix_map

EARLY = 0.3  # the size of the earlier rounds, against the last one
Matrix = list[list[float]]


def matrices(path: Path) -> dict[int, Matrix]:
    """The weights by round; the report keeps those of the last one only."""
    rounds: dict[int, Matrix] = {}
    with path.open() as file:
        for row in list(csv.reader(file))[1:]:
            rounds.setdefault(int(row[0]), []).append([float(value) for value in row[2:]])
    return rounds


def main(folder: Path, out: Path) -> None:
    run, rounds = read(folder), matrices(folder / "weights.csv")
    found = clusters_of(run)
    *early, last = sorted(rounds)

    def chart(t: int) -> Chart:
        title = "at the start: equal weights" if t == 0 else f"after {t} rounds"
        return matrix_map(f"round-{t}", title, rounds[t], found)

    whole = Panel(chart(last), 0.0, 0.0)
    panels = [whole]
    for t in early[:3]:
        y = 0.0 if len(panels) == 1 else panels[-1].bottom + 4
        panels.append(Panel(chart(t), whole.right + GAP, y, EARLY))
    inside = run.final["group_weight"], run.final["group_weight_least"]
    title = f"who learns from whom: {inside[0]:.3f} of the weight inside the own group, {inside[1]:.3f} at least"
    out.write_text(picture("collaboration", title, panels).file())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
