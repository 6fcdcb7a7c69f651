"""Tables and the live display in the terminal."""

import sys
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coterie.experiment.build import Parts
from coterie.problems.view import View

HEADLINES = (
    ("test_accuracy", "test accuracy"),
    ("balanced_accuracy", "balanced accuracy"),
    ("validation_accuracy", "validation accuracy"),
    ("objective", "objective"),
    ("distance_to_optimum", "distance to optimum"),
    ("test_loss", "test loss"),
)
ALL_CLIENTS = 20
BAR = 24


def headline(final: dict[str, Any]) -> tuple[str, str]:
    """The one measure that people ask for first: its name and its value as text."""
    for key, label in HEADLINES:
        if key in final:
            value = final[key]
            return label, f"{100 * value:.1f} %" if key.endswith("accuracy") else f"{value:.4g}"
    return "", ""


def size_text(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return ""


def bar(share: float, width: int = BAR) -> Text:
    """A horizontal bar with eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style="cyan")


def standing(client: int, friends: int | None) -> str:
    """What is known of a client beforehand."""
    return "" if friends is None else ("friend" if client < friends else "stranger")


def weights_table(
    weights: list[float], friends: int | None, *, most: int = ALL_CLIENTS, title: str | None = None
) -> Table:
    """Who helped: all clients if they are few, else the heaviest."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("client", justify="right")
    if friends is not None:
        table.add_column("known as")
    table.add_column("weight", justify="right")
    table.add_column("", min_width=BAR)
    order = list(range(len(weights)))
    if len(order) > most:
        order = sorted(order, key=lambda k: -weights[k])[:most]
    top = max(max(weights), 1e-12)
    for k in order:
        known = [standing(k, friends)] if friends is not None else []
        style = "dim" if weights[k] < 0.005 else ""
        table.add_row(str(k), *known, f"{weights[k]:.3f}", bar(weights[k] / top), style=style)
    return table


def comparison_table(summary: dict[str, Any]) -> Table:
    """The learned model beside its baselines."""
    label = headline(summary["final"])[0]
    table = Table(box=None, pad_edge=False)
    table.add_column("trained by")
    table.add_column(label, justify="right")
    table.add_column("rounds of communication", justify="right")
    table.add_column("moved", justify="right")
    rows = [(summary["method"], summary), *summary.get("baselines", {}).items()]
    for name, one in rows:
        moved = one["communication"]
        style = "bold" if one is summary else ""
        total = size_text(moved["bytes_up"] + moved["bytes_down"])
        table.add_row(name, headline(one["final"])[1], str(moved["rounds"]), total, style=style)
    return table


def show_summary(console: Console, summary: dict[str, Any], folder: str) -> None:
    """What a run ends with on the screen."""
    if summary["weights"]:
        console.print()
        console.print(weights_table(summary["weights"], summary.get("friends"), title="[bold]Who helped[/bold]"))
        if "friends_weight" in summary["final"]:
            share = summary["final"]["friends_weight"]
            console.print(f"\nThe target's {summary['friends']} friends hold [bold]{share:.3f}[/bold] of the weight.")
    console.print()
    console.print(comparison_table(summary))
    console.print(
        f"\nResults are in [bold]{folder}[/bold] (summary.json, weights.csv, metrics.jsonl, model.safetensors)."
    )


class LiveDisplay:
    """Progress, the headline measure, and the heaviest clients as bars; plain lines where there is no terminal."""

    def __init__(self, console: Console, name: str, *, is_baseline: bool) -> None:
        self.console, self.name, self.is_baseline = console, name, is_baseline
        self._live: Live | None = None
        self._friends: int | None = None
        self._rounds = 0

    def started(self, parts: Parts, done: int) -> None:
        """Open the display."""
        run = parts.config.run
        self._rounds, self._friends = run.rounds, parts.problem.friends
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
            self.console.print(f"[bold]{run.method}[/bold] on [bold]{run.problem}[/bold], seed {run.seed}: {place}")
        if done:
            self.console.print(f"{self.name}: going on after round {done}")
        if self.console.is_terminal:
            self._live = Live(self._bar, console=self.console, refresh_per_second=8, transient=not self.is_baseline)
            self._live.start()

    def recorded(self, line: dict[str, Any], view: View) -> None:
        """Move the bars."""
        label, value = headline(line)
        if self._live is None:
            tenth = max(1, self._rounds // 5)
            if line["round"] and (line["round"] % tenth == 0 or line["round"] == self._rounds):
                self.console.print(f"{self.name}: round {line['round']}/{self._rounds}, {label} {value}")
            return
        self._bar.update(self._task, completed=line["round"], measure=f"{label} {value}")
        if view.weights is not None and not self.is_baseline:
            heaviest = weights_table(view.weights.tolist(), self._friends, most=8)
            self._live.update(Group(self._bar, Text(), heaviest))

    def ended(self, summary: dict[str, Any]) -> None:
        """Close the display."""
        self.close()
        if summary["outcome"] != "finished":
            self.console.print(f"[bold red]{summary['outcome']}[/bold red]: {summary['message']}")

    def close(self) -> None:
        """Give the terminal back, whatever happened."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def console_for(json: bool) -> Console:
    """Standard output for people; standard error where standard output carries JSON."""
    return Console(file=sys.stderr, quiet=True) if json else Console(highlight=False)
