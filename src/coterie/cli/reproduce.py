"""Tables and figures of the papers, ours beside theirs: reproduce."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.app import RESEARCH, Json, app, new_folder, print_json, print_rows
from coterie.errors import RunError, UsageError

TOLERANCE = 0.02  # two points of accuracy: the last bits differ from machine to machine, and training amplifies them


@app.command(
    rich_help_panel=RESEARCH, epilog="Example: coterie reproduce fednest-minimax --scale small --out runs/minimax"
)
def reproduce(
    name: Annotated[str, typer.Argument(help="Which one; `list` for all of them; `check` compares stored results.")],
    stored: Annotated[
        list[Path] | None, typer.Argument(help="With check: stored results, NAME-SCALE.json; by default docs/results.")
    ] = None,
    scale: Annotated[str, typer.Option(help="small (minutes, embedded data) or paper.")] = "small",
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="Instead of those of the scale.")] = None,
    rows: Annotated[str | None, typer.Option(metavar="A;B", help="Only these rows, separated by ;.")] = None,
    columns: Annotated[str | None, typer.Option(metavar="A;B", help="Only these columns, separated by ;.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one per core.")] = None,
    read: Annotated[bool, typer.Option("--read", help="Run nothing; make the table of what is in --out.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; by default a new one under runs/.")] = None,
    add_to: Annotated[
        Path | None,
        typer.Option(help="A stored result of this scale: its chosen settings are used, and its values stay."),
    ] = None,
    cells: Annotated[int, typer.Option(min=1, help="With check: how many cells of each stored result.")] = 2,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="With check: the largest difference, relative for values above 1.")
    ] = TOLERANCE,
    json: Json = False,
) -> None:
    """Run a table or figure of a paper again and write it, the printed values beside ours.

    The same command again resumes it. `coterie reproduce check docs/results/NAME-SCALE.json` runs
    a small sample of a stored result again and ends with exit code 1 where a value differs.
    """
    from coterie.cli.compare import numbers
    from coterie.report.terminal import RunsBar, console_for
    from coterie.reproduce import MEASURED, STUDIES, markdown, study
    from coterie.reproduce import reproduce as run_study

    if name == "list":
        listed = [
            {"name": s.name, "paper": s.page.lstrip("./"), "what": s.what, "scales": [*s.scales]} for s in STUDIES
        ]
        print_rows(listed, json, ("name", "what", "scales"))
        return
    if name == "check":
        _check(stored or [], out or new_folder("reproduce-check"), cells, tolerance, jobs, json)
        return
    if stored:
        raise UsageError(f"{stored[0]} is for `coterie reproduce check`; leave it out.")
    chosen = study(name)
    kept_rows, kept_columns = (text.split(";") if text else [] for text in (rows, columns))
    table = chosen.at(scale).only(kept_rows, kept_columns, numbers(seeds) if seeds else [])
    folder = out or new_folder("reproduce", name, scale)
    console = console_for(json)
    with RunsBar(console) as bar:
        result = run_study(
            chosen, table, scale, folder, at_once=jobs, dry=read, stored=_stored(add_to) if add_to else None, watch=bar
        )
    if json:
        print_json(result)
    else:
        console.print(f"\n{chosen.what}\n", markup=False)
        console.print(markdown(result), markup=False, soft_wrap=True)
        console.print(f"This table is in {folder}/{name}-{scale}.md and .json.", markup=False, soft_wrap=True)
    failed = [run.name for run, outcome in bar.ended.items() if outcome not in MEASURED]
    if failed:
        raise RunError(f"{len(failed)} of the runs did not finish, and the table lacks them: {', '.join(failed)}.")


def _stored(file: Path) -> dict[str, Any]:
    """A stored result, or why it is none."""
    try:
        result = jsonlib.loads(file.read_text(encoding="utf-8"))
        if not all(key in result for key in ("name", "scale", "seeds", "columns", "rows")):
            raise ValueError("it lacks rows, columns or seeds")
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{file} is no stored result: {error}.") from None
    found: dict[str, Any] = result
    return found


def _check(files: list[Path], out: Path, cells: int, tolerance: float, jobs: int | None, json: bool) -> None:
    """Run a sample of stored results again, print both values, and fail where they differ."""
    from coterie.report.terminal import RunsBar, console_for
    from coterie.reproduce import check_stored, study

    found = files or sorted(Path("docs/results").glob("*.json"))
    if not found:
        raise UsageError("there are no stored results in docs/results; name some: coterie reproduce check FILE.json.")
    rows = []
    for file in found:
        try:
            result = jsonlib.loads(file.read_text(encoding="utf-8"))
            chosen = study(result["name"])
            with RunsBar(console_for(json)) as bar:
                checked = check_stored(chosen, result, out / file.stem, count=cells, at_once=jobs, watch=bar)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{file} is no stored result: {error}.") from None
        rows += [{"result": file.stem, **run._asdict(), "agrees": run.agrees(tolerance)} for run in checked]
    short = [{key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows]
    print_rows(rows if json else short, json)
    wrong = [row for row in rows if not row["agrees"]]
    if wrong:
        raise RunError(f"{len(wrong)} of {len(rows)} stored values do not reproduce within {tolerance:g}.")
    if not rows:
        raise UsageError("none of these results holds one value per seed, so none can be checked; run them again.")
