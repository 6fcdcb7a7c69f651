"""All methods, in one tuple. Command line, configuration, conformance tests and docs follow from it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from coterie.errors import unknown
from coterie.methods.base import Method
from coterie.methods.fedavg import fedavg
from coterie.methods.local_train import local_train
from coterie.methods.meritfed import meritfed


class MethodEntry(NamedTuple):
    """A method: its name, its factory, its paper, what it is, and whether it learns weights."""

    name: str
    make: Callable[..., Method]
    paper: str
    summary: str
    learns_weights: bool = False


METHODS: tuple[MethodEntry, ...] = (
    MethodEntry("fedavg", fedavg, "McMahan et al. 2017", "plain averaging of local walks"),
    MethodEntry("local-train", local_train, "baseline", "the target alone, on its own rows"),
    MethodEntry("meritfed", meritfed, "MeritFed (Tupitsa et al. 2024)", "mirror descent on the target's loss", True),
)


def method_entry(name: str) -> MethodEntry:
    """The entry of that name; an unknown one is an error that lists the nearest."""
    for entry in METHODS:
        if entry.name == name:
            return entry
    raise unknown("method", name, (entry.name for entry in METHODS))


def defaults(name: str) -> dict[str, Any]:
    """The default settings of a method."""
    from coterie.problems.parameters import checked

    return checked(method_entry(name).make, "method", {})
