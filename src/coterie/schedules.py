"""Step sizes that change from round to round: cosine, linear, step and power, a list, or a function of the round.

Any setting of a method whose name ends in `step` takes one: `coterie.methods.fedavg(step=schedules.cosine(0.1, 100))`,
or, from the command line and in config.toml, its text, `method.step = "cosine(0.1, 100)"`. The text is parsed as data.
Rounds are counted from 0 here: the first round has the start value.
"""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coterie.errors import UsageError, unknown

CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
WORD = re.compile(r"[A-Za-z_]\w*")
FUNCTION = "function "  # before the name of a Python function, which no file can hold


@dataclass(frozen=True)
class Schedule:
    """A value for every round.

    Args:
        data: what config.toml holds: a text such as "cosine(0.1, 100)", or a list of numbers.
        at: the value in a round, counted from 0.
        rounds: how many rounds it has values for; None if for all.
    """

    data: Any
    at: Callable[[int], float] = field(compare=False, repr=False)
    rounds: int | None = None

    def __repr__(self) -> str:
        return f"<coterie schedule {self.data}>"

    def check(self, name: str, rounds: int) -> None:
        """Refuse a schedule that ends too early, or that is not a positive number in some round.

        Args:
            name: the setting, for the error.
            rounds: the rounds of the run.
        """
        if self.rounds is not None and self.rounds < rounds:
            raise UsageError(
                f"{name} has values for {self.rounds} rounds, but the run has {rounds}; give {rounds} values, "
                f"run {self.rounds} rounds, or use a schedule such as step(0.1, 50)."
            )
        for t in range(rounds):
            value = self.at(t)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise UsageError(
                    f"{name} = {self.data} is {value!r} in round {t + 1} of {rounds}; a step size must be a positive "
                    f"number in every round. Give the schedule at least {rounds} rounds, or an end above 0."
                )


def cosine(start: float, rounds: int, end: float = 0.0) -> Schedule:
    """From start to end along half a cosine: end + (start − end) (1 + cos(π t / rounds)) / 2.

    Args:
        start: the value in the first round.
        rounds: the round after which the value is `end`.
        end: the value from then on. With 0, a run may have at most `rounds` rounds.

    Example:
        >>> [round(cosine(0.1, 4).at(t), 4) for t in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
    """
    return _between("cosine", start, rounds, end, lambda t: (1.0 + math.cos(math.pi * t / rounds)) / 2.0)


def linear(start: float, rounds: int, end: float = 0.0) -> Schedule:
    """From start to end in equal steps.

    Args:
        start: the value in the first round.
        rounds: the round after which the value is `end`; start < end is a warm-up.
        end: the value from then on. With 0, a run may have at most `rounds` rounds.

    Example:
        >>> [linear(0.5, 4).at(t) for t in range(4)]
        [0.5, 0.375, 0.25, 0.125]
    """
    return _between("linear", start, rounds, end, lambda t: 1.0 - t / rounds)


def _between(kind: str, start: float, rounds: int, end: float, share: Callable[[int], float]) -> Schedule:
    """From start to end; share is the part of the way that is left after t rounds, from 1 to 0."""
    _check(kind, start=start, rounds=rounds, end=end)
    text = _text(kind, start, rounds, end=(end, 0.0))
    return Schedule(text, lambda t: end + (start - end) * share(min(t, rounds)))


