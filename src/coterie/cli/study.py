"""Studies: a coordinator's commands (study) and a partner's (site), and doctor."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from click import Choice

from coterie.cli.app import PARTNERS, Json, app, print_json, print_rows
from coterie.errors import UsageError

if TYPE_CHECKING:
    pass

study = typer.Typer(help="Studies with partners who keep their data: the coordinator.", no_args_is_help=True)
site = typer.Typer(help="Studies with partners who keep their data: a partner's site.", no_args_is_help=True)
app.add_typer(study, name="study", rich_help_panel=PARTNERS)
app.add_typer(site, name="site", rich_help_panel=PARTNERS)

Folder = Annotated[Path, typer.Argument(metavar="STUDY", help="The folder of the study.")]
Home_ = Annotated[Path | None, typer.Option("--home", help="The site's folder; by default below your state directory.")]
InvitationFile = Annotated[Path, typer.Option("--invitation", help="The file that the coordinator sent you.")]
Settings = Annotated[Path | None, typer.Option("--policy", help="Your settings: a TOML file with [policy] and [data].")]
Partners = Annotated[str, typer.Option(help="Names of the partners' sites, with commas between them.")]
Days = Annotated[float, typer.Option(min=0.01, help="Days for which invitations can be joined with.")]


@study.command(epilog="Example: coterie study new hospitals --label diagnosis --data mine.csv --partners north,south")
def new(
    folder: Annotated[Path, typer.Argument(metavar="STUDY", help="A new folder.")],
    label: Annotated[str, typer.Option(help="The column to predict.")],
    data: Annotated[Path, typer.Option(help="Your own file: it says which columns there are, and is the target.")],
    partners: Partners = "",
    engine: Annotated[str, typer.Option(help="The network of the study: nvflare or embedded.")] = "nvflare",
    host: Annotated[str, typer.Option(help="The name or address by which partners reach this machine.")] = "localhost",
    port: Annotated[int | None, typer.Option(help="The port that partners dial.")] = None,
    kind: Annotated[Literal["auto", "classification", "regression"], typer.Option(help="Kind of the label.")] = "auto",
    categorical: Annotated[
        str, typer.Option(metavar="A,B", help="Columns of numbers that are categories, with commas between them.")
    ] = "",
    drop: Annotated[str, typer.Option(metavar="A,B", help="Columns to leave out, with commas between them.")] = "",
    missing: Annotated[str, typer.Option(metavar="A,B", help="Further words that stand for no value.")] = "",
    least_rows: Annotated[int, typer.Option(min=1, help="Rows that a site needs to participate.")] = 20,
    scaling: Annotated[Literal["common", "own", "robust"], typer.Option(help="As in problem files.")] = "common",
    impute: Annotated[Literal["mean", "median", "regression"], typer.Option(help="As in problem files.")] = "mean",
    days: Days = 30,
    protection: Annotated[
        Literal["trust", "sums", "noise"] | None,
        typer.Option("--protect", help="What protects partners from a curious coordinator; asked for if not given."),
    ] = None,
) -> None:
    """Make a study of your file: study.toml, certificates, one invitation per partner, and settings for their sites.

    With --engine embedded it can only be tried on this machine.
    """
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
        from coterie.study.home import suggested

        _, invitations = coordinator.new(
            folder, terms, data, engine=engine, host=host, port=port, partners=_listed(partners), days=days
        )
        print(folder / "study.toml")
        chosen = protection or _asked_protection()
        (folder / "site.toml").write_text(suggested(chosen), encoding="utf-8")
        print(f"{folder / 'site.toml'}    (settings for the partners' sites, protected by {chosen}: send it along)")
        for path in invitations:
            print(f"{path}    (holds keys: send it to this partner only)")
    print(f"Partners are told: {', '.join(terms.form.features)}; label {terms.label}; rounded quartiles of numbers;")
    print("the words of your columns of words. Your rows stay here.")
    if engine != "embedded":
        print(f"Then: coterie study serve {folder}")
    print(f"To try it on this machine: coterie run --study {folder} --sites 'sites/*.csv'")


@study.command(epilog="Example: coterie study invite hospitals --partners east")
def invite(folder: Folder, partners: Partners, days: Days = 30) -> None:
    """Invite more partners, or one of them again; then start the server again."""
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    found, names = Study.read(folder), _listed(partners)
    if not names:
        raise UsageError("name the partners: --partners east,west.")
    for name, path in zip(names, coordinator.invite(found, names, days)[1], strict=True):
        again = f"; the invitation that {name} had is no longer accepted" if name in found.sites else ""
        print(f"{path}    (holds keys: send it to this partner only{again})")
    print(f"A server that runs must be started again: coterie study serve {folder}")


@study.command(epilog="Example: coterie study remove hospitals --partners north")
def remove(folder: Folder, partners: Partners) -> None:
    """Take partners out of a study, such as one that has left: later runs neither ask them nor wait for them."""
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    names = _listed(partners)
    rest = coordinator.remove(Study.read(folder), names)
    print(f"Their keys and invitations here are deleted. The sites are now: {', '.join(rest.sites) or 'none'}.")
    for name in names:
        print(f"What is still kept of {name}: coterie study kept {folder} {name}")


@study.command(epilog="Example: coterie study serve hospitals")
def serve(folder: Folder) -> None:
    """Run the server that partners dial, until it is stopped.

    The folder has a systemd unit and a Dockerfile for it.
    """
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    coordinator.serve(Study.read(folder))


@study.command(epilog="Example: coterie study status hospitals")
def status(
    folder: Folder,
    ask: Annotated[bool, typer.Option("--ask", help="Ask the sites now for rows, version and clock.")] = False,
    json: Json = False,
) -> None:
    """Show the sites: whether they are connected, rows as declared, clock, version, last seen."""
    from coterie.engines.follow import stderr_logger
    from coterie.problems.sites.folder import Study
    from coterie.study import coordinator

    found = Study.read(folder)
    if ask:
        coordinator.agreed(found, stderr_logger({"json": json}))
    print_rows(coordinator.status(found), json)


@study.command(epilog="Example: coterie study kept hospitals north")
def kept(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="SITE", help="The name of the site.")],
    json: Json = False,
) -> None:
    """List what the coordinator keeps of a site: every file, and what it holds."""
    from coterie.problems.sites.folder import Study
    from coterie.study.kept import kept as files_kept

    rows = files_kept(Study.read(folder), name)
    if rows or json:
        print_rows(rows, json)
    else:
        print(f"Nothing is kept of {name}.")


@site.command(epilog="Example: coterie site check theirs.csv --invitation north.invite")
def check(
    data: Annotated[Path, typer.Argument(help="Your file.")], invitation: InvitationFile, policy: Settings = None
) -> None:
    """Compare your file with the study, and report what will leave this site and what never does. Nothing is sent."""
    from coterie.study import site as partner
    from coterie.study.home import read_settings
    from coterie.study.invitation import Invitation

    found = Invitation.read(invitation)
    checked = partner.check(data, found, policy)
    for key, value in partner.about(found).items():
        print(f"{key}: {value}")
    _print("What will leave this site", partner.what_leaves(found.terms, read_settings(policy)[0]))
    _print("What never leaves it", partner.what_stays(found.terms))
    print(f"\nA curious coordinator could learn: {partner.what_is_learnt(read_settings(policy)[0].node)}.")
    _print("Notes", list(checked.found.notes))
    faults = [f"{fault.what}\n    {fault.remedy}" for fault in checked.found.faults]
    _print("Faults, which only you are told", [*faults, *([checked.refusal] if checked.refusal else [])])
    found.check_date()
    found.check_version()
    if not checked.fits:
        raise typer.Exit(1)
    print(f"\n{data.name}: {checked.found.rows} rows fit the study.")
    named = f" --policy {policy}" if policy else ""
    print(f"Then: coterie site join --invitation {invitation} --data {data}{named}")


@site.command(epilog="Example: coterie site join --invitation north.invite --data theirs.csv --policy site.toml")
def join(
    invitation: Annotated[Path | None, typer.Option(help="The file that the coordinator sent you.")] = None,
    data: Annotated[Path | None, typer.Option(help="Your file.")] = None,
    policy: Settings = None,
    home: Home_ = None,
    service: Annotated[bool, typer.Option("--service", help="Write a systemd unit and a Dockerfile, and end.")] = False,
) -> None:
    """Participate in a study until it is stopped. This machine dials the coordinator; no port is opened here."""
    from coterie.study import site as partner
    from coterie.study.home import Home
    from coterie.study.invitation import Invitation

    if invitation is not None:
        found = partner.prepare(Invitation.read(invitation), data, policy, home)
    else:
        found = Home.find(home)
        if data is not None or policy is not None:
            found = partner.prepare(found.invitation, data, policy, found.folder)
    if service:
        paths = partner.service(found)
        for path in paths:
            print(path)
        print(f"Install it with: systemctl --user enable --now {paths[0]}; and: loginctl enable-linger")
        return
    about = found.invitation
    print(f"{about.site} participates in {about.study}, at {about.address}; its folder is {found.folder}.", flush=True)
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
    """Take the models that the coordinator sent; `coterie predict` uses them.

    A model of your own, where every site is a target, comes with your row of the weights: who helped you.
    """
    from coterie.study import site as partner
    from coterie.study.delivery import ROW, as_line
    from coterie.study.home import Home

    folders = partner.receive(Home.find(home), out)
    for folder in folders:
        print(f"{folder}    (coterie predict {folder} FILE)")
    if lines := [as_line(folder) for folder in folders if (folder / ROW).is_file()]:
        print_rows(lines, False)


@site.command(epilog="Example: coterie site leave")
def leave(home: Home_ = None) -> None:
    """Leave a study: delete its invitation, keys, settings, logs and memory here; journal and received models stay.

    Stop the site first. The coordinator keeps what `coterie study kept` lists there.
    """
    from coterie.study import site as partner
    from coterie.study.home import Home

    found = Home.find(home)
    about, left = found.invitation, partner.leave(found)
    print(f"{about.site} has left {about.study}: {found.folder} is deleted, with its keys and settings.")
    for what, path in (("journal", left.journal), ("models received", left.received)):
        if path is not None:
            print(f"Kept here: {path} ({what})")
    print(f"Tell the coordinator, who then runs: coterie study remove {about.study} --partners {about.site}")
    print(f"and lists what is kept there of this site with: coterie study kept {about.study} {about.site}")


@app.command(rich_help_panel=PARTNERS, epilog="Example: coterie doctor hospitals")
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


def _asked_protection() -> Literal["trust", "sums", "noise"]:
    """What protects the partners from a curious coordinator; trust, where nobody can be asked."""
    if not sys.stdin.isatty():
        return "trust"
    print("What protects your partners from a curious coordinator? trust: nothing, it could compute single rows.")
    print("sums: training leaves in sums over sites only. noise: every answer has noise; models are less accurate.")
    choice: Literal["trust", "sums", "noise"] = typer.prompt(
        "trust, sums or noise", type=Choice(["trust", "sums", "noise"]), default="trust"
    )
    return choice


def _print(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}:")
        for line in lines:
            print(f"  - {line}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
