"""Results people can look at: report, watch."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import Json, app, new_folder, print_json
from coterie.errors import RunError, clean


@app.command(epilog="Example: coterie report runs/first")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Result folders; several are compared.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to; by default DIR itself, for several a new folder under runs/.")
    ] = None,
    json: Json = False,
) -> None:
    """Write report.html, which opens offline, and its charts as SVG files; print where they are.

    The folder of an advice has one page, advice.html, which is written anew from advice.json.
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


@app.command(epilog="Example: coterie watch runs/first --port 8080")
def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The result folder of a run that goes on.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    until_end: Annotated[bool, typer.Option("--until-end", help="Stop when the run has ended.")] = False,
) -> None:
    """Show the report live, in a browser on this machine. Ctrl-C ends it; the run goes on.

    An advice is not shown live: the command says where its page is, or how far it has come, and ends.
    """
    from coterie.report.results import is_advice, read_advice
    from coterie.report.watch import watch as serve

    if is_advice(folder):
        read_advice(folder)
        page = folder / "advice.html"
        where = f"is {page}" if page.is_file() else f"is made by: coterie report {folder}"
        print(f"This advice is finished; its page {where}")
        return

    def tell(address: str) -> None:
        print(f"Open {address} in a browser of this machine; Ctrl-C ends watching.", flush=True)

    try:
        serve(folder, port, tell, until_end=until_end)
    except KeyboardInterrupt:
        print("\nno longer watching; the run is not touched.")
