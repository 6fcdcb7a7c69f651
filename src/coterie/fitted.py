"""What `coterie.fit` returns: `Fit`, one trained problem, and `Fits`, the same for several seeds."""

import csv
import html
import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from coterie.errors import UsageError, unknown
from coterie.experiment.build import Parts
from coterie.experiment.loop import Result
from coterie.experiment.records import Records, prepare, save_model
from coterie.federation.ledger import Ledger
from coterie.measures import Measure, declared, of_summary
from coterie.problems.weighting import Weighting
from coterie.report.charts import AXES, Group, headline_measure, measure_chart, spread_text, weight_charts
from coterie.report.results import Run, Weights, account_rows
from coterie.report.svg import Chart
from coterie.report.terminal import comparison_table, matrix_report, weights_table
from coterie.storage import write_atomically, write_json

WEIGHTS = "weights"  # what `plot` draws for methods that learn weights


@dataclass(frozen=True, repr=False)
class Plot:
    """A chart of a fit: shown by notebooks, saved as SVG.

    Example:
        >>> import torch, coterie
        >>> shards = [(torch.randn(20, 4), torch.randn(20)) for _ in range(3)]
        >>> problem = coterie.Weighting.on(shards, test=shards[0], model=torch.nn.Linear(4, 1), loss="squared")
        >>> coterie.fit(problem, coterie.methods.fedavg(), rounds=2).plot()
        <coterie.Plot: test loss against rounds>
    """

    chart: Chart

    def __repr__(self) -> str:
        return f"<coterie.Plot: {self.chart.title}>"

    def _repr_svg_(self) -> str:
        return self.chart.file(paper=True)

    def _repr_html_(self) -> str:
        return _picture(self.chart)

    def save(self, path: str | Path) -> Path:
        """Write the chart as an SVG file, in light or dark as its reader likes it.

        Args:
            path: where to; its name should end in .svg.
        """
        path = Path(path)
        if path.suffix.lower() != ".svg":
            raise UsageError(
                f"{path} does not end in .svg; charts are saved as SVG, which browsers and Inkscape convert."
            )
        write_atomically(path, self.chart.file().encode())
        return path


def _picture(chart: Chart) -> str:
    """A chart as an image element: its style cannot reach the page around it."""
    data = b64encode(chart.file(paper=True).encode()).decode()
    return f'<img alt="{html.escape(chart.title)}" src="data:image/svg+xml;base64,{data}">'


