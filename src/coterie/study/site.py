"""A partner's side of a study: look at the file first, join, see what left, take what came, leave."""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from coterie.errors import RunError, UsageError
from coterie.federation.remote import NodePolicy
from coterie.problems.sites.holding import HOME, Examined, examine
from coterie.problems.sites.terms import Terms
from coterie.storage import sole_user
from coterie.study.coordinator import network
from coterie.study.delivery import MODEL, PREPROCESS, ROW
from coterie.study.home import JOURNAL, KIT, RECEIVED, Home, SitePolicy, read_settings
from coterie.study.invitation import Invitation, check_certificates, write_private
from coterie.study.supervise import Task, become, dockerfile, unit


class Checked(NamedTuple):
    """What `coterie site check` found: the file against the terms, and the policy's own refusal."""

    found: Examined
    refusal: str | None

    @property
    def fits(self) -> bool:
        """Whether this site can take part."""
        return not self.found.faults and self.refusal is None


def check(data: Path, invitation: Invitation, settings: Path | None) -> Checked:
    """Compare a file with the terms of an invitation, under the site's own settings; nothing is sent."""
    policy, choices = read_settings(settings)
    found = examine(data, invitation.terms, choices)
    refusal = None if found.tables is None else policy.refusal(invitation.terms, found.rows)
    return Checked(found, refusal)


def what_leaves(terms: Terms, policy: SitePolicy) -> list[str]:
    """What leaves a site that takes part, in plain words."""
    numbers, words = terms.form.numbers(), terms.form.codes()
    lines = ["the number of your rows, your clock, and that you are there"]
    if "agree" in policy.stages:
        if numbers:
            lines.append(f"count, mean and spread of your column{_s(numbers)} {_named(numbers)}, over all rows")
        if terms.scaling == "robust" or terms.impute == "median":
            lines.append("quartiles of these columns")
        if terms.impute == "regression":
            lines.append("sums of products of these columns")
        if words:
            lines.append(f"every category of {_named(words)}, and how many rows have it")
    if "train" in policy.stages:
        least = policy.node.least_batch
        lines.append(f"in training: sums of gradients or models, computed from at least {least} rows each")
        lines.append(
            "in a collaboration, where you are a target too: the gradient over your validation rows; the coordinator "
            "mixes the models, so that it sees yours and your row of the weights, but not how well your model does"
        )
        lines.append(
            "in an advice: losses and gradients over all your rows, and how your labels follow predictions: sums only"
        )
    if policy.shares_memory:
        lines.append("models that your site remembers, for the coordinator's records")
    return lines


def what_is_learnt(policy: NodePolicy) -> str:
    """What a curious coordinator could learn of this site's rows in training, in one sentence."""
    if policy.epsilon and policy.target:
        return (
            "all that answers of a target tell, which policy.target = true lets leave without noise, single rows with "
            "them"
        )
    if policy.epsilon:
        return (
            f"hardly anything of a single row, whatever it asks: every answer in training has noise, and all runs "
            f"together at most ε = {policy.epsilon:g} (δ = {policy.delta:g})"
        )
    if policy.secure and policy.target:
        return "single rows of yours: policy.target = true lets exact answers of a target and your memory leave"
    if policy.secure:
        total = policy.reveal_total or "fewer than the model has parameters"
        steep = (
            "" if policy.magnitude else ", and set policy.magnitude, as models that are steep enough single rows out"
        )
        numbers = f"{policy.reveal} single numbers of yours per round ({total} in all), and " if policy.reveal else ""
        return (
            f"{numbers}sums over at least {policy.partners} sites, which at one model differ by little more than your "
            f"part where another site is missing; only noise hides a row (policy.epsilon){steep}"
        )
    return (
        "single rows of yours: each answer is from at least "
        f"{policy.least_batch} rows, but about as many answers as you have rows determine them, or few at steep "
        "models; only noise prevents it (policy.epsilon)"
    )


def what_stays(terms: Terms) -> list[str]:
    """What never leaves a site, in plain words."""
    return [
        "your file and its name; no row, and no value of a single row",
        f"columns beside {_named((*terms.form.features, terms.label))}",
        "your settings, your journal, your keys",
        "what is wrong with your file: the coordinator is told the kind only",
    ]


