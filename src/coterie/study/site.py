"""A partner's side of a study: look at the file first, join, see what left, take what came, leave."""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import RunError, UsageError
from coterie.problems.sites.holding import HOME, Examined, examine
from coterie.problems.sites.terms import Terms
from coterie.study.coordinator import check_certificates, network
from coterie.study.home import JOURNAL, KIT, RECEIVED, Home, SitePolicy, read_settings
from coterie.study.invitation import Invitation
from coterie.study.supervise import dockerfile, supervise, unit


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
            "in an advice: losses and gradients over all your rows, and how your labels follow predictions: sums only"
        )
    if policy.shares_memory:
        lines.append("models that your site remembers, for the coordinator's records")
    return lines


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


def prepare(invitation: Invitation, data: Path, settings: Path | None, folder: Path | None) -> Home:
    """Make the site's home, after the file was checked: a file that does not fit is not joined with."""
    invitation.check_date()
    checked = check(data, invitation, settings)
    if not checked.fits:
        lines = [f"  {fault.what}. {fault.remedy}" for fault in checked.found.faults]
        lines += [f"  {checked.refusal}"] if checked.refusal else []
        raise UsageError("\n".join([f"{data} does not fit the study {invitation.study}; nothing was sent.", *lines]))
    home = Home.of(invitation, folder)
    home.join(invitation, data, settings)
    module = network(invitation.engine)
    module.install_kit(home.folder / KIT, invitation.files)
    module.prepare_site(home.folder)
    return home


def run(home: Home) -> None:
    """Take part until it is stopped; the site dials the coordinator, and opens no port to the network."""
    invitation = home.invitation
    module = network(invitation.engine)
    check_certificates(home.folder / KIT, f"ask the coordinator for another invitation to {invitation.study}")
    environment = {
        HOME: str(home.folder.resolve()),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        **module.site_environment(home.folder.resolve()),
    }
    command = module.client_command(home.folder.resolve() / KIT, invitation.site, invitation.address)
    log = home.folder.resolve() / "site.log"
    supervise(command, environment, home.folder.resolve(), log, explain=module.explain)


def service(home: Home) -> list[Path]:
    """Write a systemd unit and a Dockerfile that keep the site running; the files."""
    invitation = home.invitation
    command = ["site", "join", "--home", str(home.folder.resolve())]
    text = unit(f"site {invitation.site} of study {invitation.study} of coterie", command)
    files = {home.folder / f"coterie-{invitation.study}-{invitation.site}.service": text}
    inside = [
        "site",
        "join",
        "--home",
        f"/home/coterie/.local/state/coterie/sites/{invitation.study}-{invitation.site}",
    ]
    files[home.folder / "Dockerfile"] = dockerfile(invitation.engine, inside)
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
        for name in ("model.safetensors", "preprocess.json"):
            shutil.copyfile(path.parent / name, target / name)
        made.append(target)
    return made


def leave(home: Home) -> Path:
    """Remove the site's home with its keys, except for the journal; where that is now."""
    journal = home.folder / JOURNAL
    kept = home.folder.with_name(f"{home.folder.name}-journal.jsonl")
    if journal.is_file():
        shutil.copyfile(journal, kept)
    shutil.rmtree(home.folder)
    return kept


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
