"""Engines other than the local one: how the command line starts them."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import UsageError


class EngineEntry(NamedTuple):
    """What starts an engine ("module:function"), the package it stands on and the extra that installs it."""

    start: str
    package: str
    extra: str


ENGINES: dict[str, EngineEntry] = {
    "flower": EngineEntry("coterie.flower.launch:launch", "flwr", "flower"),
    "nvflare": EngineEntry("coterie.nvflare_engine.launch:launch", "nvflare", "nvflare"),
    "ray": EngineEntry("coterie.ray_engine.launch:launch", "ray", "ray"),
}


def launcher(engine: str) -> Callable[..., dict[str, Any]]:
    """launch(config, folder, watch, *, force, resume, options) → the summary, as `experiment.run.run` gives it."""
    if engine not in ENGINES:
        raise UsageError(f"run.engine = {engine} is not in this version of coterie; use local or {', '.join(ENGINES)}.")
    entry = ENGINES[engine]
    if find_spec(entry.package) is None:  # not imported here: an engine may have to set things up before
        raise UsageError(
            f"run.engine = {engine} needs the package {entry.package}; install it with: "
            f"pip install 'coterie[{entry.extra}]'."
        )
    module, _, name = entry.start.partition(":")
    launch: Callable[..., dict[str, Any]] = getattr(import_module(module), name)
    return launch


def engine_of(folder: Path) -> str:
    """The engine of a result folder; local where that cannot be told, so that the usual errors follow."""
    from coterie.experiment.config import load

    path = folder / "config.toml"
    return load(path).run.engine if path.is_file() else "local"
