"""The coordinator's side of a study: make it, invite partners, serve it, see who is there, and run on it."""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NoReturn

from coterie.engines.embedded import plan_of
from coterie.engines.estimate import exchanges_of, time_text
from coterie.engines.follow import Log, follow, how_to_resume, interruptible, read_result, stderr_logger
from coterie.errors import RunError, UsageError
from coterie.experiment.build import build_problem_and_method
from coterie.experiment.config import Config
from coterie.experiment.records import check
from coterie.experiment.run import Watch
from coterie.problems.sites.agreement import ABSENT, Agreement
from coterie.problems.sites.agreement import FOLDER as AGREEMENTS
from coterie.problems.sites.folder import FILE, Study
from coterie.problems.sites.terms import Terms
from coterie.storage import write_json
from coterie.study.advice import advice_plan
from coterie.study.invitation import VALID_DAYS, Invitation, check_name, dates_of, expiry
from coterie.study.jobs import for_sites
from coterie.study.kept import INVITATIONS, MEMBERS, forget_invitations, keys_of, note_invitation, note_run, shares
from coterie.study.supervise import Task, become, dockerfile, listens, unit

NETWORK = "nvflare"  # of studies: the name of the engine, of its package, and of the extra that brings it
PORTS = (8002, 8003)
NO_FLOWER = (
    "On Flower, whoever submits a run sends the code that its nodes run, and a site of a study runs no code of others. "
    "Methods on Flower: coterie run --engine flower."
)
CONNECT = 5.0  # seconds to wait for invited sites to connect
PATIENCE = 60.0  # seconds in which a site that is connected begins the handshake


def network(engine: str) -> ModuleType:
    """The network that a study's sites join; an error says why there is none of that name, or what to install."""
    if engine != NETWORK:
        reason = f" {NO_FLOWER}" if engine == "flower" else ""
        raise UsageError(f"studies run on nvflare, or on this machine only (embedded), not on {engine!r}.{reason}")
    if find_spec(NETWORK) is None:
        raise UsageError(f"this study needs the package {NETWORK}; pip install 'coterie[{NETWORK}]'.")
    from coterie.study import flare

    return flare


def new(
    folder: Path,
    terms: Terms,
    data: Path,
    *,
    engine: str,
    host: str,
    port: int | None = None,
    partners: Sequence[str] = (),
    days: float = VALID_DAYS,
    problem: Mapping[str, Any] | None = None,
) -> tuple[Study, list[Path]]:
    """Make a study: study.toml, certificates, and one invitation per partner.

    Args:
        folder: a new folder.
        terms: what sites are told.
        data: the coordinator's own file.
        engine: nvflare.
        host: the name or address by which partners reach this machine.
        port: the port that partners dial; the next one is the coordinator's own.
        partners: names of the partners' sites.
        days: how long invitations can be joined with.
        problem: settings of the problem that runs begin with.
    """
    folder = folder.resolve()
    name = folder.name
    check_name(name, "study")
    if (folder / FILE).exists() or (folder.exists() and any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; choose a new folder, or invite with: coterie study invite {folder}.")
    for partner in partners:
        check_name(partner, "site")
    if len(set(partners)) < len(partners):
        raise UsageError("two partners have the same name; name each of them once.")
    module = network(engine)
    ports = PORTS if port is None else (port, port + 1)
    study = Study(folder, name, terms, data, engine, host, ports, tuple(partners), dict(problem or {}))
    study.write()
    folder.chmod(0o700)
    module.provision(study)
    command = ["study", "serve", str(folder.resolve())]
    (folder / f"coterie-{name}.service").write_text(unit(f"study {name} of coterie", command), encoding="utf-8")
    folders = [(folder, True), (data.resolve().parent, False)]
    (folder / "Dockerfile").write_text(dockerfile(engine, command, folders=folders, ports=ports), encoding="utf-8")
    return study, [_invitation(study, partner, days) for partner in partners]


def invite(study: Study, partners: Sequence[str], days: float = VALID_DAYS) -> tuple[Study, list[Path]]:
    """Invite more partners, or an invited one again; a server that runs must be started again to know new ones."""
    for partner in partners:
        check_name(partner, "site")
    if len(set(partners)) < len(partners):
        raise UsageError("two partners have the same name; name each of them once.")
    fresh = tuple(partner for partner in partners if partner not in study.sites)
    study = study._replace(sites=(*study.sites, *fresh))
    network(study.engine).provision(study)
    study.write()
    _forget_member(study, partners)  # whoever is invited again may join from elsewhere
    return study, [_invitation(study, partner, days) for partner in partners]


def remove(study: Study, partners: Sequence[str]) -> Study:
    """Take partners out of a study: later runs neither ask them nor wait for them, and their keys here are deleted.

    Args:
        study: the study.
        partners: names of the partners' sites.
    """
    for partner in partners:
        if partner not in study.sites:
            raise UsageError(f"{study.name} has no site {partner!r}; its sites are {', '.join(study.sites) or 'none'}.")
    study = study._replace(sites=tuple(site for site in study.sites if site not in partners))
    study.write()
    _forget_member(study, partners)
    forget_invitations(study.folder, partners)
    for partner in partners:
        for path in keys_of(study, partner):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return study


def _forget_member(study: Study, partners: Sequence[str]) -> None:
    """Forget the numbers that sites drew when they joined."""
    members = study.folder / MEMBERS
    if members.is_file():
        known = json.loads(members.read_text(encoding="utf-8"))
        write_json(members, {site: number for site, number in known.items() if site not in partners})


def _invitation(study: Study, partner: str, days: float) -> Path:
    kit = network(study.engine).kit_of(study, partner)
    address = f"{study.host}:{study.ports[0]}"
    found = Invitation(study.name, partner, study.engine, address, expiry(days), study.terms, kit)
    note_invitation(study.folder, found)
    return found.write(study.folder / INVITATIONS / f"{partner}.invite")


def serve(study: Study) -> NoReturn:
    """Run the coordinator's server until it is stopped."""
    module = network(study.engine)
    _check_certificates(study.folder / module.FOLDER)
    module.prepare_server(study)
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    folder, log = str(study.folder), study.folder / "server.log"
    ready = f"{study.name} listens on {study.host}:{study.ports[0]}; its log is {log}."
    become(Task(module.server_command(study), environment, folder, str(log), study.ports[0], ready))


def _check_certificates(folder: Path) -> None:
    """Refuse a server's certificates that have expired; of several with the same name, the newest counts."""
    for name in ("server.crt", "rootCA.pem"):
        found = sorted(folder.rglob(name), key=lambda path: path.stat().st_mtime)
        if found and dates_of(found[-1])[1] < datetime.now(UTC):
            ended = dates_of(found[-1])[1]
            raise RunError(f"the certificate {name} expired on {ended:%Y-%m-%d}; make a new study: coterie study new.")


def status(study: Study) -> list[dict[str, Any]]:
    """Every invited site: whether it is connected, and what it last declared."""
    if not listens(study.host, study.ports[0]):
        raise RunError(
            f"the server of {study.name} does not listen on {study.host}:{study.ports[0]}; start it with: "
            f"coterie study serve {study.folder}."
        )
    here = network(study.engine).FlareLink(study).connected()
    known = last_agreement(study)
    declared = {} if known is None else {site.name: site for site in known.sites}
    rows = []
    for site in study.sites:
        found = declared.get(site)
        rows.append(
            {
                "site": site,
                "connected": site in here,
                "last seen": _when(here.get(site, "")),
                "rows": None if found is None else found.rows,
                "clock ahead, s": None if found is None else found.clock,
                "version": None if found is None or known is None else known.version,
                "note": "" if known is None else known.left_out.get(site, ""),
            }
        )
    return rows


def _when(text: str) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(text)))
    except ValueError:
        return text