def step(start: float, every: int, factor: float = 0.1) -> Schedule:
    """The start value, times the factor after every so many rounds.

    Args:
        start: the value in the first round.
        every: rounds between two changes.
        factor: what the value is multiplied with.

    Example:
        >>> [step(0.5, 10, 0.5).at(t) for t in (0, 9, 10, 20)]
        [0.5, 0.5, 0.25, 0.125]
    """
    _check("step", start=start, rounds=every, factor=factor)
    return Schedule(_text("step", start, every, factor=(factor, 0.1)), lambda t: start * factor ** (t // every))


def power(start: float, exponent: float = 0.5) -> Schedule:
    """start / (t + 1)^exponent, the decreasing steps of stochastic approximation.

    Args:
        start: the value in the first round.
        exponent: how fast it falls; 0.5 is 1/√t.

    Example:
        >>> power(0.5).at(3)
        0.25
    """
    _check("power", start=start, factor=exponent)
    return Schedule(_text("power", start, exponent=(exponent, 0.5)), lambda t: start / (t + 1) ** exponent)


KINDS: dict[str, Callable[..., Schedule]] = {f.__name__: f for f in (cosine, linear, step, power)}


def _check(kind: str, **given: Any) -> None:
    for name, value in given.items():
        whole = name == "rounds"
        sound = (
            isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
        least = "at least 1" if whole else "at least 0" if name == "end" else "above 0"
        if not sound or value < 0 or (value < 1 if whole else value == 0 and name != "end"):
            number = "whole number" if whole else "number"
            raise UsageError(f"schedule {kind}: {name} is {value!r}; it must be a {number} {least}.")


def _text(kind: str, *values: float, **options: tuple[float, float]) -> str:
    """As it is written; options are left out at their defaults."""
    more = [f"{name}={value!r}" for name, (value, default) in options.items() if value != default]
    return f"{kind}({', '.join([*(repr(value) for value in values), *more])})"


def called(text: str, what: str, kinds: dict[str, Callable[..., Any]]) -> Any:
    """What a text such as "cosine(0.1, 100, end=0.01)" describes: one of these functions of numbers and words.

    Args:
        text: the text. It is split at its commas; nothing in it is run.
        what: what it describes, for errors.
        kinds: the functions by name.
    """
    match = CALL.fullmatch(text)
    if match is None:
        example = "cosine(0.1, 100)" if "cosine" in kinds else "patience(validation_loss, 20)"
        raise UsageError(f"{text!r} is no {what}; write for example {example}.")
    name, inside = match.groups()
    if name not in kinds:
        raise unknown(what, name, kinds)
    values: list[Any] = []
    options: dict[str, Any] = {}
    for part in inside.split(",") if inside.strip() else []:
        key, sign, value = part.rpartition("=")
        if sign:
            options[key.strip()] = _value(value.strip(), text)
        else:
            values.append(_value(value.strip(), text))
    try:
        return kinds[name](*values, **options)
    except TypeError as error:
        raise UsageError(f"{text!r} does not fit {name}: {str(error).partition(' ')[2]}.") from None


def _value(text: str, whole: str) -> Any:
    """A number, or a word such as the name of a measure."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    if WORD.fullmatch(text):
        return text
    raise UsageError(f"{text!r} in {whole!r} is neither a number nor a name.")


def is_schedule(value: Any) -> bool:
    """Whether a setting's value changes from round to round: a `Schedule`, its text, a list or a function."""
    if isinstance(value, str):
        return CALL.fullmatch(value) is not None or value.startswith(FUNCTION)
    return isinstance(value, Schedule | list | tuple) or callable(value)


def schedule(value: Any, name: str) -> Schedule:
    """The schedule that a setting's value stands for.

    Args:
        value: a `Schedule`, its text, a list with a number for each round, or a function of the round.
        name: the setting, for errors.
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, str):
        refuse_function(value, name, "a list or a text such as cosine(0.1, 100)")
        found: Schedule = called(value, "schedule", KINDS)
        return found
    if isinstance(value, Sequence):
        return _listed(list(value), name)
    return Schedule(f"{FUNCTION}{getattr(value, '__name__', type(value).__name__)}", lambda t: _plain(value(t)))


def refuse_function(text: str, name: str, instead: str) -> None:
    """Refuse the text that stands for a Python function in a record: no file can hold the function itself.

    Args:
        text: a value of a configuration.
        name: the setting, for errors.
        instead: what can be written into a file.
    """
    if text.startswith(FUNCTION):
        raise UsageError(
            f"{name} is the Python {text}, which no file can hold; call coterie.fit again with the same arguments and "
            f"out=, or give {instead}."
        )


def _listed(values: list[Any], name: str) -> Schedule:
    if not values or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise UsageError(f"{name} is a list that is empty or holds more than numbers; give one number per round.")
    return Schedule(values, lambda t: float(values[t]), len(values))


def _plain(value: Any) -> Any:
    """A number of numpy or torch as a plain one."""
    return value.item() if hasattr(value, "item") and not isinstance(value, int | float) else value
