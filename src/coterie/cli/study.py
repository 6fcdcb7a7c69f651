"""Studies: a coordinator's commands (study) and a partner's (site), and doctor."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coterie.cli.app import Json, Sets, app, new_folder, print_json, print_rows

study = typer.Typer(help="Studies with partners who keep their data: the coordinator.", no_args_is_help=True)
site = typer.Typer(help="Studies with partners who keep their data: a partner's site.", no_args_is_help=True)
app.add_typer(study, name="study")
app.add_typer(site, name="site")

Folder = Annotated[Path, typer.Argument(metavar="STUDY", help="The folder of the study.")]
Home_ = Annotated[Path | None, typer.Option("--home", help="The site's folder; by default below your state directory.")]
InvitationFile = Annotated[Path, typer.Option("--invitation", help="The file that the coordinator sent you.")]
Settings = Annotated[Path | None, typer.Option("--policy", help="Your settings: a TOML file with [policy] and [data].")]
Partners = Annotated[str, typer.Option(help="Names of the partners' sites, with commas between them.")]
Days = Annotated[float, typer.Option(min=0.01, help="Days for which invitations can be joined with.")]
Columns = Annotated[str, typer.Option(metavar="A,B", help="Columns, with commas between them.")]


@study.command(epilog="Example: coterie study new hospitals --label diagnosis --data mine.csv --partners north,south")
def new(
    folder: Annotated[Path, typer.Argument(metavar="STUDY", help="A new folder.")],
    label: Annotated[str, typer.Option(help="The column to predict.")],
    data: Annotated[Path, typer.Option(help="Your own file: it says which columns there are, and is the target.")],
    partners: Partners = "",
    engine: Annotated[
        Literal["nvflare", "flower", "embedded"], typer.Option(help="The network of the study.")
    ] = "nvflare",
    host: Annotated[str, typer.Option(help="The name or address by which partners reach this machine.")] = "localhost",
    port: Annotated[int | None, typer.Option(help="The port that partners dial.")] = None,
    kind: Annotated[Literal["auto", "classification", "regression"], typer.Option(help="Of the label.")] = "auto",
    categorical: Columns = "",
    drop: Columns = "",
    missing: Annotated[str, typer.Option(metavar="A,B", help="Further words that stand for no value.")] = "",
    least_rows: Annotated[int, typer.Option(min=1, help="Rows that a site needs to take part.")] = 20,
    scaling: Annotated[Literal["common", "own", "robust"], typer.Option(help="As in problem files.")] = "common",
    impute: Annotated[Literal["mean", "median", "regression"], typer.Option(help="As in problem files.")] = "mean",
    days: Days = 30,
) -> None:
    """Make a study of your file: study.toml, certificates, and one invitation per partner.

    With --engine embedded it can only be tried on this machine, by `coterie study trial`.
    """
    from coterie.errors import UsageError
    from coterie.problems.sites.folder import Study
    from coterie.problems.sites.terms import terms_of

    terms, notes = terms_of(
        data,
        label,
        kind=None if kind == "auto" else kind,
        categorical=_listed(categorical),
        drop=_listed(drop),
        missing=_listed(missing),
        least_rows=least_rows,
        scaling=scaling,
        impute=impute,
    )
    for note in notes:
        print(note)
    if engine == "embedded":
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; choose a new folder.")
        print(Study(folder, folder.resolve().name, terms, data, engine).write())
    else:
        from coterie.study import coordinator

        _, invitations = coordinator.new(
            folder, terms, data, engine=engine, host=host, port=port, partners=_listed(partners), days=days
        )
        print(folder / "study.toml")
        for path in invitations:
            print(f"{path}    (holds keys: send it to this partner only)")
    print(f"Partners are told: {', '.join(terms.form.features)}; label {terms.label}; rounded quartiles of numbers;")
    print("the words of your columns of words. Your rows stay here.")
    if engine != "embedded":
        print(f"Then: coterie study serve {folder}")
    print(f"To try it on this machine: coterie study trial {folder} --sites 'sites/*.csv'")


@study.command(epilog="Example: coterie study invite hospitals --partners east")
def invite(folder: Folder, partners: Partners, days: Days = 30) -> None:
    """Invite more partners, or one of them again; then start the server again."""
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    for path in coordinator.invite(Study.read(folder), _listed(partners), days)[1]:
        print(path)


@study.command(epilog="Example: coterie study serve hospitals")
def serve(folder: Folder) -> None:
    """Run the server that partners dial, until it is stopped.

    The folder has a systemd unit and a Dockerfile for it.
    """
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    found = Study.read(folder)
    print(f"{found.name} listens on {found.host}:{found.ports[0]}; its log is {folder / 'server.log'}.", flush=True)
    coordinator.serve(found)


@study.command(epilog="Example: coterie study status hospitals")
def status(
    folder: Folder,
    ask: Annotated[bool, typer.Option("--ask", help="Ask the sites now for rows, version and clock.")] = False,
    json: Json = False,
) -> None:
    """Show who is there: connected, rows as declared, clock, version, last seen."""
    from coterie.engines.follow import stderr_logger
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    found = Study.read(folder)
    if ask:
        coordinator.agreed(found, stderr_logger({"json": json}))
    print_rows(coordinator.status(found), json)


@study.command(epilog="Example: coterie study trial hospitals --sites 'sites/*.csv' --method meritfed")
def trial(
    folder: Folder,
    sites: Annotated[str, typer.Option(help="Pattern of the files that stand for the partners' sites.")],
    method: Annotated[str, typer.Option(help="See `coterie list methods`.")] = "meritfed",
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds to train.")] = 60,
    unseen: Annotated[
        Literal["refuse", "share", "missing"], typer.Option(help="What sites do with categories that you do not have.")
    ] = "refuse",
    out: Annotated[Path | None, typer.Option(help="The result folder; by default a new one under runs/.")] = None,
    set_: Sets = None,
    json: Json = False,
) -> None:
    """Run the whole study on this machine, without a network: every file is read by itself, and answers orders only."""
    from coterie.cli.running import show
    from coterie.engines.embedded import launch
    from coterie.experiment import config as configuration

    problem = {"problem.folder": str(folder), "problem.sites": sites, "problem.unseen": unseen}
    flags = {"run.problem": "study", "run.engine": "embedded", "run.method": method, "run.rounds": rounds, **problem}
    sets = {"run.baselines": ["local-train", "fedavg"], **configuration.parse_sets(set_ or [])}
    resolved = configuration.load(None, sets, flags)
    results = out or new_folder("trial", folder.resolve().name, method)
    show(lambda watch: launch(resolved, results, watch, force=False, resume=False, options={}), results, json)


@study.command(epilog="Example: coterie study kept hospitals north")
def kept(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="SITE", help="The name of the site.")],
    json: Json = False,
) -> None:
    """List what the coordinator keeps of a site."""
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    rows = [{"file": file, "holds": holds} for file, holds in coordinator.kept(Study.read(folder), name).items()]
    rows.append({"file": "result folders of runs", "holds": f"the weight of {name}, events that name it, the model"})
    print_rows(rows, json)


@site.command(epilog="Example: coterie site check theirs.csv --invitation north.invite")
def check(
    data: Annotated[Path, typer.Argument(help="Your file.")], invitation: InvitationFile, policy: Settings = None
) -> None:
    """Compare your file with the study, and say what will leave this site and what never does. Nothing is sent."""
    from coterie.study import site as partner
    from coterie.study.home import read_settings
    from coterie.study.invitation import Invitation

    found = Invitation.read(invitation)
    checked = partner.check(data, found, policy)
    for key, value in partner.about(found).items():
        print(f"{key}: {value}")
    _print("What will leave this site", partner.what_leaves(found.terms, read_settings(policy)[0]))
    _print("What never leaves it", partner.what_stays(found.terms))
    _print("Notes", list(checked.found.notes))
    faults = [f"{fault.what}\n    {fault.remedy}" for fault in checked.found.faults]
    _print("Faults, which only you are told", [*faults, *([checked.refusal] if checked.refusal else [])])
    found.check_date()
    if not checked.fits:
        raise typer.Exit(1)
    print(f"\n{data.name}: {checked.found.rows} rows fit the study.")
    print(f"Then: coterie site join --invitation {invitation} --data {data}")


@site.command(epilog="Example: coterie site join --invitation north.invite --data theirs.csv --policy site.toml")
def join(
    invitation: Annotated[Path | None, typer.Option(help="The file that the coordinator sent you.")] = None,
    data: Annotated[Path | None, typer.Option(help="Your file.")] = None,
    policy: Settings = None,
    home: Home_ = None,
    service: Annotated[bool, typer.Option("--service", help="Write a systemd unit and a Dockerfile, and end.")] = False,
) -> None:
    """Take part in a study until it is stopped. This machine dials the coordinator; no port is opened here."""
    from coterie.errors import UsageError
    from coterie.study import site as partner
    from coterie.study.home import Home
    from coterie.study.invitation import Invitation

    if invitation is None:
        found = Home.find(home)
    elif data is None:
        raise UsageError("name your file with --data.")
    else:
        found = partner.prepare(Invitation.read(invitation), data, policy, home)
    if service:
        for path in partner.service(found):
            print(path)
        print("Install it with: systemctl --user enable --now PATH; and: loginctl enable-linger")
        return
    about = found.invitation
    print(f"{about.site} takes part in {about.study}, at {about.address}; its folder is {found.folder}.", flush=True)
    partner.run(found)


@site.command(epilog="Example: coterie site log")
def log(
    home: Home_ = None,
    every: Annotated[bool, typer.Option("--all", help="Every single order.")] = False,
    json: Json = False,
) -> None:
    """Show what the coordinator asked for and how many bytes left, by run and cause."""
    from coterie.study.home import Home, totals

    found = Home.find(home)
    print_rows(list(found.journal()) if every else totals(found), json)


@site.command(epilog="Example: coterie site receive --out model")
def receive(home: Home_ = None, out: Annotated[Path, typer.Option(help="Where models go.")] = Path("received")) -> None:
    """Take the models that the coordinator sent; `coterie predict` uses them."""
    from coterie.study import site as partner
    from coterie.study.home import Home

    for folder in partner.receive(Home.find(home), out):
        print(f"{folder}    (coterie predict {folder} FILE)")


@site.command(epilog="Example: coterie site leave")
def leave(home: Home_ = None) -> None:
    """Leave a study: remove its keys and settings from this machine; the journal stays."""
    from coterie.study import site as partner
    from coterie.study.home import Home

    print(f"You have left. The journal is kept in {partner.leave(Home.find(home))}.")


@app.command(epilog="Example: coterie doctor hospitals")
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="The folder of a study, or of a site.")] = None,
    json: Json = False,
) -> None:
    """Find the usual faults of a study or a site: version, time, certificate, port, disk."""
    from coterie.problems.sites.folder import FILE, Study
    from coterie.study import doctor as looking
    from coterie.study.home import Home

    if folder is None:
        found = looking.of_machine()
    elif (folder / FILE).is_file():
        found = looking.of_study(Study.read(folder))
    else:
        found = looking.of_site(Home.find(folder))
    rows: list[dict[str, Any]] = [one._asdict() for one in found]
    if json:
        print_json(rows)
    else:
        for row in rows:
            print(f"{'ok   ' if row['fine'] else 'FAULT'} {row['what']}: {row['seen']} {row['remedy']}".rstrip())
    if not all(one.fine for one in found):
        raise typer.Exit(1)


def _print(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}:")
        for line in lines:
            print(f"  - {line}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
