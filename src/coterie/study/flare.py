"""Studies on NVIDIA FLARE: certificates and start-up kits, the coordinator's server, a site's client, and jobs.

FLARE's own provisioning makes the certificates. Every connection is mutual TLS, and sites dial the coordinator. A
site's kit says that jobs bring no code and that nobody may run commands at the site.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.lighter.provision import prepare_builders, prepare_project
from nvflare.lighter.provisioner import Provisioner

from coterie.engines.nvflare.compute import sealed
from coterie.errors import RunError, UsageError
from coterie.problems.sites.folder import Study
from coterie.study.sides import StudyClient, StudyServer

FOLDER = "flare"
ADMIN = "coordinator@study.coterie"
LOGIN = 60.0
SILENT = 60.0  # seconds
NOBODY = "none"
BEGIN = 60.0  # seconds that a site may take to begin a job
UNHEARD = re.compile(r"failed to (?:sync|set up) clients \[([^\]]*)\]")
SITE_RULES = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {
            "submit_job": "any",
            "clone_job": NOBODY,
            "manage_job": "any",
            "download_job": NOBODY,
            "view": "any",
            "operate": NOBODY,
            "shell_commands": NOBODY,
            "byoc": NOBODY,
        },
    },
}
"""FLARE's rules at a site: the coordinator may start jobs; jobs bring no code (byoc), and no command is run."""
SITE_CLASSES = ["nvflare.collab.runtime.executor.CollabExecutor", "coterie.study.sides.StudyClient"]
SERVER_CLASSES = ["nvflare.collab.runtime.controller.CollabController", "coterie.study.sides.StudyServer"]
"""The only classes that a job may name at a site, and at the coordinator."""


def provision(study: Study) -> None:
    """Make certificates and start-up kits for the coordinator and all sites; those that exist keep theirs.

    Args:
        study: the study with all sites that are invited.
    """
    root = study.folder / FOLDER
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    project = _project(study)
    with _quiet():
        Provisioner(str(root), prepare_builders(project)).provision(prepare_project(project))
    prepare_server(study)


def _project(study: Study) -> dict[str, Any]:
    server: dict[str, Any] = {"name": study.host, "type": "server", "org": "coordinator"}
    server |= {"fed_learn_port": study.ports[0], "admin_port": study.ports[1]}
    sites = [{"name": site, "type": "client", "org": "partner"} for site in study.sites]
    admin = {"name": ADMIN, "type": "admin", "org": "coordinator", "role": "project_admin"}
    builders = "nvflare.lighter.impl."
    return {
        "api_version": 3,
        "name": "study",
        "description": "a study of coterie",
        "participants": [server, *sites, admin],
        "builders": [
            {"path": f"{builders}workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{builders}static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{builders}cert.CertBuilder"},
            {"path": f"{builders}signature.SignatureBuilder"},
        ],
    }


def kits(study: Study) -> Path:
    """The folder with the newest start-up kits."""
    found = sorted((study.folder / FOLDER / "study").glob("prod_*"))
    if not found:
        raise UsageError(f"{study.folder} has no certificates; make the study again with: coterie study new.")
    return found[-1]


def kit_of(study: Study, site: str) -> dict[str, bytes]:
    """The start-up kit of a site, by file."""
    folder = kits(study) / site
    wanted = ("client.crt", "client.key", "rootCA.pem", "fed_client.json", "signature.json")
    files = {f"startup/{name}": (folder / "startup" / name).read_bytes() for name in wanted if _is(folder, name)}
    local = {"local/log_config.json": (folder / "local" / "log_config.json.default").read_bytes()}
    local["local/authorization.json"] = json.dumps(SITE_RULES, indent=2).encode()
    local["local/resources.json"] = json.dumps(_resources(folder, SITE_CLASSES), indent=2).encode()
    return {**files, **local}


def _resources(folder: Path, classes: list[str]) -> dict[str, Any]:
    """FLARE's resources of a participant, with these classes only, and without sending logs to the coordinator."""
    found: dict[str, Any] = json.loads((folder / "local" / "resources.json.default").read_text(encoding="utf-8"))
    return {
        **found,
        "class_allow_list": classes,
        "class_list_enforcement_mode": "enforce",
        "allow_log_streaming": False,
    }


