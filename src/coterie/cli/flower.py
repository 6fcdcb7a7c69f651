"""Flower projects: new, try."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import Json, app, new_folder, print_json
from coterie.cli.engines import launcher

flower = typer.Typer(help="Projects of your own on Flower.", no_args_is_help=True)
app.add_typer(flower, name="flower")


@flower.command(epilog="Example: coterie flower new hospitals")
def new(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Write a Flower project that runs as it is."""
    from coterie.engines.flower.project import new as write

    launcher("flower")  # an error names what to install where Flower is missing
    for path in write(folder):
        print(path)
    print(f"Try it here: coterie flower try {folder}")


@flower.command("try", epilog="Example: coterie flower try hospitals --clients 3")
def try_(
    folder: Annotated[Path, typer.Argument(help="A Flower project.")],
    clients: Annotated[int, typer.Option(min=1, help="SuperNodes to start.")] = 3,
    out: Annotated[Path | None, typer.Option(help="The result folder; by default a new one under runs/.")] = None,
    json: Json = False,
) -> None:
    """Run a project with a SuperLink and SuperNodes on this machine; all of them are ended afterwards."""
    from coterie.report.terminal import console_for, show_summary

    launcher("flower")
    from coterie.engines.flower.project import try_out
    from coterie.engines.follow import stderr_logger

    results = out or new_folder("flower", folder.resolve().name)
    log = stderr_logger({"json": json})
    summary = try_out(folder, clients, results, log)
    if json:
        print_json(summary)
    else:
        show_summary(console_for(json), summary, str(results))
    if summary["outcome"] != "finished":
        raise typer.Exit(1)
