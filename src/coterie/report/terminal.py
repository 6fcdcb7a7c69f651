"""Tables and the live display in the terminal."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from coterie import plugins
from coterie.errors import client_label
from coterie.experiment.build import Parts
from coterie.experiment.guard import MEASURE
from coterie.experiment.processes import Job, Watch
from coterie.experiment.records import rounds_done
from coterie.experiment.rehearsal import announced
from coterie.measures import Measure, declared, named, of_result, of_summary
from coterie.numerics import clusters
from coterie.problems.base import View
from coterie.report.results import is_number, moved
from coterie.report.svg import UNITS

ALL_CLIENTS = 20
BAR = 24
PLAIN: dict[str, Any] = {"box": None, "pad_edge": False}  # of tables
WIDEST_MAP = 40  # more clients than this are shown by their clusters only
SHADES = ((4.0, "█", "cyan"), (2.0, "▓", "cyan"), (1.0, "▒", "cyan"), (0.5, "░", "dim cyan"), (0.0, "·", "dim"))


def headline(final: dict[str, Any], own: tuple[Measure, ...] = ()) -> tuple[str, str]:
    """The one measure that people ask for first: its name and its value as text.

    Args:
        final: a line of the record.
        own: what the problem declares.
    """
    for measure in declared(own, final):
        if measure.rows != "weights" and _shown(final[measure.name]):
            return measure.label, measure.text(final[measure.name])
    return "", ""


def _shown(value: Any) -> bool:
    """Whether a recorded value is a number, or one that was not finite."""
    return value is None or is_number(value)


def _right(heading: str) -> Column:
    return Column(heading, justify="right")


def size_text(count: int) -> str:
    """Bytes for people."""
    unit, suffix = pick_unit_and_suffix(count, UNITS, 1000)
    return f"{count / unit:.{0 if unit == 1 else 1}f} {suffix}"


def bar(share: float, width: int = BAR) -> Text:
    """A horizontal bar with eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style="cyan")


def standing(client: int, friends: int | None) -> str:
    """What is known of a client beforehand."""
    return "" if friends is None else ("friend" if client < friends else "stranger")


def weights_table(
    weights: list[float],
    friends: int | None,
    *,
    most: int = ALL_CLIENTS,
    title: str | None = None,
    names: Sequence[str] = (),
) -> Table:
    """Who helped: all clients if they are few, else the heaviest.

    Args:
        weights: by client.
        friends: how many of the first clients are friends of the target, where that is known.
        most: the number of clients that are shown.
        title: above the table.
        names: the clients' names, where they have names.
    """
    client, known_as = Column("client", justify="left" if names else "right"), () if friends is None else ("known as",)
    columns = client, *known_as, _right("weight"), Column("", min_width=BAR)
    table = Table(*columns, title=title, title_justify="left", **PLAIN)
    order = list(range(len(weights)))
    if len(order) > most:
        order = sorted(order, key=lambda k: -weights[k])[:most]
    top = max(max(weights), 1e-12)
    for k in order:
        known = [standing(k, friends)] if friends is not None else []
        style = "dim" if weights[k] < 0.005 else ""
        table.add_row(_shown_client(k, names), *known, f"{weights[k]:.3f}", bar(weights[k] / top), style=style)
    return table


def _shown_client(client: int, names: Sequence[str]) -> str:
    """A client in a table: its name, escaped, where clients have names, else its number alone."""
    return escape(client_label(client, names)) if names else str(client)


