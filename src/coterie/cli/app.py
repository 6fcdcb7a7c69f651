"""The application that commands are registered on, its entry point, and what commands share."""

import atexit
import gc
import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie import __version__, machine
from coterie.errors import CoterieError, clean
from coterie.experiment.watching import terminable

app = typer.Typer(
    name="coterie",
    help="Federated learning that learns whom to learn from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning that learns whom to learn from."""
    gc.enable()  # the command line is read, and a command begins


DECIDE, RESEARCH, PARTNERS, DATA = "Decide", "Research", "Partners", "Data"  # --help shows commands by reader

CTRL_C = 130  # what typer makes of it
LAYOUT = "\n\t"  # what an error may use of control characters: names of files and columns are somebody's text

ConfigFile = Annotated[Path | None, typer.Argument(help="A configuration file; what it leaves out has defaults.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any setting, for example method.step=0.1.")
]


def _consent(context: typer.Context, modules: list[str] | None) -> list[str] | None:
    """Admit code for this command only; the processes that it starts inherit it."""
    from coterie.consent import allowing

    context.with_resource(allowing(modules or []))
    return modules


AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        metavar="MODULE",
        help="Let files name code of this module, of ./FILE.py, or a Ray cluster at HOST:PORT; may be repeated.",
        callback=_consent,
    ),
]


def print_json(value: Any) -> None:
    """Print a result as JSON, for programs."""
    print(jsonlib.dumps(value, indent=2))


def given(**options: Any) -> dict[str, Any]:
    """The settings of the options that were given: run_seed=0 is {'run.seed': 0}; None was not given."""
    return {key.replace("_", ".", 1): value for key, value in options.items() if value is not None}


NAME = 40
"""A first column of such names is not wrapped: people copy them."""


def print_rows(rows: list[dict[str, Any]], json: bool, columns: tuple[str, ...] = ()) -> None:
    """A table for people, of some columns if they are named, or JSON."""
    if json:
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    shown = columns or (tuple(rows[0]) if rows else ())
    for number, column in enumerate(shown):
        copied = number == 0 and all(len(_cell(row[column])) <= NAME for row in rows)
        table.add_column(column, overflow="fold", no_wrap=copied)
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in shown))
    Console(highlight=False).print(table)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return ", ".join(value) if isinstance(value, list) else str(value)


@contextmanager
def importing() -> Iterator[None]:
    """For the large imports of a command: torch makes very many objects and hardly any garbage, and to look for garbage
    among them takes a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def new_folder(*words: str) -> Path:
    """runs/word-word-word, with a number behind it if that is taken."""
    base = Path("runs") / "-".join(words)
    folder, count = base, 1
    while folder.exists():
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
    return folder


def main() -> None:
    """The entry point: an error of the user's is one paragraph on standard error, never a traceback."""
    gc.disable()  # until a command begins: reading the command line makes many objects and no garbage to speak of
    atexit.register(gc.freeze)  # nor is it looked for in a process that ends
    try:
        with terminable():
            app(prog_name="coterie")
    except CoterieError as error:
        if isinstance(error, machine.NotPortable):
            machine.restart()
        print(f"error: {clean(str(error), None, keep=LAYOUT)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != CTRL_C:
            raise
        print("error: stopped by the user.", file=sys.stderr)
        sys.exit(1)
    finally:
        gc.enable()
