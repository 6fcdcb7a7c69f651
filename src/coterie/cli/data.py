"""Data sets: data list, data check, data get."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import DATA, Json, app, print_rows

data = typer.Typer(help="Data sets: where they are looked for, what is there.", no_args_is_help=True)
app.add_typer(data, name="data", rich_help_panel=DATA)


@data.command("list", epilog="Example: coterie data list")
def data_list(json: Json = False) -> None:
    """All data sets, and where each was found."""
    from coterie.problems.data.catalogue import listing

    rows = listing()
    print_rows(rows, json, ("name", "title", "state", "found"))
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
    rows = [row for known in names for row in check(known)]
    print_rows(rows, json, ("data", "file", "state", "detail"))
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
        found = fetch(name, folder, progress)
    print(f"{name} is in {found}")
