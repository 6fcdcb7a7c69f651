"""`coterie run --engine nvflare`: a deployment of FLARE on this machine (its POC mode), started and ended here.

The job's server side writes the result folder; this process starts things, reports the rounds, and ends everything.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from nvflare.collab import CollabRecipe
from nvflare.recipe.poc_env import PocEnv

from coterie.engines.follow import follow, how_to_resume, interruptible, read_result, stderr_logger
from coterie.engines.lifetime import Lifetime, end_left_over, free_ports, with_variable
from coterie.engines.nvflare.app import Client, Server
from coterie.engines.nvflare.compute import sealed
from coterie.errors import RunError
from coterie.experiment.build import build_problem_and_method
from coterie.experiment.config import Config
from coterie.experiment.records import check
from coterie.experiment.rehearsal import announced
from coterie.experiment.run import Watch

MEMORY = "clients"
HOST = "localhost"  # FLARE binds a server of this name to 127.0.0.1, and one of any other name to all interfaces
ADMIN = "admin@nvidia.com"  # the user as whom FLARE's POC mode submits jobs
LOGIN = 60.0  # seconds for FLARE's server to come up


def launch(
    config: Config, folder: Path, watch: Watch, *, force: bool, resume: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Run or resume a configuration on FLARE; the summary."""
    if not resume:
        check(folder, force=force)
    problem, method = build_problem_and_method(config)
    sites = [f"site-{k + 1}" for k in range(problem.clients)]
    log = stderr_logger(options)
    for line in announced(config, problem, method):
        log(line)
    if left := end_left_over():
        log(left)
    with interruptible(), Lifetime("nvflare") as life:
        result = life.folder / "answer.json"
        here = folder.resolve()
        paths: dict[str, Any] = {"folder": str(here), "memory": str(here / MEMORY), "answer": str(result)}
        job = recipe("coterie", sites, config=config.as_toml(), force=force, **paths)
        log(f"NVIDIA FLARE: starting a server and {len(sites)} sites on this machine")
        with deployment(life, sites) as poc:
            number = poc.deploy(job.finalize())
            life.note()
            log(f"job {number} was submitted; results go to {folder}")
            status = follow(folder, result, log, lambda: str(poc.get_job_status(number)))
            if status is not None:
                raise RunError(f"the job ended without a result ({status}). {how_to_resume(folder)}")
            return read_result(result)


def recipe(
    name: str,
    sites: list[str],
    *,
    config: str,
    folder: str,
    memory: str = "",
    answer: str = "",
    force: bool = False,
    load: str = "",
    modules: tuple[str, ...] = (),
    shares_memory: bool = False,
    minimum: int | None = None,
    files: tuple[str, ...] = (),
    policy: str = "",
) -> CollabRecipe:
    """The job of a run. Site number k is client k.

    Args:
        name: the name of the job.
        sites: the names of the sites.
        config: the configuration, as TOML.
        folder: the result folder on the server's machine.
        memory: the folder of client memory at the sites; without one it ends with the job.
        answer: the file for the result, where the process that submits the job follows it.
        force: whether results in the folder may be replaced.
        load: "module:function" that returns the `ClientData` of a site, given its name. Without it, every site builds
            the configured problem and keeps the rows of its client.
        modules: modules with works of your own.
        shares_memory: whether the server may ask for client memory, for its records.
        minimum: the number of sites with which the job begins, all by default; FLARE admits none later.
        files: files that go with the job.
        policy: the path of a TOML file at the sites that limits what a server may ask for. A file that a site names in
            the variable COTERIE_NODE_POLICY comes before it.
    """
    here = {"sites": sites, "config": config}
    server = {**here, "folder": folder, "answer": answer, "force": force, "own_rows": bool(load)}
    client = {**here, "memory": memory, "load": load, "modules": list(modules), "shares_memory": shares_memory}
    client["policy"] = policy
    job = CollabRecipe(
        name, Server(sealed(server)), Client(sealed(client)), sync_task_timeout=300, min_clients=minimum or len(sites)
    )
    for file in files:
        job.add_client_file(file)
    return job


@contextmanager
def deployment(life: Lifetime, sites: list[str]) -> Iterator[PocEnv]:
    """A server and sites that talk over loopback, on ports that were free, ended whatever happens."""
    port, admin_port = free_ports(2)
    project = life.folder / "project.yml"
    project.write_text(json.dumps(_project(sites, port, admin_port)), encoding="utf-8")  # JSON is YAML
    with with_variable("NVFLARE_POC_WORKSPACE", str(life.folder / "poc")):
        people = {"clients": sites, "num_clients": len(sites), "username": ADMIN}
        poc = PocEnv(**people, project_conf_path=str(project), extra={"login_timeout": LOGIN})
        with life.inherited(), Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            try:
                yield poc
            finally:
                poc.stop()


def _project(sites: list[str], port: int, admin_port: int) -> dict[str, Any]:
    """FLARE's description of a federation: the participants, and what makes their certificates and start-up kits."""
    people = [{"name": ADMIN, "type": "admin", "org": "coterie", "role": "project_admin"}]
    server = {"name": HOST, "type": "server", "org": "coterie", "fed_learn_port": port, "admin_port": admin_port}
    clients = [{"name": site, "type": "client", "org": "coterie"} for site in sites]
    builders = "nvflare.lighter.impl."
    return {
        "api_version": 3,
        "name": "coterie",
        "description": "a federation on one machine",
        "participants": [server, *clients, *people],
        "builders": [
            {"path": f"{builders}workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{builders}static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{builders}cert.CertBuilder"},
            {"path": f"{builders}signature.SignatureBuilder"},
        ],
    }