def matrix_map(weights: list[list[float]], clusters: list[list[int]]) -> Text:
    """Who learns from whom: one row per target, one column per client, both by clusters; the darker, the more weight.

    Shades are by powers of two of the equal share 1/K, so that small and large weights are distinguished at any K.
    """
    order = [k for cluster in clusters for k in cluster]
    equal, cell = 1.0 / len(order), 2 if len(order) <= 30 else 1
    label = max(len("target"), len(str(len(order) - 1)))

    def line(head: str, cells: dict[int, tuple[str, str]], tail: str = "") -> Text:
        text = Text(f"{head:>{label}} ")
        for i, cluster in enumerate(clusters):
            text.append("│" if i else "", style="dim")
            for k in cluster:
                text.append(cells[k][0].ljust(cell) if len(cells[k][0]) == 1 else cells[k][0], style=cells[k][1])
        return text.append(tail)

    lines = []
    for digit in range(len(str(len(order) - 1)) - 1, -1, -1):  # column numbers stand upright
        numbers = {k: (str(k // 10**digit % 10) if k >= 10**digit or not digit else " ", "dim") for k in order}
        lines.append(line("" if digit else "target", numbers))
    for i, cluster in enumerate(clusters):
        if i:
            lines.append(Text(" " * (label + 1) + "┼".join("─" * cell * len(other) for other in clusters), style="dim"))
        for target in cluster:
            shades = {k: next((s * cell, c) for t, s, c in SHADES if weights[target][k] >= t * equal) for k in order}
            lines.append(line(str(target), shades, f"  {sum(weights[target][k] for k in cluster):.2f}"))
    steps = ["under ½", "½", "1", "2", "4 or more equal shares"]
    legend = "  ".join(f"{shade} {step}" for (_, shade, _), step in zip(reversed(SHADES), steps, strict=True))
    return Text("\n").join([*lines, Text(f"{legend}; right: inside the cluster", style="dim")])


def clusters_table(weights: list[list[float]], clusters: list[list[int]], *, names: Sequence[str] = ()) -> Table:
    """Who belongs together, and how much of its members' weight stays there; the largest clusters if they are many.

    Args:
        weights: by target and client.
        clusters: the clients of each.
        names: the clients' names, where they have names; they stand behind the numbers of the map.
    """
    numbers = map(_right, ("cluster", "clients", "weight inside", "of that, own"))
    table = Table(*numbers, "who", **PLAIN)
    largest = sorted(range(len(clusters)), key=lambda c: -len(clusters[c]))[:ALL_CLIENTS]
    for c in sorted(largest):
        cluster = clusters[c]
        inside = sum(weights[i][k] for i in cluster for k in cluster) / len(cluster)
        own = sum(weights[i][i] for i in cluster) / len(cluster)
        table.add_row(str(c), str(len(cluster)), f"{inside:.3f}", f"{own:.3f}", _members(cluster, names))
    if len(clusters) > ALL_CLIENTS:
        table.add_row("", "", "", "", f"… and {len(clusters) - ALL_CLIENTS} more", style="dim")
    return table


def _members(cluster: list[int], names: Sequence[str]) -> str:
    """The clients of a cluster: numbers, or numbers with names."""
    return ", ".join(f"{k} {_shown_client(k, names)}" for k in cluster) if names else ranges(cluster)


def ranges(numbers: list[int]) -> str:
    """Ascending numbers for people: 0–4, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join("–".join(map(str, run)) for run in runs)


def matrix_report(weights: list[list[float]], clusters: list[list[int]], names: Sequence[str] = ()) -> Group:
    """The map, where it can be read, and the clusters with the clients' names, where they have names."""
    picture = [matrix_map(weights, clusters), Text()] if len(weights) <= WIDEST_MAP else []
    return Group(*picture, clusters_table(weights, clusters, names=names))


def comparison_table(summary: dict[str, Any]) -> Table:
    """The learned model beside its baselines, by the most important measure that all of them have."""
    rows = [(summary["method"], summary), *summary.get("baselines", {}).items()]
    known = [m for m in of_summary(summary) if m.rows != "weights"]
    measure = next((m for m in known if all(_shown(run["final"].get(m.name, "")) for _, run in rows)), None)
    headings = "" if measure is None else measure.label, "rounds of communication", "moved"
    table = Table("trained by", *map(_right, headings), **PLAIN)
    for name, run in rows:
        traffic = run["communication"]
        value = "" if measure is None else measure.text(run["final"][measure.name])
        style = "bold" if run is summary else ""
        table.add_row(escape(str(name)), value, str(traffic["rounds"]), size_text(moved(traffic)), style=style)
    return table


def which_models(summary: Mapping[str, Any]) -> str:
    """Which of the two stored models is which, and whether the last is much worse than the best."""
    best, final = summary["best"], summary["final"]

    def loss(measures: Mapping[str, Any]) -> str:
        return named(MEASURE).text(measures.get(MEASURE))

    text = f"model.safetensors is of round {summary['rounds']} (validation loss {loss(final)}), the last one; "
    text += f"model-best.safetensors is of round {best['round']} (validation loss {loss(best)}), the lowest."
    return text + (f" Warning: {best['note']}" if best.get("note") else "")


def show_summary(console: Console, summary: dict[str, Any], folder: str) -> None:
    """What a run ends with on the screen."""
    names = summary.get("names", ())
    if "clusters" in summary:
        console.print("\n[bold]Who learns from whom[/bold]")
        console.print(matrix_report(summary["weights"], summary["clusters"], names))
    elif summary["weights"]:
        console.print()
        title = "[bold]Who helped[/bold]"
        console.print(weights_table(summary["weights"], summary.get("friends"), title=title, names=names))
        if "friends_weight" in summary["final"]:
            share = summary["final"]["friends_weight"]
            text = f"\nThe target's {summary['friends']} friends hold [bold]{share:.3f}[/bold] of the weight"
            spread = summary["final"].get("friends_spread")
            apart = f", each within {100 * spread:.0f} % of their mean" if isinstance(spread, float) else ""
            console.print(f"{text}{apart}.")
    console.print()
    console.print(comparison_table(summary))
    if summary.get("stopped"):
        text = f"\nStopped early after round {summary['rounds']}: {summary['stopped']}."
        console.print(text, soft_wrap=True, markup=False)
    events = ", ".join(escape(f"{count} × {kind}") for kind, count in summary.get("events", {}).items())
    if events:
        console.print(f"\nEvents: {events}; events.jsonl says who and why.", soft_wrap=True)
    if "privacy" in summary:
        show_privacy(console, summary["privacy"])
    files = "summary.json, weights.csv, metrics.jsonl, model.safetensors"
    if "best" in summary:
        console.print(f"\n{which_models(summary)}", soft_wrap=True, markup=False)
        files += ", model-best.safetensors"
    console.print(f"\nResults are in [bold]{escape(folder)}[/bold] ({files}).", soft_wrap=True)
    console.print(f"Look at them: [bold]coterie report {escape(folder)}[/bold]", soft_wrap=True)


def show_privacy(console: Console, privacy: dict[str, Any]) -> None:
    """What was spent, and what it does not cover."""
    spent, of_statistics = privacy["epsilon"], privacy.get("epsilon_statistics")
    part = "" if of_statistics is None else f" (of the statistics alone, ε = {of_statistics:.3g})"
    if spent is not None:
        text = f"ε = {spent:.3g} at δ = {privacy['delta']:g}{part}"
        console.print(f"\nPrivacy of a client against the server: {text}.", soft_wrap=True)
    if privacy.get("not_covered"):
        console.print("Not covered:" if spent is not None else "\nNo privacy is claimed. Not covered:")
        for text in privacy["not_covered"]:
            console.print(f"  · {text}", soft_wrap=True, markup=False, highlight=False)


class LiveDisplay:
    """Progress, the headline measure, and the heaviest clients as bars; plain lines where there is no terminal."""

    def __init__(self, console: Console, name: str, *, is_baseline: bool) -> None:
        self.console, self.name, self.is_baseline = console, name, is_baseline
        self.ran = False
        self._live: Live | None = None

    def started(self, parts: Parts, done: int) -> None:
        """Open the display."""
        self.ran = True
        self._problem, run = parts.problem, parts.config.run
        self._rounds = run.rounds
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(BAR),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measure]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task(self.name, total=run.rounds, completed=done, measure="")
        if not self.is_baseline:
            place = f"{parts.fed.n} clients, {parts.config.federation.mode}, {run.dtype} on {run.device}"
            method, problem = plugins.label(run.method), plugins.label(run.problem)
            self.console.print(f"[bold]{method}[/bold] on [bold]{problem}[/bold], seed {run.seed}: {place}")
            deployed = run.engine != "local"
            told = announced(parts.config, parts.problem, parts.method) if deployed else []
            for note in [*parts.problem.notes, *told]:
                self.console.print(f"note: {escape(note)}", soft_wrap=True)
        if done:
            self.console.print(f"{self.name}: going on after round {done}")
        if self.console.is_terminal:
            self._live = Live(self._bar, console=self.console, refresh_per_second=8, transient=not self.is_baseline)
            self._live.start()

    def noted(self, note: str) -> None:
        """What a resumed run has to say before it goes on."""
        self.console.print(f"{self.name}: {note}", markup=False, soft_wrap=True)

    def warned(self, concern: str) -> None:
        """Say what is to be known about the bits of a run."""
        self.console.print(f"note: {escape(concern)}", soft_wrap=True)

    def recorded(self, line: dict[str, Any], view: View) -> None:
        """Move the bars."""
        label, value = headline(line, self._problem.declares)
        if self._live is None:
            tenth = max(1, self._rounds // 5)
            if line["round"] and (line["round"] % tenth == 0 or line["round"] == self._rounds):
                self.console.print(f"{self.name}: round {line['round']}/{self._rounds}, {label} {value}")
            return
        self._bar.update(self._task, completed=line["round"], measure=f"{label} {value}")
        if view.weights is not None and not self.is_baseline:
            self._live.update(Group(self._bar, Text(), self._weights(view.weights)))

    def _weights(self, weights: Tensor) -> RenderableType:
        if weights.dim() == 1:
            return weights_table(weights.tolist(), self._problem.friends, most=8, names=self._problem.names)
        return matrix_report(weights.tolist(), clusters(weights), self._problem.names)

    def ended(self, summary: dict[str, Any]) -> None:
        """Close the display."""
        self.close()
        if summary["outcome"] != "finished":
            message = escape(summary["message"])
            self.console.print(f"[bold red]{summary['outcome']}[/bold red]: {message}", soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back, whatever happened."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class RunsBar(Watch):
    """One bar over all rounds of a batch of runs, with the runs in progress; without a terminal, one line per run."""

    def __init__(self, console: Console) -> None:
        self.console, self.ended = console, dict[Path, str]()  # outcomes by folder
        self._jobs: Sequence[Job] = ()
        self._bar = Progress(
            TextColumn("[bold]{task.fields[ended]}/{task.fields[runs]} runs"),
            BarColumn(BAR),
            TextColumn("{task.fields[now]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=None, ended=0, runs=0, now="")

    def __enter__(self) -> "RunsBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, jobs: Sequence[Job]) -> None:
        """How much there is to do; another batch is counted from its own beginning."""
        self._jobs = jobs
        self._bar.update(self._task, total=sum(job.config.run.rounds for job in jobs), runs=len(jobs))
        if self.console.is_terminal:
            self._bar.start()

    def over(self, job: Job, summary: dict[str, Any]) -> None:
        """Told at once where there is no bar, or where it did not finish."""
        name, outcome, why = job.folder.name, summary["outcome"], summary["message"]
        self.ended[job.folder] = outcome
        if outcome != "finished" or not self.console.is_terminal:
            text = f"{self._count()} of {len(self._jobs)}: {name}: {outcome}{why and f', {why}'}"
            self.console.print(text, markup=False, soft_wrap=True)

    def tick(self) -> None:
        """How far the others are."""
        total, now = 0, []
        for job in self._jobs:
            over = job.folder in self.ended
            done = job.config.run.rounds if over else rounds_done(job.folder)
            if done > 0 and not over:
                now.append(f"{job.folder.name} {done}")
            total += done
        self._bar.update(self._task, completed=total, ended=self._count(), now=", ".join(now[:4]))

    def _count(self) -> int:
        """How many of this batch have ended."""
        return sum(job.folder in self.ended for job in self._jobs)


def show_grid(console: Console, result: dict[str, Any], folder: str) -> None:
    """The combinations of a grid, best first."""
    measure = of_result(result)
    keys = list(result["best"]["settings"])
    table = Table(*map(_right, [*keys, measure.label, "outcome"]), **PLAIN)

    def rank(trial: dict[str, Any]) -> float:
        value = trial["final"].get(measure.name)
        return math.inf if value is None else -value if measure.higher else value  # none was not finite

    for trial in sorted(result["trials"], key=rank):
        value = trial["final"].get(measure.name)
        style = "bold" if trial["settings"] == result["best"]["settings"] else ""
        cells = [f"{trial['settings'][key]}" for key in keys]
        table.add_row(*cells, "" if value is None else f"{value:.4f}", trial["outcome"], style=style)
    console.print(table)
    console.print(f"\nRun the best with: [bold]coterie run {folder}/best.toml[/bold]")


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """One bar per file: call with its name, the bytes so far and the bytes in all."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(BAR), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        yield report


def console_for(json: bool) -> Console:
    """Standard output for people; standard error where standard output carries JSON."""
    return Console(file=sys.stderr, quiet=True) if json else Console(highlight=False)