def last_agreement(study: Study) -> Agreement | None:
    """What the sites agreed on last."""
    found = sorted((study.folder / AGREEMENTS).glob("*.json"), key=lambda path: path.stat().st_mtime)
    return Agreement.read(study.folder, found[-1].stem) if found else None


def connected(study: Study, log: Log) -> list[str]:
    """The invited sites that are connected, in the order of the study; late ones are named and awaited for a while."""
    link, deadline = network(study.engine).FlareLink(study), time.monotonic() + CONNECT
    absent, named = list(study.sites), list[str]()
    while True:
        here = link.connected()
        absent = [site for site in study.sites if site not in here]
        if not absent or time.monotonic() >= deadline:
            break
        if absent != named:
            log(f"waiting for {', '.join(absent)} to connect, {CONNECT:g} s at most")
            named = absent
        time.sleep(1.0)
    if len(absent) == len(study.sites):
        raise RunError(f"no site of {study.name} is connected; they join with: coterie site join.")
    return [site for site in study.sites if site not in absent]


def agreed(study: Study, log: Log) -> Agreement:
    """Ask the sites that are connected for scales and categories; what they agree on."""
    sites = connected(study, log)
    absent = {site: ABSENT for site in study.sites if site not in sites}
    log(f"{study.name}: asking the sites for scales and categories")
    try:
        result = _agreed(study, sites, absent, log)
    except Silent as error:
        if not (sites := [site for site in sites if site not in error.sites]):
            raise
        log(f"{', '.join(error.sites)}: connected, but silent; asking the others again")
        result = _agreed(study, sites, absent | dict.fromkeys(error.sites, "it is connected, but silent"), log)
    for site in result["sites"]:
        log(f"  {site['name']}: {site['rows']} rows")
    for name, reason in result["left_out"].items():
        log(f"  {name} takes no part: {reason}")
    return Agreement.read(study.folder, result["agreement"])


def _agreed(study: Study, sites: Sequence[str], absent: Mapping[str, str], log: Log) -> dict[str, Any]:
    job: dict[str, Any] = {"study": str(study.folder.resolve()), "stage": "agree"}
    job |= {"timeout": 120.0, "patience": PATIENCE}
    again = f"Ask again with: coterie study status {study.folder} --ask."
    job |= {"sites": list(sites), "absent": dict(absent)}
    return _done(study, job, for_sites(study, "agree", sites), study.folder, log, again)


