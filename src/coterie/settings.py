"""Types of settings, shared by problems and methods; their bounds become error texts and help."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import cleandoc, signature, unwrap
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from coterie.errors import UsageError, unknown
from coterie.glossary import METHOD_SETTINGS, PROBLEM_SETTINGS
from coterie.schedules import Schedule, is_schedule, schedule

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
BatchSize = Annotated[int, Field(ge=1)] | Literal["all"]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class StatisticsPrivacy:
    """How the clients hide their part of federated statistics.

    Args:
        noise: the multiplier of the Gaussian noise that each client adds.
        bounds: by numeric column, the lowest and the highest value that counts; public.
        categories: by column of words, words that are public beside those of the target.
    """

    noise: float
    bounds: Mapping[str, Sequence[float]]
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)


def chosen(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The entry of that name; an unknown one is an error that lists the nearest.

    Args:
        kind: what the entries are, for the error.
        name: the name.
        known: the entries by name.
    """
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]


@cache
def schema(make: Callable[..., Any]) -> type[BaseModel]:
    """The keyword-only settings of a factory, as a model with their types, bounds and defaults."""
    hints = _hints(make)
    fields: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return create_model(f"{make.__name__}_settings", __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """The types of a factory's settings; one that has none is refused."""
    try:
        hints = get_type_hints(make, include_extras=True)
    except NameError as error:
        raise UsageError(f"a type in the signature of {make.__name__} is not known: {error}.") from None
    for name, parameter in signature(make).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in hints:
            raise UsageError(
                f"the setting {name} of {make.__name__} has no type; write for example {name}: "
                "coterie.settings.Positive = 0.1."
            )
    return hints


def checked(make: Callable[..., Any], table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a factory, complete and within bounds; an error names the key and the remedy.

    A step that changes from round to round is checked by its first value, and stays what it is written as.
    """
    known = schema(make)
    for key in values:
        if key not in known.model_fields:
            raise unknown(f"key in [{table}]", key, known.model_fields)
    planned = scheduled(make, table, values)
    try:
        complete = known(**{**values, **{name: plan.at(0) for name, plan in planned.items()}}).model_dump()
    except ValidationError as error:
        raise UsageError(explain(error, table)) from None
    return {**complete, **{name: plan.data for name, plan in planned.items()}}


def scheduled(make: Callable[..., Any], table: str, values: Mapping[str, Any]) -> dict[str, Schedule]:
    """The settings that change from round to round, by name; only step sizes may.

    Args:
        make: a factory.
        table: what its settings are called in errors.
        values: settings.
    """
    steps = [name for name in schema(make).model_fields if name.endswith("step")]
    found: dict[str, Schedule] = {}
    for name, value in values.items():
        if name in steps and is_schedule(value):
            found[name] = schedule(value, f"{table}.{name}")
        elif isinstance(value, Schedule):
            able = ", ".join(steps) or "none"
            raise UsageError(f"{table}.{name} takes no schedule; settings of {table} that do: {able}.")
    return found


def explain(error: ValidationError, table: str) -> str:
    """pydantic's complaints as one paragraph, with the keys as the user writes them."""
    texts = []
    for problem in error.errors():
        place = ".".join([table, *(str(part) for part in problem["loc"][:1])]) if table else str(problem["loc"][0])
        given = problem.get("input")
        text = problem["msg"].removeprefix("Value error, ")
        texts.append(f"{place} = {given!r}: {text[0].lower()}{text[1:]}")
    return "; ".join(dict.fromkeys(texts)) + "."


class Setting(NamedTuple):
    """One setting of a factory: its name, what values it takes, its default, and what it means."""

    name: str
    values: str
    default: Any
    meaning: str


def describe(make: Callable[..., Any], glossary: str = "method") -> tuple[Setting, ...]:
    """The settings of a factory with their meanings: those of its docstring's Args, else those of the glossary.

    Args:
        make: a factory with keyword-only settings.
        glossary: "method" or "problem".
    """
    return _described(unwrap(make), glossary)


@cache
def _described(make: Callable[..., Any], glossary: str) -> tuple[Setting, ...]:
    """The same for the function that a factory wraps; kept, because `documented` rewrites its docstring."""
    own = _args(make.__doc__ or "")
    shared = METHOD_SETTINGS if glossary == "method" else PROBLEM_SETTINGS
    hints = _hints(make)
    return tuple(
        Setting(name, _values(hints[name]), parameter.default, own.get(name) or shared.get(name, ""))
        for name, parameter in signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    )


def overview(make: Callable[..., Any]) -> str:
    """What the docstring of a factory says before its settings."""
    return re.split(r"\n\n(?:Args|Example):\n", cleandoc(unwrap(make).__doc__ or ""))[0]


def documented(make: F, glossary: str = "method") -> F:
    """The same factory with a complete `Args:` section and a signature that reads well in `help()`."""
    settings = describe(make, glossary)
    text = cleandoc(make.__doc__ or "")
    before, found, rest = text.partition("\n\nArgs:\n")
    if found:
        after = rest.partition("\n\n")[2]
    else:
        before, found, rest = text.partition("\n\nExample:\n")
        after = f"Example:\n{rest}" if found else ""
    lines = [f"    {s.name}: {s.meaning} ({s.values})." for s in settings]
    args = "\n\nArgs:\n" + "\n".join(lines) if lines else ""
    words = {s.name: s.values for s in settings}
    given = signature(make).parameters.values()
    parameters = [p.replace(annotation=_Words(words[p.name])) if p.name in words else p for p in given]
    make.__doc__ = before + args + (f"\n\n{after}" if after else "")
    make.__signature__ = signature(make).replace(parameters=parameters)  # type: ignore[attr-defined]
    return make


class _Words(str):
    """An annotation in words; `help()` prints it without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _args(doc: str) -> dict[str, str]:
    """The lines below `Args:`, by name; a line that is indented more goes on with the one before."""
    found: dict[str, str] = {}
    name = ""
    for line in cleandoc(doc).partition("\nArgs:\n")[2].split("\n"):
        if not line.strip():
            break
        if match := re.match(r" {4}(\w+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += " " + line.strip()
    return {key: text.rstrip(".") for key, text in found.items()}


BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "of length ≥"}
KINDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "not set",
}


def _values(hint: Any) -> str:
    """A type in words: "number > 0", "'md' or 'smd'"."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [
            f"{BOUNDS[name]} {limit:g}"
            for extra in parts[1:]
            for rule in getattr(extra, "metadata", ())
            for name in BOUNDS
            if (limit := getattr(rule, name, None)) is not None
        ]
        return f"{_values(parts[0])} {' and '.join(bounds)}".strip()
    if origin is Literal:
        return " or ".join(repr(value) for value in parts)
    if origin in (Union, UnionType):
        return " or ".join(_values(part) for part in parts)
    if origin is list:
        return f"list, each: {_values(parts[0])}"
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)))