def _s(names: tuple[str, ...]) -> str:
    return "s" if len(names) > 1 else ""


def _named(names: tuple[str, ...], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def prepare(invitation: Invitation, data: Path | None, settings: Path | None, folder: Path | None) -> Home:
    """Make the site's home, after the file was checked: a file that does not fit is not joined with.

    A site that joins again keeps its file and its settings where it names no others.
    """
    home = Home.of(invitation, folder)
    known = home.settings() if home.is_joined else {}
    if not known:
        invitation.check_date()
    invitation.check_version()
    data = data or (Path(known["data"]) if known else None)
    settings = settings or (Path(known["policy"]) if known.get("policy") else None)
    if data is None:
        raise UsageError("name your file with --data.")
    checked = check(data, invitation, settings)
    if not checked.fits:
        lines = [f"  {fault.what}\n    {fault.remedy}" for fault in checked.found.faults]
        lines += [f"  {checked.refusal}"] if checked.refusal else []
        raise UsageError("\n".join([f"{data} does not fit the study {invitation.study}; nothing was sent.", *lines]))
    home.join(invitation, data, settings)
    write_private(home.folder / KIT, invitation.files)
    return home


def run(home: Home) -> NoReturn:
    """Take part until it is stopped; the site dials the coordinator, and opens no port to the network."""
    check_certificates(home.folder / KIT)
    invitation = home.invitation
    environment = {
        HOME: str(home.folder.resolve()),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
    }
    command = network(invitation.engine).client_command(
        home.folder.resolve() / KIT, invitation.site, invitation.address
    )
    become(Task(command, environment, str(home.folder.resolve()), str(home.folder.resolve() / "site.log")))


def service(home: Home) -> list[Path]:
    """Write a systemd unit and a Dockerfile that keep the site running; the files."""
    invitation = home.invitation
    command = ["site", "join", "--home", str(home.folder.resolve())]
    text = unit(f"site {invitation.site} of study {invitation.study} of coterie", command)
    files = {home.folder / f"coterie-{invitation.study}-{invitation.site}.service": text}
    settings = home.settings()
    used = [Path(settings[key]).parent for key in ("data", "policy") if settings.get(key)]
    folders = [(home.folder.resolve(), True), *((path, False) for path in dict.fromkeys(used))]
    files[home.folder / "Dockerfile"] = dockerfile(invitation.engine, command, folders=folders)
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
    return list(files)


def receive(home: Home, out: Path) -> list[Path]:
    """Copy the models that the coordinator sent into a new folder each; the folders."""
    found = sorted((home.folder / RECEIVED).glob("*/model.safetensors"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RunError(
            "nothing has come yet. The coordinator sends the model with: coterie run --study … --share, and this site "
            "takes it unless policy.receive = false."
        )
    made = []
    for path in found:
        target = out / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        for name in (MODEL, PREPROCESS, ROW):
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, target / name)
        made.append(target)
    return made


class Left(NamedTuple):
    """What is left of a site that has left a study: its journal and models that it received; None where it has none."""

    journal: Path | None
    received: Path | None


def leave(home: Home) -> Left:
    """Delete the site's home: its invitation, keys, settings, logs and memory. Journal and received models stay."""
    with sole_user(home.folder):
        moved = [_moved(home.folder / name, home.folder) for name in (JOURNAL, RECEIVED)]
        shutil.rmtree(home.folder)
    return Left(*moved)


def _moved(path: Path, home: Path) -> Path | None:
    """A file or folder of a home, moved beside it; None where it does not exist."""
    if not path.exists():
        return None
    base = home.with_name(f"{home.name}-{path.name}")
    target, number = base, 1
    while target.exists():  # of an earlier time
        number += 1
        target = base.with_name(f"{base.stem}-{number}{base.suffix}")
    return path.rename(target)


def about(invitation: Invitation) -> dict[str, Any]:
    """What an invitation says of itself."""
    return {
        "study": invitation.study,
        "site": invitation.site,
        "engine": invitation.engine,
        "coordinator": invitation.address,
        "expires": f"{invitation.expires:%Y-%m-%d %H:%M} UTC",
        "version": invitation.version,
    }
