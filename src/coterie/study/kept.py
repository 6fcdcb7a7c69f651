"""What a coordinator keeps of its sites: which invitation is theirs, and every file that holds something of a site."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from coterie.errors import UsageError, gist
from coterie.problems.sites.agreement import FOLDER as AGREEMENTS
from coterie.problems.sites.folder import FILE, Study
from coterie.storage import write_json
from coterie.study.invitation import Invitation

INVITATIONS = "invitations"
CURRENT = "invited.json"  # by site, the mark of the invitation that is accepted
RUNS = "runs.json"  # the result folders of the study, with the sites that participated
MEMBERS = "members.json"  # the numbers that sites drew when they joined


def mark_of(invitation: Invitation) -> str:
    """Names an invitation without giving away what is in it."""
    return blake2b(invitation.id.encode(), digest_size=8).hexdigest()


def note_invitation(folder: Path, invitation: Invitation) -> None:
    """From now on, this is the only invitation of its site that is accepted.

    Args:
        folder: of the study.
        invitation: the newest one.
    """
    write_json(folder / CURRENT, {**invited(folder), invitation.site: mark_of(invitation)})


def forget_invitations(folder: Path, sites: Sequence[str]) -> None:
    """No invitation of these sites is known any more."""
    write_json(folder / CURRENT, {site: mark for site, mark in invited(folder).items() if site not in sites})


def invited(folder: Path) -> dict[str, str]:
    """By site, the mark of the invitation that is accepted."""
    return dict(_read(folder / CURRENT, {}))


def note_run(
    folder: Path, results: Path, stage: str, method: str, sites: Sequence[str], *, share: bool = False
) -> None:
    """Remember a result folder, for `kept` and for whoever resumes it.

    Args:
        folder: of the study.
        results: the result folder.
        stage: train or advise.
        method: the name of the method.
        sites: the sites that participate.
        share: whether they receive the model at the end.
    """
    run = {"stage": stage, "method": method, "sites": [*sites], "share": share}
    write_json(folder / RUNS, {**_read(folder / RUNS, {}), str(results.resolve()): run})


def shares(folder: Path, results: Path) -> bool:
    """Whether a run was begun so that its sites receive the model at the end."""
    return bool(_read(folder / RUNS, {}).get(str(results.resolve()), {}).get("share"))


def _read(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({gist(error)}); restore it from a copy, or remove it.") from None


def keys_of(study: Study, site: str) -> list[Path]:
    """The files and folders at the coordinator that hold a site's keys or invitation."""
    patterns = f"{INVITATIONS}/{site}.invite", f"flare/study/prod_*/{site}"
    return sorted(path for pattern in patterns for path in study.folder.glob(pattern))


def kept(study: Study, site: str) -> list[dict[str, str]]:
    """What the coordinator keeps of a site: every file or folder, and what it holds.

    Args:
        study: the study.
        site: the name of the site.
    """
    found = {str(path): "its invitation or its keys" for path in keys_of(study, site)}
    if site in study.sites:
        found[str(study.folder / FILE)] = "its name"
    if site in _read(study.folder / MEMBERS, {}):
        found[str(study.folder / MEMBERS)] = "the number that it drew when it joined"
    if site in invited(study.folder):
        found[str(study.folder / CURRENT)] = "a mark of its invitation"
    for path in sorted((study.folder / AGREEMENTS).glob("*.json")):
        data = _read(path, {"sites": [], "left_out": {}})
        if any(entry["name"] == site for entry in data["sites"]):
            found[str(path)] = "its number of rows; its means, deviations, categories and counts within those of all"
        elif site in data["left_out"]:
            found[str(path)] = "why it did not participate"
    for name, run in _read(study.folder / RUNS, {}).items():
        if site in run["sites"] and Path(name).is_dir():
            found |= _of_run(Path(name), run, site)
    log = study.folder / "server.log"
    if log.is_file() and site.encode() in log.read_bytes():
        found[str(log)] = "when it connected"
    if site in _participated(study):
        for path in sorted(study.folder.glob(f"flare/study/prod_*/{study.host}")):
            found[str(path)] = "logs and jobs of FLARE's server: its name, when it connected, what was agreed"
    return [{"file": file, "holds": holds} for file, holds in found.items()]


def _participated(study: Study) -> set[str]:
    """The sites that have ever answered a handshake of a study."""
    agreements = [_read(path, {"sites": []}) for path in (study.folder / AGREEMENTS).glob("*.json")]
    return {entry["name"] for data in agreements for entry in data["sites"]}


def _of_run(folder: Path, run: dict[str, Any], site: str) -> dict[str, str]:
    """What a result folder holds of a site."""
    if run["stage"] == "advise":
        return {str(folder): f"advice.json: what was found out about {site}; the model, to which it contributed"}
    if run["method"] == "collaborate":
        client = f"client_{run['sites'].index(site)}"
        return {
            str(folder): f"its model ({client} in model*.safetensors and checkpoint/); its row and its column of the "
            "weights (weights.csv, summary.json); events that name it"
        }
    return {str(folder): "its weight (weights.csv, summary.json); events that name it; the model of all"}
