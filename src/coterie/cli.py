"""The command line. Commands are thin; heavy imports happen inside them, so that --help is quick."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.errors import CoterieError, UsageError, unknown

app = typer.Typer(
    name="coterie",
    help="Federated learning that learns whom to learn from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

CTRL_C = 130  # what typer makes of it

ConfigFile = Annotated[Path | None, typer.Argument(help="A configuration file; what it leaves out has defaults.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any setting, for example method.step=0.1.")
]


@app.command(epilog="Example: coterie run --method meritfed --problem friends --rounds 200 --out runs/first")
def run(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="See `coterie list methods`.")] = None,
    problem: Annotated[str | None, typer.Option(help="See `coterie list problems`.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds to train.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes data, start and every draw.")] = None,
    out: Annotated[Path | None, typer.Option(help="The result folder; by default a new one under runs/.")] = None,
    engine: Annotated[str | None, typer.Option(help="Where clients live: local.")] = None,
    set_: Sets = None,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Empty an existing result folder first.")] = False,
) -> None:
    """Train with the clients, learn their weights, and show who helped.

    With nothing else: digits at 15 clients, of which 5 are the target's friends.
    """
    from coterie.experiment import config as configuration
    from coterie.experiment.run import run as run_experiment

    given = {"method": method, "problem": problem, "rounds": rounds, "seed": seed, "engine": engine}
    flags = {f"run.{key}": value for key, value in given.items() if value is not None}
    resolved = configuration.load(config, configuration.parse_sets(set_ or []), flags)
    folder = out or _new_folder(resolved.run.problem, resolved.run.method, str(resolved.run.seed))
    _show(lambda watch: run_experiment(resolved, folder, watch, force=force), folder, json)


@app.command(epilog="Example: coterie resume runs/first")
def resume(
    folder: Annotated[Path, typer.Argument(help="The result folder of the interrupted run.")], json: Json = False
) -> None:
    """Go on with an interrupted run; the result is the same as if it had not been interrupted."""
    from coterie.experiment.run import resume as resume_experiment

    _show(lambda watch: resume_experiment(folder, watch), folder, json)


@app.command(
    epilog="Example: coterie tune --problem groups --method bilevel --grid method.step=0.05,0.02 --out runs/tuned"
)
def tune(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="See `coterie list methods`.")] = None,
    problem: Annotated[str | None, typer.Option(help="See `coterie list problems`.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE.KEY=A,B,C", help="Values to try; by default the method's published grid."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How long each combination runs.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Fixes data, start and every draw.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; by default one a core.")] = None,
    out: Annotated[Path | None, typer.Option(help="The result folder; by default a new one under runs/.")] = None,
    set_: Sets = None,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Empty an existing result folder first.")] = False,
) -> None:
    """Try a grid of settings for a few rounds; the best validation accuracy wins. Then: coterie run OUT/best.toml."""
    from coterie.experiment import config as configuration
    from coterie.experiment.tune import parse_grid
    from coterie.experiment.tune import tune as run_grid
    from coterie.methods.registry import method_entry
    from coterie.report.terminal import TuneDisplay, console_for

    given = {"method": method, "problem": problem, "seed": seed}
    flags = {f"run.{key}": value for key, value in given.items() if value is not None}
    resolved = configuration.load(config, configuration.parse_sets(set_ or []), flags)
    values = parse_grid(grid or [], configuration.parse_sets) or method_entry(resolved.run.method).grid
    if not values:
        raise UsageError(f"{resolved.run.method} has no published grid; give values with --grid method.step=0.1,0.05.")
    folder = out or _new_folder("tune", resolved.run.problem, resolved.run.method)
    with TuneDisplay(console_for(json)) as display:
        result = run_grid(resolved, values, folder, rounds=rounds, jobs=jobs, force=force, report=display.report)
        display.end(result, str(folder))
    if json:
        print(jsonlib.dumps(result, indent=2))


@app.command("list", epilog="Example: coterie list methods --json")
def list_(what: Annotated[str, typer.Argument(help="methods, problems or papers")], json: Json = False) -> None:
    """What there is: methods, problems, papers."""
    _print_rows(_listing(what), json)


data = typer.Typer(help="Data sets: where they are looked for, what is there.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("list", epilog="Example: coterie data list")
def data_list(json: Json = False) -> None:
    """All data sets, and where each was found."""
    from coterie.problems.data.catalogue import listing

    rows = listing()
    _print_rows(rows, json, ("name", "title", "state", "found"))
    places = dict.fromkeys(str(Path(place).parent) for row in rows for place in row["searched"])
    if not json:
        print(
            f"\nLooked for below {', '.join(places)}. `coterie data get NAME` downloads one, where the network allows."
        )


@data.command("check", epilog="Example: coterie data check mnist")
def data_check(
    name: Annotated[str | None, typer.Argument(help="A data set; by default all that are there.")] = None,
    json: Json = False,
) -> None:
    """Compare the files that are there with the published checksums."""
    from coterie.problems.data.catalogue import check, listing

    names = [name] if name else [row["name"] for row in listing() if row.get("found")]
    rows = [row for one in names for row in check(one)]
    _print_rows(rows, json, ("data", "file", "state", "detail"))
    if any(row.get("state") != "fine" for row in rows):
        raise typer.Exit(1)


@data.command("get", epilog="Example: coterie data get mnist")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set; see `coterie data list`.")],
    folder: Annotated[Path | None, typer.Option(help="Where to; by default $COTERIE_DATA or the user's cache.")] = None,
) -> None:
    """Download a data set from its public source, with its checksums verified."""
    from coterie.problems.data.catalogue import fetch
    from coterie.report.terminal import download_progress

    with download_progress() as progress:
        place = fetch(name, folder, progress)
    print(f"{name} is in {place}")


def _print_rows(rows: list[dict[str, Any]], json: bool, columns: tuple[str, ...] = ()) -> None:
    """A table for people, of some columns if they are named, or JSON."""
    if json:
        print(jsonlib.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    shown = columns or (tuple(rows[0]) if rows else ())
    for column in shown:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in shown))
    Console(highlight=False).print(table)


def _listing(what: str) -> list[dict[str, Any]]:
    if what not in ("methods", "problems", "papers"):
        raise unknown("list", what, ("methods", "problems", "papers"))
    if what == "problems":
        from coterie.problems.registry import PROBLEMS

        return [{"name": p.name, "what": p.summary} for p in PROBLEMS]
    from coterie.methods.registry import METHODS

    if what == "methods":
        return [
            {"name": m.name, "learns weights": m.learns_weights, "paper": m.paper, "what": m.summary} for m in METHODS
        ]
    papers: dict[str, list[str]] = {}
    for m in METHODS:
        papers.setdefault(m.paper, []).append(m.name)
    return [{"paper": paper, "methods": names} for paper, names in sorted(papers.items())]


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return ", ".join(value) if isinstance(value, list) else str(value)


def _show(start: Any, folder: Path, json: bool) -> None:
    """Run with a display, then print the summary; the exit code tells whether the run finished."""
    from coterie.report.terminal import LiveDisplay, console_for, show_summary

    console = console_for(json)
    displays: list[LiveDisplay] = []

    def watch(name: str, is_baseline: bool) -> LiveDisplay:
        displays.append(LiveDisplay(console, name, is_baseline=is_baseline))
        return displays[-1]

    try:
        summary = start(watch)
    finally:
        for display in displays:
            display.close()
    if json:
        print(jsonlib.dumps(summary, indent=2))
    elif summary["outcome"] == "finished":
        if not any(display.ran for display in displays):
            console.print(f"{summary['method']} has done all its {summary['rounds']} rounds; nothing was left to run.")
        show_summary(console, summary, str(folder))
    if summary["outcome"] != "finished":
        raise typer.Exit(1)


def _new_folder(*words: str) -> Path:
    """runs/word-word-word, with a number behind it if that is taken."""
    base = Path("runs") / "-".join(words)
    folder, count = base, 1
    while folder.exists():
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
    return folder


def main() -> None:
    """The entry point: an error of the user's is one paragraph on standard error, never a traceback."""
    try:
        app(prog_name="coterie")
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != CTRL_C:
            raise
        print("error: stopped by the user.", file=sys.stderr)
        sys.exit(1)
