"""The names of works: one table and one resolver, for ledgers, orders to nodes, settings and checkpoints.

A built-in work is called family/verb-noun, whatever file it is in: the registry of methods and `FAMILIES` say which
module defines a family, so that a node imports that module only, and only if it is admitted. A work of your own has
such a name too, or it is called module:function. No name leads to the import of a module that is neither coterie's own
nor admitted.
"""

import re
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from typing import Any

FAMILIES = {
    "shared": "coterie.methods.shared.works",
    "parts": "coterie.methods.shared.parts",
    "hessian": "coterie.methods.shared.hessian",
    "curvature": "coterie.methods.shared.curvature",
    "mirror": "coterie.methods.weights.mirror",
    "fednest": "coterie.methods.nested.works",
    "nested": "coterie.methods.nested.works",
    "nested-exact": "coterie.methods.nested.exact_gd",
    "nested-sustain": "coterie.methods.nested.sustain",
    "nested-rfho": "coterie.methods.nested.rfho",
    "submodels": "coterie.methods.submodels.carving",
    "two-layer": "coterie.methods.compressed.two_layer",
    "advise": "coterie.ensemble.message",
    "files": "coterie.problems.files.prepare",
    "file-checks": "coterie.problems.files.faults",
    "private-files": "coterie.problems.files.private",
    "sites": "coterie.problems.sites.holding",
    "measures": "coterie.problems.tasks.personal",
    "models": "coterie.problems.models.statistics",
}
"""Which module defines the works of a family that is not called after a method; those of a method are in its file."""

_WORD = "[a-z0-9]+(-[a-z0-9]+)*"
STABLE = re.compile(f"{_WORD}/{_WORD}", re.ASCII)
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_TABLE: dict[str, Any] = {}


class UnknownWork(LookupError):
    """A name that is no work's, or of a work that is not admitted, and why."""


def register(name: str, function: Callable[..., Any]) -> None:
    """Enter a work in the table; a name that is malformed, taken or reserved for coterie is refused."""
    module = function.__module__
    if "/" in name:
        if not STABLE.fullmatch(name):
            raise TypeError(f"{name!r} is no name of a work; write family/verb-noun, in lowercase with hyphens")
        family = name.partition("/")[0]
        if (home := home_of(family)) not in (None, module):
            raise TypeError(f"{name}: the family {family!r} belongs to {home}; choose another one")
    known = _TABLE.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (module, function.__qualname__):
        raise TypeError(f"{module} calls a work {name}, and so does {known.__module__}; rename one of them")
    _TABLE[name] = function


def home_of(family: str) -> str | None:
    """The module of coterie that defines the works of a family; None where it is somebody else's."""
    if family in FAMILIES:
        return FAMILIES[family]
    return _families_of_methods().get(family)


@cache
def _families_of_methods() -> dict[str, str]:
    """By method, its module; looked up when it is needed, because methods come after the federation."""
    from coterie.methods.registry import METHODS

    return {entry.name: f"coterie.methods.{entry.home}" for entry in METHODS}


def find(name: str, modules: Collection[str] | None = None) -> Any:
    """The work of that name.

    Args:
        name: family/verb-noun or module:function.
        modules: the modules whose works are admitted ("package.*" stands for all modules of a package); they are
            imported where needed. None: coterie's own, and whatever this process has defined.
    """
    family, slash, _ = name.partition("/")
    module, colon, attribute = name.partition(":")
    if slash and STABLE.fullmatch(name):
        if (home := home_of(family)) is not None:
            _load(home, modules)
        elif name not in _TABLE:  # one of the operator's own modules may define it
            for own in modules or ():
                if not own.endswith(".*") and not own.startswith("coterie."):
                    _load(own, modules)
    elif colon and DOTTED.fullmatch(module) and DOTTED.fullmatch(attribute):
        if modules is not None:
            _load(module, modules)
    else:
        raise UnknownWork(f"{name[:80]!r} is not of the form family/verb-noun or module:function")
    found = _TABLE.get(name)
    if found is None:
        raise UnknownWork(f"{name} is no work that is known here; is the same version of coterie installed?")
    if modules is not None:
        _check(found.__module__, modules)
    return found


def _load(module: str, modules: Collection[str] | None) -> None:
    if modules is not None:
        _check(module, modules)
    try:
        import_module(module)
    except ImportError:
        raise UnknownWork(f"there is no {module} here; is the same version of coterie installed?") from None


def _check(module: str, modules: Collection[str]) -> None:
    if not admits(modules, module):
        raise UnknownWork(f"{module} is not among the modules that are admitted here")


def admits(modules: Collection[str], module: str) -> bool:
    """Whether a module is among those listed; "package.*" stands for all modules below a package."""
    return module in modules or any(entry.endswith(".*") and module.startswith(entry[:-1]) for entry in modules)
