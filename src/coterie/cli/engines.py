"""Engines other than the local one: how the command line starts them, and the commands list and stop."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from coterie.cli.app import Json, app, print_json, print_rows
from coterie.errors import RunError, UsageError, unknown

if TYPE_CHECKING:
    from coterie.experiment.config import Config


class EngineEntry(NamedTuple):
    """What starts an engine ("module:function"), the package it stands on, the extra that installs it, and in one line
    where its clients are."""

    start: str
    package: str
    extra: str
    about: str


ENGINES: dict[str, EngineEntry] = {
    "embedded": EngineEntry("coterie.engines.embedded:launch", "coterie", "", "every client at a node in this process"),
    "flower": EngineEntry("coterie.engines.flower.launch:launch", "flwr", "flower", "clients at SuperNodes of Flower"),
    "nvflare": EngineEntry("coterie.engines.nvflare.launch:launch", "nvflare", "nvflare", "clients at sites of FLARE"),
    "ray": EngineEntry("coterie.engines.ray.launch:launch", "ray", "ray", "groups of clients in processes of Ray"),
}


def listing() -> list[dict[str, Any]]:
    """All engines: coterie's own, and those that installed packages register."""
    from coterie import plugins

    known = {"local": "all clients in this process", **{name: entry.about for name, entry in ENGINES.items()}}
    own = [{"name": name, "from": plugins.OWN, "what": about} for name, about in known.items()]
    return [*own, *({"name": p.name, "from": p.source, "what": p.about} for p in plugins.listed("engine", known))]


def launcher(engine: str, problem: str = "") -> Callable[..., dict[str, Any]]:
    """launch(config, folder, watch, *, force, resume, options) → the summary, as `experiment.run.run` gives it.

    A study is run on the network that its partners have joined.
    """
    if problem == "study" and engine == "nvflare":
        from coterie.study.coordinator import launch as on_its_network

        return on_its_network
    if engine not in ENGINES:
        from coterie import plugins

        plugin = plugins.find("engine", engine)
        if plugin is None:
            raise unknown("engine", engine, ("local", *ENGINES))
        return plugin.load("run.engine")
    entry = ENGINES[engine]
    if find_spec(entry.package) is None:  # not imported here: an engine may have to set things up before
        raise UsageError(
            f"run.engine = {engine} needs the package {entry.package}; install it with: "
            f"pip install 'coterie[{entry.extra}]'."
        )
    module, _, name = entry.start.partition(":")
    launch: Callable[..., dict[str, Any]] = getattr(import_module(module), name)
    return launch


def study_settings(folder: Path) -> dict[str, Any]:
    """What a run of a study begins with: its problem and its engine."""
    from coterie.problems.sites.folder import Study
    from coterie.study.coordinator import network

    study = Study.read(folder)
    if study.engine == "embedded":
        raise UsageError(f"{folder} has no network; try it with: coterie study trial {folder} --sites 'sites/*.csv'.")
    network(study.engine)
    problem = {f"problem.{key}": value for key, value in study.problem.items()}
    return {"run.problem": "study", "run.engine": study.engine, "problem.folder": str(folder.resolve()), **problem}


def allow_registered(config: "Config") -> None:
    """Let the nodes that this command starts use the registered plug-ins of its configuration: they inherit consent."""
    from coterie.consent import allow_code

    allow_code(*(plugin.package for plugin in config.plugged_in() if plugin.installed))


def engine_of(folder: Path) -> str:
    """The engine of a result folder; local where that cannot be told, so that the usual errors follow."""
    from coterie.experiment.config import load

    path = folder / "config.toml"
    return load(path).run.engine if path.is_file() else "local"


engines = typer.Typer(help="Processes of other engines on this machine.", no_args_is_help=True)
app.add_typer(engines, name="engines")


@engines.command("list", epilog="Example: coterie engines list")
def list_(json: Json = False) -> None:
    """List the deployments of your runs on this machine, also those that a killed run has left."""
    from coterie.engines.lifetime import records

    rows = [
        {
            "id": record.mark[:8],
            "engine": record.engine,
            "begun": record.begun,
            "state": "left over" if record.is_left_over else "running",
            "processes": len(record.processes()),
            "ports": [str(port) for port in record.ports],
            "folder": record.folder,
        }
        for record in records()
    ]
    if rows or json:
        print_rows(rows, json)
    else:
        print("No deployments.")


@engines.command(epilog="Example: coterie engines stop")
def stop(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Deployments by their ids in `coterie engines list`.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also end the deployments of runs in progress.")] = False,
    json: Json = False,
) -> None:
    """End processes that killed runs have left, and remove their keys and folders.

    Without ids, runs in progress are left alone. Only processes that coterie has started are ended.
    """
    from coterie.engines.lifetime import records

    found, wanted = records(), ids or []
    if unknown := [name for name in wanted if not any(record.mark.startswith(name) for record in found)]:
        raise UsageError(f"there is no deployment {', '.join(unknown)}; see: coterie engines list.")
    named = [record for record in found if any(record.mark.startswith(name) for name in wanted)]
    chosen = named if wanted else [record for record in found if everything or record.is_left_over]
    rows = [
        {"id": record.mark[:8], "engine": record.engine, "ended": len(record.end()), "left": len(record.processes())}
        for record in chosen
    ]
    if json:
        print_json(rows)
    else:
        for row in rows:
            print(f"{row['engine']} {row['id']}: {row['ended']} processes ended, folder removed.")
        if not rows:
            print("Nothing is left over.")
    if any(row["left"] for row in rows):
        raise RunError("some processes could not be ended; see: coterie engines list.")
