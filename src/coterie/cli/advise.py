"""Own files: advise, predict, and data example."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coterie.cli.app import DECIDE, AllowCode, ConfigFile, Json, Sets, app, given, importing, new_folder, print_json
from coterie.cli.data import data
from coterie.errors import UsageError, clean


@app.command(
    rich_help_panel=DECIDE,
    epilog="Example: coterie advise --clients 'sites/*.csv' --target mine.csv --label diagnosis --out advice",
)
def advise(
    config: ConfigFile = None,
    clients: Annotated[str | None, typer.Option(help="The partners' files, as a pattern in quotes.")] = None,
    target: Annotated[str | None, typer.Option(help="Your own file.")] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    event: Annotated[str | None, typer.Option(help="The column that tells whether the event happened.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the folds and the trees.")] = None,
    study: Annotated[Path | None, typer.Option(help="The folder of a study: partners who keep their data.")] = None,
    sites: Annotated[
        str | None, typer.Option(help="With --study: files that stand for the sites, to try it on one machine.")
    ] = None,
    measure: Annotated[str, typer.Option(help="What to decide by: auto, auc, accuracy, brier, r2, mae …")] = "auto",
    cautious: Annotated[
        bool, typer.Option("--cautious", help="Use partners' models only where they are better by a standard error.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The result folder; by default a new one under runs/.")] = None,
    set_: Sets = None,
    allow_code: AllowCode = None,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Empty an existing result folder first.")] = False,
) -> None:
    """With whom should you train, and is it worth it? Reads files, weighs models, and writes a page and a model."""
    with importing():
        from coterie.experiment import config as configuration
        from coterie.plugins import typed
        from coterie.report.terminal import console_for

    folder, console = out or new_folder("advice"), console_for(json)

    def say(text: str) -> None:
        console.print(f"· {text}", markup=False)

    if sites is not None and study is None:
        raise UsageError("--sites is for --study; with files, name them with --clients.")
    if study is not None:
        if config is not None:
            raise UsageError("--study takes its settings from the study and from --set; leave the configuration out.")
        settings = configuration.parse_sets(set_ or [])
        advice = _of_study(
            study, sites, {**settings, **given(run_seed=seed)}, folder, measure, cautious, force, say, json
        )
    else:
        from coterie.advise.advise import advise as decide

        flags = given(problem_clients=clients, problem_target=target, problem_label=label, problem_event=event)
        flags |= given(run_seed=seed) | ({} if config is not None else {"run.problem": "files"})
        sets = configuration.parse_sets(set_ or [])
        typed({**sets, **flags})
        resolved = configuration.load(config, sets, flags)
        advice = decide(resolved, folder, measure=measure, cautious=cautious, say=say, force=force).advice
    _conclude(advice, folder, console, json)


def finished(folder: Path, json: bool) -> None:
    """Finish the advice of a folder whose command was stopped.

    Args:
        folder: where it was begun.
        json: whether to print JSON.
    """
    from coterie.advise.advise import resumed
    from coterie.report.results import ADVICE
    from coterie.report.terminal import console_for

    if (folder / ADVICE).is_file():
        raise UsageError(f"the advice in {folder} is finished; `coterie report {folder}` shows it.")
    console = console_for(json)
    advice = resumed(folder, lambda text: console.print(f"· {text}", markup=False))
    _conclude(advice, folder, console, json)


def _conclude(advice: dict[str, Any], folder: Path, console: Console, json: bool) -> None:
    """The page and the card, and the answer in the terminal."""
    from coterie.advise.page import show, write
    from coterie.report.card import write_card

    write(folder)
    write_card(folder)
    if json:
        print_json(advice)
    else:
        show(console, advice, folder)


def _of_study(
    study: Path,
    sites: str | None,
    settings: dict[str, Any],
    folder: Path,
    measure: str,
    cautious: bool,
    force: bool,
    say: Callable[[str], None],
    json: bool,
) -> dict[str, Any]:
    """The advice of a study, on its network or, with files that stand for the sites, on this machine."""
    from coterie.cli.engines import study_settings
    from coterie.experiment import config as configuration

    resolved = configuration.load(None, {**study_settings(study, sites), **settings}, {})
    if sites is not None:
        from coterie.study.advice import advise_trial

        return advise_trial(resolved, folder, measure=measure, cautious=cautious, say=say, force=force)
    from coterie.study.coordinator import advised

    return advised(resolved, folder, measure=measure, cautious=cautious, force=force, json=json)


@app.command(rich_help_panel=DECIDE, epilog="Example: coterie predict advice/model new.csv --out predictions.csv")
def predict(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A result folder with preprocess.json.")],
    file: Annotated[Path, typer.Argument(help="Rows to predict, with the columns of the training files.")],
    out: Annotated[Path | None, typer.Option(help="A CSV file; by default standard output.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave words as they are, also what a spreadsheet would take for a formula.")
    ] = False,
    allow_code: AllowCode = None,
    best: Annotated[
        bool, typer.Option("--best", help="Use the model with the lowest validation loss, not the last one.")
    ] = False,
) -> None:
    """Predict labels, and probabilities of classes, with a trained model and its stored preprocessing."""
    import sys

    from coterie.experiment.predict import predict as predictions

    table = predictions(folder, file, best=best)
    for note in table.notes:
        print(f"note: {clean(note)}", file=sys.stderr)
    if out is None:
        table.write(sys.stdout, raw=raw)
        return
    try:
        with out.open("w", newline="", encoding="utf-8") as stream:
            table.write(stream, raw=raw)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}.") from None


@data.command("example", epilog="Example: coterie data example hospital")
def data_example(
    folder: Annotated[Path, typer.Argument(help="Where mine.csv and sites/*.csv go.")],
    name: Annotated[str, typer.Option("--data", help="breast-cancer, digits, covtype or heart.")] = "breast-cancer",
    seed: Annotated[int, typer.Option(min=0, help="Who gets which rows.")] = 0,
    friends: Annotated[int, typer.Option(min=0, help="Partners that draw from your distribution.")] = 3,
    strangers: Annotated[int, typer.Option(min=0, help="Partners whose labels are shuffled.")] = 3,
    own: Annotated[int, typer.Option(min=1, help="Your rows.")] = 60,
    centre: Annotated[
        str, typer.Option(help="Of heart, the hospital that is yours: cleveland, hungarian, switzerland or va.")
    ] = "cleveland",
) -> None:
    """Write an example for `coterie advise`: real tables split into sites, with known friends and strangers."""
    from coterie.problems.files.example import write_example

    done = write_example(folder, name, seed=seed, friends=friends, strangers=strangers, own=own, centre=centre)
    partners = [*done.friends, *done.strangers, *done.others]
    print(f"{folder}/mine.csv and {len(partners)} files in {folder}/sites.")
    if done.others:
        print(f"Partners: {', '.join(done.others)}. Test rows: {folder}/test.csv.")
    else:
        print(f"Friends: {', '.join(done.friends) or 'none'}. Strangers: {', '.join(done.strangers) or 'none'}.")
    print(f"Next: coterie advise --clients '{folder}/sites/*.csv' --target {folder}/mine.csv --label {done.label}")
