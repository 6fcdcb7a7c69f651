"""All problems, in one tuple. Command line, configuration and docs follow from it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from coterie.errors import unknown
from coterie.problems.friends import friends
from coterie.problems.quadratic import quadratic


class ProblemEntry(NamedTuple):
    """A problem: its name, how it is made, what it is, what a run compares with, and method settings that suit it."""

    name: str
    make: Callable[..., Any]
    summary: str
    baselines: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


PROBLEMS: tuple[ProblemEntry, ...] = (
    ProblemEntry(
        "friends",
        friends,
        "digits at 15 clients; 5 are the target's friends, 10 have permuted labels",
        ("local-train", "fedavg"),
        {"meritfed": {"step": 1.0, "mirror_step": 0.01}},
    ),
    ProblemEntry("quadratic", quadratic, "linear regression with known θ*(w), F(w), ∇F(w) and w*"),
)


def problem_entry(name: str) -> ProblemEntry:
    """The entry of that name; an unknown one is an error that lists the nearest."""
    for entry in PROBLEMS:
        if entry.name == name:
            return entry
    raise unknown("problem", name, (entry.name for entry in PROBLEMS))
