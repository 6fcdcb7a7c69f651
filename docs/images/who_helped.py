"""Draw who-helped.svg from a result folder: python docs/images/who_helped.py runs/first docs/images/who-helped.svg."""

import sys
from pathlib import Path

from panels import GAP, Panel, picture

from coterie.report.charts import weight_charts
from coterie.report.results import Run, read
from coterie.report.svg import Bar, Chart, bars, percent

WORDS = {"local-train": "the target alone", "fedavg": "plain averaging"}


def accuracies(run: Run) -> Chart:
    runs = {f"{run.method}, learned": run, **{WORDS.get(name, name): other for name, other in run.baselines.items()}}
    values = {name: float(trained.final["test_accuracy"]) for name, trained in runs.items()}
    colours = [0, *[None] * len(run.baselines)]
    drawn = [Bar(name, ((value, c),), percent(value)) for (name, value), c in zip(values.items(), colours, strict=True)]
    return bars("accuracy", "test accuracy for the target", drawn)


def main(folder: Path, out: Path) -> None:
    run = read(folder)
    weights = next(chart for chart in weight_charts(run) if chart.name == "weights-rounds")
    panels = [Panel(weights, 0.0, 0.0), Panel(accuracies(run), weights.width + GAP, 0.0)]
    out.write_text(picture("who-helped", f"{run.method} on {run.problem}, seed {run.seed}", panels).file())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
