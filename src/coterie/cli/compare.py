"""Methods side by side: compare."""

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.app import RESEARCH, AllowCode, ConfigFile, Json, Sets, app, given, new_folder, print_json
from coterie.errors import UsageError


@app.command(
    rich_help_panel=RESEARCH,
    epilog="Example: coterie compare --methods meritfed,fedavg,local-train --seeds 0,1,2 --out runs/compared",
)
def compare(
    config: ConfigFile = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help="Methods, also file.py:function; the others are tested against the first.",
        ),
    ] = "meritfed,fedavg,local-train",
    problem: Annotated[str | None, typer.Option(help="See `coterie list problems`; or file.py:function.")] = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="Each method runs once for each.")] = "0,1,2",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each run; with --budget or --exchanges, at most so many.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="BYTES", help="Each run ends with the round that has moved so much.")
    ] = None,
    exchanges: Annotated[
        int | None,
        typer.Option(min=1, help="Each run ends with the round that reaches so many rounds of communication."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; by default one per core.")] = None,
    measure: Annotated[
        str | None, typer.Option(help="What to compare by; by default the most important measure that all runs have.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; by default a new one under runs/.")] = None,
    set_: Sets = None,
    allow_code: AllowCode = None,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Empty an existing folder first.")] = False,
) -> None:
    """Run methods × seeds on one problem, at equal rounds, bytes or exchanges: table, ranks, paired tests, report.

    A setting of one method is --set METHOD.KEY=VALUE. The same command again resumes it, and so does coterie resume.
    """
    from coterie import plugins
    from coterie.experiment import config as configuration
    from coterie.experiment.compare import WITH_BUDGET, plan
    from coterie.experiment.compare import compare as run_all
    from coterie.report.terminal import RunsBar, console_for

    names = [name.strip() for name in methods.split(",") if name.strip()]
    common, own = _by_method(configuration.parse_sets(set_ or []), names)
    flags = given(run_problem=problem, run_rounds=rounds, run_budget=budget, run_exchanges=exchanges)
    plugins.admit_typed(names)
    names, own = [plugins.canonical(name) for name in names], {plugins.canonical(k): v for k, v in own.items()}
    plugins.typed({**common, **flags})
    base = configuration.load(config, common, flags)
    if exchanges is not None and rounds is None:
        base = base.with_run(rounds=exchanges)
    elif budget is not None and rounds is None:
        base = base.with_run(rounds=WITH_BUDGET * base.run.rounds)
    cases = plan(base, names, numbers(seeds), own, measure)
    folder = out or new_folder("compare", plugins.label(base.run.problem))
    with RunsBar(console_for(json)) as bar:
        result = run_all(cases, folder, jobs=jobs, force=force, watch=bar, measure=measure)
    report(result, folder, json)


def report(result: dict[str, Any], folder: Path, json: bool) -> None:
    """Write and print the comparison; the exit code tells whether all its runs finished."""
    from coterie.report.compared import save, show
    from coterie.report.terminal import console_for

    page = save(result, folder)
    show(console_for(json), result, page)
    if json:
        print_json({**result, "report": str(page)})
    if result["outcome"] != "finished":
        raise typer.Exit(1)


def numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text!r} is no list of whole numbers; write for example --seeds 0,1,2.") from None


def _by_method(sets: dict[str, Any], methods: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings of all runs, and those of single methods."""
    from coterie.plugins import labels

    common: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {name: {} for name in methods}
    given = {**{shown: name for name, shown in labels(methods).items()}, **{name: name for name in methods}}
    for dotted, value in sets.items():
        table, _, key = next(
            ((name, ".", dotted[len(word) + 1 :]) for word, name in given.items() if dotted.startswith(f"{word}.")),
            dotted.partition("."),
        )
        if table == "method":
            raise UsageError(f"--set {dotted}: of which method? Write for example --set {methods[0]}.{key}=… instead.")
        if table in own and key:
            own[table][key] = value
        else:
            common[dotted] = value
    return common, own