def _begun(config: Config, study: Study, log: Log) -> Config:
    """A configuration with an agreement of its own, by which sites tell its run from all others."""
    agreement = replace(agreed(study, log), drawn=token_hex(4))
    agreement.write(study.folder)
    return replace(config, problem={**config.problem, "agreement": agreement.digest})


def launch(
    config: Config, folder: Path, watch: Watch, *, force: bool, resume: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Run or resume a configuration on the network of a study; the summary.

    Args:
        config: the resolved configuration, of problem study.
        folder: the result folder.
        watch: not used: rounds are read from the result folder.
        force: whether results in the folder may be replaced.
        resume: whether the run in the folder is resumed.
        options: `json` of the command line, `share` where the model is sent to the sites at the end; a run that is
            resumed does as it was told when it began.
    """
    study = Study.read(config.problem["folder"])
    log = stderr_logger(options)
    if not resume:
        check(folder, force=force)
    if not listens(study.host, study.ports[0]):
        raise RunError(f"the server of {study.name} is not there; start it with: coterie study serve {study.folder}.")
    if not config.problem["agreement"]:
        config = _begun(config, study, log)
    build_problem_and_method(config)  # misfits are explained before anything is started
    sites = [site.name for site in Agreement.read(study.folder, config.problem["agreement"]).sites]
    share = shares(study.folder, folder) if resume else bool(options.get("share"))
    note_run(study.folder, folder, "train", config.run.method, sites, share=share)
    job = {
        "study": str(study.folder.resolve()),
        "stage": "train",
        "config": config.as_toml(),
        "folder": str(folder.resolve()),
        "force": force,
        "share": share,
    }
    log(f"{study.name}: training with {len(sites)} sites; results go to {folder}")
    if not resume:
        log(training_time(config, Agreement.read(study.folder, config.problem["agreement"]).seconds))
    plan = plan_of(config, Agreement.read(study.folder, config.problem["agreement"]))
    return _done(study, job, for_sites(study, "train", sites, plan), folder, log, how_to_resume(folder))


def advised(config: Config, folder: Path, *, measure: str, cautious: bool, force: bool, json: bool) -> dict[str, Any]:
    """The advice of a study on its network, in one exchange.

    Args:
        config: the resolved configuration, of problem study.
        folder: the result folder.
        measure: what to decide by.
        cautious: use partners' models only where they are better by a standard error.
        force: whether results in the folder may be replaced.
        json: whether the command prints JSON.
    """
    study, log = Study.read(config.problem["folder"]), stderr_logger({"json": json})
    check(folder, force=force)
    if not listens(study.host, study.ports[0]):
        raise RunError(f"the server of {study.name} is not there; start it with: coterie study serve {study.folder}.")
    asked = _begun(config, study, log)
    agreement = Agreement.read(study.folder, asked.problem["agreement"])
    sites = [site.name for site in agreement.sites]
    note_run(study.folder, folder, "advise", config.run.method, sites)
    job = {
        "study": str(study.folder.resolve()),
        "stage": "advise",
        "config": asked.as_toml(),
        "folder": str(folder.resolve()),
        "force": force,
        "measure": measure,
        "cautious": cautious,
    }
    log(f"{study.name}: advice with {len(sites)} sites, in one exchange")
    told = for_sites(study, "train", sites, advice_plan(asked, study, agreement))
    return _done(study, job, told, folder, log, f"Ask again with: coterie advise --study {study.folder}.")


def training_time(config: Config, seconds: float) -> str:
    """How long a training will take, from the duration of an exchange in the handshake.

    Args:
        config: the configuration, with the agreement.
        seconds: duration of one exchange.
    """
    methods = [config, *(config.for_baseline(name) for name in config.run.baselines or [])]
    count = config.run.rounds * sum(exchanges_of(method) for method in methods)
    return f"about {time_text(count * seconds)}: {count} exchanges of {seconds:.2g} s, and the time to compute"


class Silent(RunError):
    """Sites that are connected, but did not begin a job, for which it ended."""

    def __init__(self, text: str, sites: Sequence[str]) -> None:
        super().__init__(text)
        self.sites = sites


def _done(
    study: Study, job: dict[str, Any], told: dict[str, Any], folder: Path, log: Log, again: str
) -> dict[str, Any]:
    """Do a job on the network; its result. `again` says how it is begun again where it ends without one."""
    link = network(study.engine).FlareLink(study)
    with interruptible(), TemporaryDirectory(prefix="coterie-") as scratch:
        answer = Path(scratch).resolve() / "answer.json"
        number = link.submit(job, told, answer)
        try:
            state = follow(folder, answer, log, lambda: link.status(number))
        except BaseException:
            with suppress(RunError):  # the server may be gone itself
                link.stop(number)
            raise
        if state is None:
            return read_result(answer)
        if silent := link.silent():
            names = ", ".join(silent)
            raise Silent(f"{names}: connected, but silent; start `coterie site join` there again. {again}", silent)
        raise RunError(f"the job ended without a result ({state}); see {study.folder / 'server.log'}. {again}")