def _is(folder: Path, name: str) -> bool:
    return (folder / "startup" / name).is_file()


def server_command(study: Study) -> list[str]:
    """What runs the coordinator's server."""
    return _command("server.server_train", kits(study) / study.host, "fed_server.json", "org=coordinator")


def client_command(folder: Path, site: str, address: str) -> list[str]:
    """What runs a site's client, in the folder of its kit, which has the address."""
    return _command("client.client_train", folder, "fed_client.json", f"uid={site}", "org=partner")


def _command(module: str, folder: Path, config: str, *settings: str) -> list[str]:
    program = [sys.executable, "-u", "-P", "-m", f"nvflare.private.fed.app.{module}"]
    return [*program, "-m", str(folder), "-s", config, "--set", "secure_train=true", *settings, "config_folder=config"]


def prepare_server(study: Study) -> None:
    """Keep jobs in the study's own folder, and take a site that has been silent for a minute for gone.

    FLARE's own place is one folder for all servers of a machine: another study's server would take this study's jobs.
    """
    server = kits(study) / study.host
    found = _resources(server, SERVER_CLASSES)
    found["servers"][0]["heart_beat_timeout"] = SILENT
    text = json.dumps(found).replace("/tmp/nvflare/", f"{json.dumps(str((study.folder / FOLDER).resolve()))[1:-1]}/")
    (server / "local" / "resources.json").write_text(text, encoding="utf-8")


class FlareLink:
    """The coordinator's connection to its own FLARE server."""

    def __init__(self, study: Study) -> None:
        self.study, self.log = study, study.folder / "server.log"
        self.begun = self.log.stat().st_size if self.log.is_file() else 0

    def submit(self, job: dict[str, Any], told: dict[str, Any], answer: Path) -> str:
        """Start a job; its number.

        The job names classes of coterie, which sites have installed, and brings no code: sites would refuse it.
        """
        server = {"sites": told["sites"], "answer": str(answer), "job": job}
        client = {"sites": told["sites"], "job": told, "load": "coterie.study.node:for_flare", "memory": ""}
        sides = StudyServer(sealed(server)), StudyClient(sealed(client))
        recipe = CollabRecipe("coterie", *sides, sync_task_timeout=BEGIN, min_clients=1)
        recipe.set_per_site_config({site: {} for site in told["sites"]})
        with _quiet(), TemporaryDirectory() as folder:
            recipe.finalize().export_job(folder)
            for code in Path(folder).glob("coterie/*/custom"):
                shutil.rmtree(code)
            with self._session() as session:
                return str(session.submit_job(str(Path(folder) / "coterie")))

    def status(self, number: str) -> str:
        """How a job is doing."""
        with _quiet(), self._session() as session:
            return str(session.get_job_status(number))

    def silent(self) -> list[str]:
        """The connected sites that did not begin a job, for which FLARE has ended it, since this link was made."""
        with self.log.open("rb") as file:
            file.seek(self.begun)
            found = UNHEARD.findall(file.read().decode(errors="replace"))
        return sorted(set(re.findall(r"[\w-]+", " ".join(found))))

    def stop(self, number: str) -> None:
        """End a job."""
        with _quiet(), self._session() as session:
            session.abort_job(number)

    def connected(self) -> dict[str, str]:
        """The sites that are connected now, each with when it was last seen."""
        with _quiet(), self._session() as session:
            clients = session.get_system_info().client_info
            return {client.name: str(client.last_connect_time) for client in clients}

    @contextmanager
    def _session(self) -> Iterator[Any]:
        try:
            session = new_secure_session(ADMIN, str(kits(self.study) / ADMIN), timeout=LOGIN)
        except Exception as error:  # whatever FLARE raises where its server does not answer
            raise RunError(
                f"the coordinator's server does not answer ({error}); {SERVE} {self.study.folder}."
            ) from None
        try:
            yield session
        finally:
            session.close()


SERVE = "start it with: coterie study serve"


@contextmanager
def _quiet() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield
