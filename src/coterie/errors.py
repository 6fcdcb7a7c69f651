"""Errors that say what, where and the remedy. The command line prints them as one paragraph, without a traceback."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any
from unicodedata import category

LONGEST = 300  # characters of somebody else's text that are shown or recorded
LONGEST_NAME = 60  # characters of a client's name that are shown
NO_NUMBER = ("cannot convert float NaN", "math domain error")  # how such errors of Python's begin


class CoterieError(Exception):
    """Something the user can mend. exit_code is what the command line returns."""

    exit_code = 1


class UsageError(CoterieError):
    """Bad input: an unknown name, a value out of range, data that cannot be used."""

    exit_code = 2


class RunError(CoterieError):
    """The input was fine, but the run could not go on."""


class Uncomputable(RunError):
    """A method or a problem met numbers that it cannot compute with."""


class NoClients(RunError):
    """A phase has no result, and the round is skipped and counted.

    Args:
        message: why.
        phase: the work to which no client gave a sound reply, where that is why.
    """

    state: object = None  # the state after the round even so, where it has one

    def __init__(self, message: str, phase: str | None = None) -> None:
        super().__init__(message)
        self.phase = phase


class WorkError(CoterieError):
    """A work failed at a client, for a reason of its own."""


class PlacementError(CoterieError):
    """Server code tried to read a value that lives on the clients."""


def gist(error: BaseException) -> str:
    """The kind of an error and the first line of its text, for an error that explains it."""
    lines = str(error).splitlines()
    return clean(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def is_arithmetic(error: BaseException) -> bool:
    """Whether an error says that some numbers cannot be computed with: a division by 0, a matrix without an inverse.

    Args:
        error: of Python, numpy or torch.

    Example:
        >>> is_arithmetic(OverflowError("too large")), is_arithmetic(ValueError("no method"))
        (True, False)
    """
    algebra = any(kind.__name__.endswith("LinAlgError") for kind in type(error).__mro__)  # of numpy or of torch
    return isinstance(error, ArithmeticError) or algebra or str(error).startswith(NO_NUMBER)


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """'unknown method "merit"; did you mean meritfed?' with the whole list where nothing is near."""
    known = sorted(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}."
    return UsageError(f"unknown {kind} {name!r}; {hint}")


def clean(text: str, longest: int | None = LONGEST, *, keep: str = "") -> str:
    """Somebody else's text, made fit for a terminal and a line of a file: no control characters, and not long.

    Args:
        text: what a client, a file or another program said.
        longest: the number of characters that are kept; None keeps all.
        keep: control characters that stay, such as a newline.

    Example:
        >>> clean("lost\\x1b[2J it")
        'lost [2J it'
    """
    if longest is not None:
        text = text[: longest + 1]  # before anything looks at each character
    plain = "".join(c if c in keep or category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else " " for c in text)
    return plain if longest is None or len(plain) <= longest else plain[: longest - 1] + "…"


def client_label(client: int, names: Sequence[str] = ()) -> str:
    """How people see a client: by its name, made fit for a line, where it has one, else by its number.

    Args:
        client: its number.
        names: the names of all clients, where they have names (`Problem.names`).

    Example:
        >>> client_label(1), client_label(1, ["north.csv", "east.csv"])
        ('client 1', 'east.csv')
    """
    name = clean(names[client], LONGEST_NAME).strip() if 0 <= client < len(names) else ""
    return name or f"client {client}"


def cleaned(data: Any, longest: int = 10_000) -> Any:
    """Plain data of a file with `clean` texts, keys too, so that it can be shown.

    Args:
        data: what JSON or TOML gave.
        longest: the number of characters that are kept of each text.
    """
    if isinstance(data, str):
        return clean(data, longest, keep="\n")
    if isinstance(data, list):
        return [cleaned(value, longest) for value in data]
    if isinstance(data, dict):
        return {clean(str(key), longest): cleaned(value, longest) for key, value in data.items()}
    return data
