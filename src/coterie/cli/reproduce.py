"""Tables and figures of the papers, ours beside theirs: reproduce."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import Json, app, new_folder, print_rows
from coterie.errors import RunError


@app.command(epilog="Example: coterie reproduce fednest-minimax --scale small --out runs/minimax")
def reproduce(
    name: Annotated[str, typer.Argument(help="Which one, or `list` for all of them.")],
    scale: Annotated[str, typer.Option(help="small (minutes, embedded data) or paper.")] = "small",
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="Instead of those of the scale.")] = None,
    rows: Annotated[str | None, typer.Option(metavar="A;B", help="Only these rows, separated by ;.")] = None,
    columns: Annotated[str | None, typer.Option(metavar="A;B", help="Only these columns, separated by ;.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one a core.")] = None,
    read: Annotated[bool, typer.Option("--read", help="Run nothing; make the table of what is in --out.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; by default a new one under runs/.")] = None,
    json: Json = False,
) -> None:
    """Run a table or figure of a paper again and write it, the printed values beside ours.

    The same command again goes on where it was interrupted.
    """
    from coterie.cli.compare import numbers
    from coterie.experiment.reproduce import MEASURED, STUDIES, markdown, study
    from coterie.experiment.reproduce import reproduce as run_study
    from coterie.report.terminal import RunsBar, console_for

    if name == "list":
        listed = [
            {"name": s.name, "paper": s.page.lstrip("./"), "what": s.what, "scales": [*s.scales]} for s in STUDIES
        ]
        print_rows(listed, json)
        return
    chosen = study(name)
    kept_rows, kept_columns = (text.split(";") if text else [] for text in (rows, columns))
    table = chosen.at(scale).only(kept_rows, kept_columns, numbers(seeds) if seeds else [])
    folder = out or new_folder("reproduce", name, scale)
    console = console_for(json)
    with RunsBar(console) as bar:
        result = run_study(chosen, table, scale, folder, at_once=jobs, dry=read, watch=bar)
    if json:
        print(jsonlib.dumps(result, indent=2))
    else:
        console.print(f"\n{chosen.what}\n", markup=False)
        console.print(markdown(result), markup=False, soft_wrap=True)
        console.print(f"This table is in {folder}/{name}-{scale}.md and .json.", markup=False, soft_wrap=True)
    failed = [run for run, outcome in bar.ended.items() if outcome not in MEASURED]
    if failed:
        raise RunError(f"{len(failed)} of the runs did not finish, and the table lacks them: {', '.join(failed)}.")
