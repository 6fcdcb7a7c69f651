"""Results people can look at: report."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import DECIDE, Json, app, new_folder, print_json
from coterie.errors import RunError, clean


@app.command(rich_help_panel=DECIDE, epilog="Example: coterie report runs/first")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Result folders; several are compared.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to; by default DIR itself, for several a new folder under runs/.")
    ] = None,
    json: Json = False,
) -> None:
    """Write report.html, which opens offline, and its charts as SVG files; print where they are.

    A run may still be in progress: the page shows the rounds that it has recorded. The folder of an advice has one
    page, advice.html, which is written anew from advice.json.
    """
    from coterie.report.page import write
    from coterie.report.results import is_advice, read_all

    if len(folders) == 1 and is_advice(folders[0]):
        from coterie.advise.page import write as write_advice

        advice = write_advice(folders[0], out)
        if json:
            print_json({"report": str(advice)})
        else:
            print(f"The page of this advice is {advice}.")
        return
    runs, complaints = read_all(folders)
    for complaint in complaints:
        print(f"left out: {clean(complaint)}", file=sys.stderr)
    if not runs:
        raise RunError("there is nothing to report: none of the folders could be read.")
    destination = out or (folders[0] if len(folders) == 1 else new_folder("report"))
    page = write(destination, runs, complaints)
    if json:
        found = {"report": str(page), "plots": str(destination / "plots"), "runs": len(runs), "left_out": complaints}
        print_json(found)
    else:
        print(f"The report is in {page}, its charts as SVG in {destination / 'plots'}.")