@dataclass(frozen=True, repr=False)
class Fit:
    """A trained model, who helped, and what it cost; `coterie.fit` returns it.

    Example:
        >>> import torch, coterie
        >>> shards = [(torch.randn(20, 4), torch.randn(20)) for _ in range(3)]
        >>> problem = coterie.Weighting.on(shards, model=torch.nn.Linear(4, 1), loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.fedavg(), rounds=2)
        >>> fit
        <coterie.Fit by fedavg: finished, 2 rounds>
        >>> [line["round"] for line in fit.history]
        [0, 1, 2]
        >>> fit.model
        Linear(in_features=4, out_features=1, bias=True)
    """

    _parts: Parts
    _result: Result
    folder: Path | None = None

    @property
    def weights(self) -> Tensor | None:
        """Learned client weights [K], if the method learns some; where every client is a target, [K, K] by target."""
        return self._result.view.weights

    @property
    def weights_history(self) -> Tensor | None:
        """The weights of every recorded round, [rounds, K] ([rounds, K, K] by target), in the order of `history`.

        None where the method learns no weights. A fit with a folder reads them there, with nine digits.
        """
        found = self._trajectory()
        return torch.stack([weights for _, weights in found]) if found else None

    def _trajectory(self) -> list[tuple[int, Tensor]]:
        """Rounds and their weights."""
        if self.folder is None:
            return self._result.weights
        return [] if self.weights is None else _stored_weights(self.folder / "weights.csv", self.weights)

    @property
    def clusters(self) -> list[list[int]]:
        """Groups of clients that learn from each other, where every client is a target."""
        if "clusters" not in self.summary:
            raise UsageError(f"{self.summary['method']} learns no matrix of weights; use methods.collaborate.")
        return [list(cluster) for cluster in self.summary["clusters"]]

    @property
    def model(self) -> nn.Module:
        """The trained model, an ordinary module in evaluation mode; batch norm has running statistics.

        They are those of the clients' training rows at the end, weighed by the learned weights.
        """
        if not isinstance(self._parts.problem, Weighting):
            raise UsageError("a nested problem has no single model; its variables are in fit.variables.")
        if self._result.view.model.dim() == 2:
            raise UsageError("every client has its own model here: client k's is fit.models[k].")
        view = self._result.view
        return self._parts.problem.task.model.module(view.model, view.buffers)

    @property
    def best(self) -> nn.Module:
        """The model of the recorded round with the lowest validation loss; `summary["best"]` has its number."""
        best = self._result.best
        if best is None or not isinstance(self._parts.problem, Weighting) or best.view.model.dim() == 2:
            raise UsageError("there is no best model: it needs validation rows (target=…) and one model for all.")
        return self._parts.problem.task.model.module(best.view.model, best.view.buffers)

    @property
    def models(self) -> list[nn.Module]:
        """The clients' models, where every client is a target."""
        models = self._result.view.model
        if not isinstance(self._parts.problem, Weighting) or models.dim() == 1:
            raise UsageError(f"{self.summary['method']} trains one model for all; it is fit.model.")
        buffers = self._result.view.buffers
        own = ({name: values[k] for name, values in buffers.items()} for k in range(len(models)))
        model = self._parts.problem.task.model
        return [model.module(theta, mine) for theta, mine in zip(models, own, strict=True)]

    @property
    def variables(self) -> dict[str, Tensor]:
        """Every trained tensor by name: a model's parameters, or x and y of a nested problem."""
        return dict(self._parts.problem.named(self._result.view))

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry per recorded round: losses, accuracies, weight statistics, communication."""
        return self._result.history

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The declared measures of the history, the most important first."""
        return of_summary(self.summary)

    @property
    def ledger(self) -> Ledger:
        """What was communicated: rounds, numbers and bytes each way, by cause."""
        return self._result.ledger

    @property
    def summary(self) -> dict[str, Any]:
        """Outcome and final measures."""
        return self._result.summary

    def __repr__(self) -> str:
        return f"<coterie.Fit by {self.summary['method']}: {self.summary['outcome']}, {self.summary['rounds']} rounds>"

    def report(self) -> None:
        """Print who helped and how good the model is."""
        console = Console(highlight=False)
        if "clusters" in self.summary:
            console.print(matrix_report(self.summary["weights"], self.clusters, self._parts.problem.names))
        elif self.weights is not None:
            problem = self._parts.problem
            console.print(weights_table(self.weights.tolist(), problem.friends, names=problem.names))
        console.print(comparison_table(self.summary))
        for note in (*([self.summary["stopped"]] if "stopped" in self.summary else []), *self.summary.get("notes", [])):
            console.print(f"note: {note}", markup=False, soft_wrap=True)

    def frame(self, *, pandas: bool | None = None) -> Any:
        """The record as a table: one column per measure, one row per recorded round.

        Args:
            pandas: True for a pandas.DataFrame, False for a dict of numpy arrays. By default a DataFrame where pandas
                is installed. Both give a column by its name, `frame["test_loss"]`.
        """
        return _framed(_columns(self.history), pandas)

    def plot(self, measure: str | None = None, x: str = "round") -> Plot:
        """A chart of one measure, or of the "weights"; notebooks show it, and `save` writes it as SVG.

        Args:
            measure: a measure of the history; by default the most important one.
            x: what to draw it against: "round", "exchanges", "bytes" or "seconds".
        """
        return _plot([self], measure, x)

    def _repr_html_(self) -> str:
        shown = [(m.label, m.text(self.summary["final"].get(m.name))) for m in self.measures if m.rows != WEIGHTS]
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in shown)
        head = f"<p>{html.escape(repr(self))}</p><table>{rows}</table>"
        return head + (self.plot()._repr_html_() if shown else "")

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write a result folder, as `coterie run` does: summary, metrics, weights, ledger and the model.

        Args:
            folder: where to write; it must be empty or new.
            force: empty an existing folder first.
        """
        folder = Path(folder)
        trajectory = self._trajectory()  # before a folder is emptied
        prepare(folder, force=force)
        with Records(folder, {}) as records:
            for line in self.history:
                records.metrics(line)
            for round_, weights in trajectory:
                records.weights(round_, weights)
            for event in self._result.events:
                records.event(event)
            records.flush()
        write_atomically(folder / "config.toml", self._parts.config.as_record().encode())
        write_json(folder / "ledger.json", self.ledger.as_dict())
        write_json(folder / "summary.json", self.summary)
        metadata = {"format": "pt", "coterie_method": self._parts.method.name}
        save_model(folder / "model.safetensors", self._parts.problem.named(self._result.view), metadata)
        if (best := self._result.best) is not None:
            metadata = {**metadata, "coterie_round": str(best.round)}
            save_model(folder / "model-best.safetensors", self._parts.problem.named(best.view), metadata)
        return folder

    def _run(self) -> Run:
        """As reports see it."""
        config, trajectory = self._parts.config, self._trajectory()
        weights = None
        if trajectory and trajectory[-1][1].dim() == 1:
            weights = Weights([t for t, _ in trajectory], [w.tolist() for _, w in trajectory], None)
        elif trajectory:
            weights = Weights([], [], trajectory[-1][1].tolist())
        causes = {cause: dict(entry) for cause, entry in self.ledger.as_dict()["by_cause"].items()}
        tables = config.tables()
        place = self.folder or Path(config.run.method)
        names = dict.fromkeys(key for line in self.history for key in line)
        measures = declared(self._parts.problem.declares, names)
        run = Run(place, tables, "", self.history, weights, causes, self._result.events, self.summary)
        seen = account_rows(self.ledger.seen.as_dict())
        return Run(**{**vars(run), "measures": measures, "seen": seen})


@dataclass(frozen=True, repr=False)
class Fits(Sequence[Fit]):
    """The fits of several seeds; `coterie.fit(…, seeds=[0, 1, 2])` returns it. `fits[0]` is the first `Fit`.

    Example:
        >>> import torch, coterie
        >>> shards = [(torch.randn(20, 4), torch.randn(20)) for _ in range(3)]
        >>> problem = coterie.Weighting.on(shards, test=shards[0], model=torch.nn.Linear(4, 1), loss="squared")
        >>> start = lambda seed: {"weight": torch.full((1, 4), float(seed)), "bias": torch.zeros(1)}
        >>> fits = coterie.fit(problem, coterie.methods.fedavg(), rounds=5, seeds=[0, 1], start=start)
        >>> fits.stacked("test_loss").shape
        (2, 6)
        >>> fits.mean("test_loss").shape
        (6,)
    """

    fits: tuple[Fit, ...]

    @overload
    def __getitem__(self, index: int) -> Fit: ...
    @overload
    def __getitem__(self, index: slice) -> "Fits": ...
    def __getitem__(self, index: int | slice) -> "Fit | Fits":
        return Fits(self.fits[index]) if isinstance(index, slice) else self.fits[index]

    def __len__(self) -> int:
        return len(self.fits)

    def __iter__(self) -> Iterator[Fit]:
        return iter(self.fits)

    def __repr__(self) -> str:
        return f"<coterie.Fits by {self.fits[0].summary['method']}: seeds {', '.join(map(str, self.seeds))}>"

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return [int(fit.summary["seed"]) for fit in self.fits]

    @property
    def rounds(self) -> list[int]:
        """The rounds that all fits recorded, in order; those that stopped early end the list."""
        common = set.intersection(*({line["round"] for line in fit.history} for fit in self.fits))
        return sorted(common)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The declared measures, the most important first."""
        return tuple({measure.name: measure for fit in self.fits for measure in fit.measures}.values())

    def stacked(self, measure: str) -> Any:
        """A measure as an array [seeds, rounds], at `rounds`; nan where it was not finite.

        Args:
            measure: its name in the history.
        """
        names = {m.name: m for m in self.measures} | {"seconds": None}
        if measure not in names:
            raise unknown("measure", measure, names)
        by_round = [{line["round"]: line.get(measure) for line in fit.history} for fit in self.fits]
        return np.array([[_number(values[t]) for t in self.rounds] for values in by_round])

    def mean(self, measure: str) -> Any:
        """The mean of a measure over the seeds, [rounds].

        Args:
            measure: its name in the history.
        """
        return self.stacked(measure).mean(axis=0)

    def std(self, measure: str) -> Any:
        """The standard deviation of a measure over the seeds, [rounds]; nan for one seed.

        Args:
            measure: its name in the history.
        """
        stacked = self.stacked(measure)
        return stacked.std(axis=0, ddof=1) if len(stacked) > 1 else np.full(stacked.shape[1], math.nan)

    @property
    def weights(self) -> Tensor | None:
        """The learned client weights of all seeds, [seeds, K]; None where the method learns none."""
        found = [fit.weights for fit in self.fits if fit.weights is not None]
        return torch.stack(found) if found else None

    @property
    def weights_history(self) -> Tensor | None:
        """The weights of all seeds at `rounds`, [seeds, rounds, K]; None where the method learns none."""
        wanted = set(self.rounds)
        found = [(fit, history) for fit in self.fits if (history := fit.weights_history) is not None]
        kept = [h[[i for i, line in enumerate(f.history) if line["round"] in wanted]] for f, h in found]
        return torch.stack(kept) if kept else None

    def frame(self, *, pandas: bool | None = None) -> Any:
        """All records as one table, with a column `seed`.

        Args:
            pandas: True for a pandas.DataFrame, False for a dict of numpy arrays; by default as `Fit.frame`.
        """
        lines = [
            {"seed": seed, **line} for seed, fit in zip(self.seeds, self.fits, strict=True) for line in fit.history
        ]
        return _framed(_columns(lines), pandas)

    def plot(self, measure: str | None = None, x: str = "round") -> Plot:
        """The mean of a measure over the seeds, with a band from the least to the largest value.

        Args:
            measure: a measure of the history; by default the most important one.
            x: what to draw it against: "round", "exchanges", "bytes" or "seconds".
        """
        return _plot(list(self.fits), measure, x)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{_final_table(self)}{self.plot()._repr_html_()}"

    def report(self) -> None:
        """Print the last measures: mean ± standard deviation over the seeds."""
        console = Console(highlight=False)
        for measure, text in _finals(self):
            console.print(f"{measure.label}: {text}", markup=False)


