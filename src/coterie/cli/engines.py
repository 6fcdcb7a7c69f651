"""Engines other than the local one: how the command line starts them."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coterie.errors import UsageError, unknown

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


def study_settings(folder: Path, sites: str | None = None) -> dict[str, Any]:
    """What a run of a study begins with: its problem and its engine.

    Args:
        folder: of the study.
        sites: the pattern of files that stand for the sites, to try it on this machine.
    """
    from coterie.problems.sites.folder import Study
    from coterie.study.coordinator import network

    study = Study.read(folder)
    problem = {f"problem.{key}": value for key, value in study.problem.items()}
    problem |= {"run.problem": "study", "problem.folder": str(folder.resolve())}
    if sites is not None:
        return {**problem, "run.engine": "embedded", "problem.sites": sites}
    if study.engine == "embedded":
        raise UsageError(f"{folder} has no network; name files that stand for the sites: --sites 'sites/*.csv'.")
    network(study.engine)
    return {**problem, "run.engine": study.engine}


def allow_registered(config: "Config") -> None:
    """Let the nodes that this command starts use the registered plug-ins of its configuration: they inherit consent."""
    from coterie.consent import allow_code

    allow_code(*(plugin.package for plugin in config.plugged_in() if plugin.installed))


def engine_of(folder: Path) -> str:
    """The engine of a result folder; local where that cannot be told, so that the usual errors follow."""
    from coterie.experiment.config import load

    path = folder / "config.toml"
    return load(path).run.engine if path.is_file() else "local"
