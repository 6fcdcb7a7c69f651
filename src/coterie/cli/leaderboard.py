"""Every method on every problem, under one protocol: leaderboard."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import RESEARCH, Json, app, new_folder, print_json
from coterie.errors import RunError


@app.command(
    rich_help_panel=RESEARCH,
    epilog="Example: coterie leaderboard --problems friends,byzantine --methods meritfed,fedavg --seeds 0,1,2",
)
def leaderboard(
    scale: Annotated[str, typer.Option(help="small (minutes per problem) or paper.")] = "small",
    problems: Annotated[str | None, typer.Option(metavar="A,B", help="Only these; by default all with data.")] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Only these; by default all.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="Instead of those of the scale.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one per core.")] = None,
    read: Annotated[bool, typer.Option("--read", help="Run nothing; rank what is in --out.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; by default a new one under runs/.")] = None,
    json: Json = False,
) -> None:
    """Tune and run methods on problems at equal bytes: accuracy, worst client, incentive, cost, and average ranks.

    The same command with the same --out resumes, also in parts: problems, methods and seeds add up in the folder, and
    --read ranks all that is there.
    """
    from coterie.cli.compare import numbers
    from coterie.report.terminal import RunsBar, console_for
    from coterie.reproduce import MEASURED
    from coterie.reproduce.leaderboard import contests
    from coterie.reproduce.leaderboard import leaderboard as run_all

    chosen, missing = contests(scale, _names(problems))
    console = console_for(json)
    for complaint in missing:
        console.print(complaint, markup=False, soft_wrap=True)
    folder = out or new_folder("leaderboard", scale)
    with RunsBar(console) as bar:
        result = run_all(
            scale,
            chosen,
            folder,
            methods=_names(methods),
            seeds=numbers(seeds) if seeds else (),
            at_once=jobs,
            dry=read,
            watch=bar,
        )
    if json:
        print_json(result)
    else:
        console.print((folder / f"leaderboard-{scale}.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)
        console.print(f"This is in {folder}/leaderboard-{scale}.md and .json.", markup=False, soft_wrap=True)
    failed = [run.name for run, outcome in bar.ended.items() if outcome not in MEASURED]
    if failed:
        raise RunError(f"{len(failed)} of the runs did not finish, and the tables lack them: {', '.join(failed)}.")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []
