"""Runs: run, resume, tune."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.app import (
    RESEARCH,
    AllowCode,
    ConfigFile,
    Json,
    Sets,
    app,
    given,
    importing,
    new_folder,
    print_json,
    print_rows,
)
from coterie.cli.engines import allow_registered, engine_of, launcher, study_settings
from coterie.errors import UsageError

if TYPE_CHECKING:
    from coterie.experiment.config import Config

Superlink = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="An existing Flower federation, by its name in Flower's configuration."),
]


@app.command(
    rich_help_panel=RESEARCH,
    epilog="Example: coterie run --method meritfed --problem friends --rounds 200 --out runs/first",
)
def run(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="See `coterie list methods`; or file.py:function.")] = None,
    problem: Annotated[str | None, typer.Option(help="See `coterie list problems`; or file.py:function.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds to train.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes data, start and every draw.")] = None,
    out: Annotated[Path | None, typer.Option(help="The result folder; by default a new one under runs/.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Where clients live: local, embedded, flower, nvflare, ray.")
    ] = None,
    superlink: Superlink = None,
    set_: Sets = None,
    allow_code: AllowCode = None,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Empty an existing result folder first.")] = False,
    study: Annotated[Path | None, typer.Option(help="The folder of a study: partners who keep their data.")] = None,
    sites: Annotated[
        str | None, typer.Option(help="With --study: files that stand for the sites, to try it on one machine.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="With --study: send the model, or each its own, to the sites.")
    ] = False,
) -> None:
    """Train with the clients, learn their weights, and show who helped.

    With nothing else: digits at 15 clients, of which 5 are the target's friends.
    """
    if sites is not None and study is None:
        raise UsageError(
            "--sites is for --study; with files, use: --problem files --set problem.clients='sites/*.csv'."
        )
    with importing():
        from coterie import plugins
        from coterie.consent import allow_code as allow
        from coterie.consent import is_address
        from coterie.experiment import config as configuration
        from coterie.experiment.run import run as run_experiment

    flags = given(run_method=method, run_problem=problem, run_rounds=rounds, run_seed=seed, run_engine=engine)
    sets = configuration.parse_sets(set_ or [])
    if study is not None:
        sets = {**study_settings(study, sites), **sets}
    plugins.typed({**sets, **flags})
    if is_address(address := sets.get("engine.address")):
        allow(address)  # the caller's own word, until this command ends
    resolved = configuration.load(config, sets, flags)
    named = plugins.label(resolved.run.problem), plugins.label(resolved.run.method)
    folder = out or new_folder(*named, str(resolved.run.seed))
    if resolved.run.engine != "local":
        launch = launcher(resolved.run.engine, resolved.run.problem)
        allow_registered(resolved)
        options = {"superlink": superlink, "json": json, "share": share}
        show(lambda watch: launch(resolved, folder, watch, force=force, resume=False, options=options), folder, json)
        _deliver(resolved, folder, json)
        return
    if superlink is not None:
        raise UsageError("--superlink is for --engine flower; add that, or leave it out.")
    show(lambda watch: run_experiment(resolved, folder, watch, force=force), folder, json)


@app.command(rich_help_panel=RESEARCH, epilog="Example: coterie resume runs/first")
def resume(
    folder: Annotated[Path, typer.Argument(help="The result folder of what was interrupted.")],
    superlink: Superlink = None,
    allow_code: AllowCode = None,
    json: Json = False,
) -> None:
    """Resume an interrupted run, tune, compare or advise; the result is the same as without the interruption."""
    if (folder / "tune.json").is_file() or (folder / "compare.json").is_file():
        _resume_many(folder, json)
        return
    if (folder / "advise.json").is_file() or (folder / "advice.json").is_file():
        from coterie.cli.advise import finished

        finished(folder, json)
        return
    with importing():
        from coterie.experiment.config import load
        from coterie.experiment.run import resume as resume_experiment

    if (engine := engine_of(folder)) != "local":
        config = load(folder / "config.toml")
        launch = launcher(engine, config.run.problem)
        allow_registered(config)
        options = {"superlink": superlink, "json": json}
        show(lambda watch: launch(config, folder, watch, force=False, resume=True, options=options), folder, json)
        _deliver(config, folder, json)
        return
    show(lambda watch: resume_experiment(folder, watch), folder, json, resumed=True)


@app.command(
    rich_help_panel=RESEARCH,
    epilog="Example: coterie tune --problem groups --method bilevel --grid method.step=0.05,0.02 --out runs/tuned",
)
def tune(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="See `coterie list methods`; or file.py:function.")] = None,
    problem: Annotated[str | None, typer.Option(help="See `coterie list problems`; or file.py:function.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE.KEY=A,B,C", help="Values to try; by default the method's published grid."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How long each combination runs.")] = 5,
    measure: Annotated[
        str | None, typer.Option(help="What to choose by; by default the most important on validation rows.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes data, start and every draw.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; by default one per core.")] = None,
    out: Annotated[Path | None, typer.Option(help="The result folder; by default a new one under runs/.")] = None,
    set_: Sets = None,
    allow_code: AllowCode = None,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Empty an existing result folder first.")] = False,
) -> None:
    """Try a grid of settings for a few rounds; the best on validation rows wins. Then: coterie run OUT/best.toml.

    The same command again resumes it, and so does coterie resume.
    """
    from coterie import plugins
    from coterie.experiment import config as configuration
    from coterie.experiment.tune import parse_grid
    from coterie.experiment.tune import tune as run_grid
    from coterie.methods.registry import method_entry
    from coterie.report.terminal import RunsBar, console_for, show_grid

    flags = given(run_method=method, run_problem=problem, run_seed=seed)
    sets = configuration.parse_sets(set_ or [])
    plugins.typed({**sets, **flags})
    resolved = configuration.load(config, sets, flags)
    values = parse_grid(grid or [], configuration.parse_sets) or method_entry(resolved.run.method).grid
    if not values:
        raise UsageError(f"{resolved.run.method} has no published grid; give values with --grid method.step=0.1,0.05.")
    folder = out or new_folder("tune", plugins.label(resolved.run.problem), plugins.label(resolved.run.method))
    console = console_for(json)
    with RunsBar(console) as bar:
        options: dict[str, Any] = {"jobs": jobs, "force": force, "watch": bar, "measure": measure}
        result = run_grid(resolved, values, folder, rounds=rounds, **options)
    show_grid(console, result, str(folder))
    if json:
        print_json(result)


def _resume_many(folder: Path, json: bool) -> None:
    """Resume a grid or a comparison."""
    from coterie.cli.compare import report
    from coterie.experiment import compare, tune
    from coterie.report.terminal import RunsBar, console_for, show_grid

    console = console_for(json)
    tuned = (folder / tune.PLAN).is_file()
    with RunsBar(console) as bar:
        result = (tune if tuned else compare).resume(folder, watch=bar)
    if not tuned:
        report(result, folder, json)
        return
    show_grid(console, result, str(folder))
    if json:
        print_json(result)


def _deliver(config: "Config", folder: Path, json: bool) -> None:
    """Where every site of a study was a target: show who has which model, and give it to the files of a trial."""
    if config.run.problem != "study":
        return
    from coterie.experiment.config import load
    from coterie.study.delivery import as_line, deliver_trial, is_personal

    if not is_personal(folder):
        return
    tried = config.run.engine == "embedded"
    lines = deliver_trial(load(folder / "config.toml"), folder) if tried else [as_line(folder / "own")]
    if not json:
        print_rows(lines, json)
        print(f"Your own model and row are in {folder / 'own'}", end="")
        print(
            f", those of each site in {folder / 'sites'}."
            if tried
            else "; a site takes its own by: coterie site receive."
        )


def show(start: Any, folder: Path, json: bool, *, resumed: bool = False) -> None:
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
        print_json(summary)
    elif summary["outcome"] == "finished":
        if resumed and not any(display.ran for display in displays):
            done = f"{summary['method']} has done all its {summary['rounds']} rounds; nothing was left to run."
            console.print(done, markup=False)
        show_summary(console, summary, str(folder))
    if summary["outcome"] != "finished":
        raise typer.Exit(1)