def _finals(fits: Fits) -> Iterator[tuple[Measure, str]]:
    for measure in fits.measures:
        values = [fit.summary["final"].get(measure.name) for fit in fits]
        numbers = [float(value) for value in values if value is not None]
        if len(numbers) == len(values):
            yield measure, spread_text(measure, numbers)


def _final_table(fits: Fits) -> str:
    rows = "".join(f"<tr><td>{html.escape(m.label)}</td><td>{html.escape(text)}</td></tr>" for m, text in _finals(fits))
    return f"<table>{rows}</table>"


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _columns(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Arrays by name: numbers of the record, and the communication so far; nan where there is none."""
    traffic = {"rounds": "exchanges"}
    flat = [
        {k: v for k, v in line.items() if k != "communication"}
        | {traffic.get(k, k): v for k, v in line["communication"].items()}
        for line in lines
    ]
    names = list(dict.fromkeys(key for line in flat for key in line))
    plain = [name for name in names if all(_is_plain(line.get(name)) for line in flat)]
    columns: dict[str, Any] = {}
    for name in plain:
        values = [line.get(name) for line in flat]
        whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
        columns[name] = np.array(values if whole else [_number(value) for value in values])
    return columns


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _framed(columns: dict[str, Any], pandas: bool | None) -> Any:
    if pandas is False:
        return columns
    try:
        frames: Any = import_module("pandas")
    except ImportError:
        if pandas:
            raise UsageError("pandas is not installed; pip install pandas, or take frame(pandas=False).") from None
        return columns
    return frames.DataFrame(columns)


def _plot(fits: list[Fit], measure: str | None, x: str) -> Plot:
    if x not in AXES:
        raise unknown("axis", x, AXES)
    runs = [fit._run() for fit in fits]
    if measure == WEIGHTS:
        charts = {chart.name: chart for chart in weight_charts(runs[0])}
        chart = charts.get("weights-rounds") or charts.get("weights-matrix")
        if chart is None:
            raise UsageError(f"{runs[0].method} learns no weights; plot a measure of its history.")
        return Plot(chart)
    group = Group(runs[0].method, runs, 0, False)
    known = {m.name: m for run in runs for m in run.measures}
    chosen = headline_measure([group]) if measure is None else known.get(measure)
    if chosen is None and measure is not None:
        raise unknown("measure", measure, [*known, WEIGHTS])
    if chosen is None:
        raise UsageError("the record holds no measure; give the problem a target or test rows.")
    return Plot(measure_chart(chosen, [group], x))


def _stored_weights(path: Path, last: Tensor) -> list[tuple[int, Tensor]]:
    """The weights of a result folder by round, shaped as the last ones are."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    each, keys = (1, 1) if last.dim() == 1 else (len(last), 2)
    found = []
    for i in range(0, len(rows), each):
        values = [[float(value) for value in row[keys:]] for row in rows[i : i + each]]
        found.append((int(rows[i][0]), torch.tensor(values, dtype=last.dtype).reshape(last.shape)))
    return found
