"""Measures as data: what is recorded, how it is called, which direction is better, and on what rows it is measured.

A problem declares its measures; records, reports, comparisons, grids and the terminal show whatever is declared.
`STANDARD` holds the names that mean the same in all of coterie's problems, the most important first. A problem puts its
own before them (`Problem.declares`). A recorded name that nobody declared is shown under its own name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from coterie.errors import UsageError, gist

Direction = Literal["lower", "higher", "neither"]
Scale = Literal["number", "share", "log"]
RowsOf = Literal["", "train", "validation", "selection", "test", "weights"]

NAME = re.compile(r"[A-Za-z]\w{0,63}")
LONGEST = 120  # characters of a label
STORED = ("name", "label", "better", "scale", "rows", "unit")  # the fields that records hold
TAKEN = frozenset({"round", "seconds", "communication"})  # of a line of the record, and no measures


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None and text not in TAKEN


@dataclass(frozen=True)
class Measure:
    """One number per recorded round, declared so that reports can show it.

    Args:
        name: its key in the record.
        label: its name for people; the key with spaces if it is not given.
        better: "lower", "higher", or "neither" where no direction is.
        scale: "number", "share" (of one, shown in per cent), or "log" (a number on a logarithmic axis).
        rows: what it is measured on: "train", "validation", "selection" or "test" rows, client "weights", or ""
            for something else.
        unit: written after the number.
        of: how to compute it, for problems of your own. `Weighting.on` calls `of(outputs, labels)` with all test rows
            (or validation rows), `Nested(…).on` calls `of(x, y, batch)` at every client and takes the mean.

    Example:
        >>> import torch, coterie
        >>> error = coterie.Measure("error", better="lower", of=lambda out, y: (out[:, 0] - y).abs().mean())
        >>> x = torch.randn(20, 4)
        >>> shards = [(x, x.sum(1))] * 2
        >>> problem = coterie.Weighting.on(
        ...     shards, test=shards[0], model=torch.nn.Linear(4, 1), loss="squared", measures=[error]
        ... )
        >>> fit = coterie.fit(problem, coterie.methods.fedavg(), rounds=2)
        >>> fit.history[-1]["error"] > 0
        True
    """

    name: str
    label: str = ""
    better: Direction = "lower"
    scale: Scale = "number"
    rows: RowsOf = ""
    unit: str = ""
    of: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _is_name(self.name):
            raise UsageError(
                f"a measure cannot be called {self.name!r}; take letters, digits and _, "
                f"and none of {', '.join(sorted(TAKEN))}."
            )
        for key, kind in (("better", Direction), ("scale", Scale), ("rows", RowsOf)):
            if getattr(self, key) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise UsageError(f"measure {self.name}: {key} is {getattr(self, key)!r}; it must be one of {known}.")
        for key in ("label", "unit"):
            if not isinstance(getattr(self, key), str) or len(getattr(self, key)) > LONGEST:
                raise UsageError(f"measure {self.name}: {key} must be a text of at most {LONGEST} characters.")
        if self.of is not None and not callable(self.of):
            raise UsageError(f"measure {self.name}: of is {self.of!r}; give the function that computes it.")
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))

    @property
    def higher(self) -> bool:
        """Whether more is better."""
        return self.better == "higher"

    @property
    def share(self) -> bool:
        """Whether it is shown in per cent."""
        return self.scale == "share"

    def text(self, value: float | None) -> str:
        """A value for people; None is what was not finite."""
        if value is None:
            return "not finite"
        return f"{100 * value:.1f} %" if self.share else f"{value:.4g}{self._unit}"

    def spread(self, mean: float, deviation: float | None) -> str:
        """Mean ± standard deviation."""
        if deviation is None:
            return self.text(mean)
        if self.share:
            return f"{100 * mean:.1f} ± {100 * deviation:.1f} %"
        return f"{mean:.4g} ± {deviation:.2g}{self._unit}"

    def gap(self, difference: float, *, signed: bool = True) -> str:
        """A difference of two values."""
        sign = "+" if signed else ""
        text = f"{100 * difference:{sign}.1f} points" if self.share else f"{difference:{sign}.3g}{self._unit}"
        return text.replace("-", "−", 1) if text.startswith("-") else text

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    def as_dict(self) -> dict[str, str]:
        """As it is stored beside a record."""
        return {key: getattr(self, key) for key in STORED}


def accuracy(name: str, label: str, rows: RowsOf) -> Measure:
    """A share of right answers."""
    return Measure(name, label, "higher", "share", rows)


STANDARD: tuple[Measure, ...] = (
    accuracy("personal_accuracy", "mean personal accuracy", "test"),
    accuracy("personal_accuracy_worst", "worst personal accuracy", "test"),
    accuracy("test_accuracy", "test accuracy", "test"),
    accuracy("balanced_accuracy", "balanced accuracy", "test"),
    accuracy("selection_accuracy", "accuracy on selection rows", "selection"),
    accuracy("validation_accuracy", "validation accuracy", "validation"),
    Measure("gap", "gap to the optimum, h(x) − h*", scale="log"),
    Measure("objective"),
    Measure("distance_to_optimum", "distance to optimum", scale="log"),
    Measure("test_loss", rows="test"),
    Measure("personal_loss", "mean personal loss", rows="test"),
    Measure("selection_loss", "loss on selection rows", rows="selection"),
    Measure("validation_loss", rows="validation"),
    Measure("outer_loss", "outer loss", rows="validation"),
    Measure("inner_loss", "inner loss", rows="train"),
    Measure("stationarity", scale="log"),
    accuracy("personal_accuracy_tenth", "personal accuracy, mean of the worst 10 % of clients", "test"),
    accuracy("personal_accuracy_median", "median personal accuracy", "test"),
    Measure("personal_loss_tenth", "personal loss, mean of the worst 10 % of clients", rows="test"),
    Measure("personal_loss_median", "median personal loss", rows="test"),
    accuracy("validation_accuracy_worst", "worst validation accuracy of a client", "validation"),
    accuracy("validation_accuracy_tenth", "validation accuracy, mean of the worst 10 % of clients", "validation"),
    accuracy("validation_accuracy_median", "median validation accuracy of the clients", "validation"),
    Measure("validation_loss_tenth", "validation loss, mean of the worst 10 % of clients", rows="validation"),
    Measure("validation_loss_median", "median validation loss of the clients", rows="validation"),
    accuracy("friends_weight", "weight of the known friends", "weights"),
    Measure("friends_spread", "spread of the friends' weights, max |w − mean|/mean", "lower", rows="weights"),
    accuracy("group_weight", "weight inside the own group", "weights"),
    Measure("effective_clients", "effective number of clients, 1/Σw²", "neither", rows="weights"),
    accuracy("group_weight_least", "least weight inside the own group", "weights"),
    Measure("largest_weight", "largest weight of a client", "neither", "share", "weights"),
)
NAMED = {measure.name: measure for measure in STANDARD}


def named(name: str) -> Measure:
    """The declaration of a recorded name that has none beside the record: the standard one, or its name alone."""
    return NAMED.get(name) or Measure(name, better="neither")


def declared(own: Iterable[Measure], names: Iterable[str]) -> tuple[Measure, ...]:
    """The declarations of recorded names, the most important first: a problem's own, the standard ones, then the rest.

    Args:
        own: what the problem declares.
        names: the names that are recorded.

    Example:
        >>> [m.label for m in declared([Measure("f1")], ["test_loss", "f1", "epsilon", "test_accuracy"])]
        ['f1', 'test accuracy', 'test loss', 'epsilon']
    """
    found = list(names)
    known = {measure.name: measure for measure in (*STANDARD, *own)}
    order = dict.fromkeys([*(measure.name for measure in own), *NAMED, *found])
    return tuple(known.get(name) or named(name) for name in order if name in found and _is_name(name))


def headline(measures: Iterable[Measure], runs: Sequence[Mapping[str, Any]]) -> Measure | None:
    """The most important measure that all runs have, else the first that one of them has; None without any.

    Args:
        measures: declarations, the most important first.
        runs: what each run has last recorded, by name.
    """
    shown = [measure for measure in measures if measure.rows != "weights"]
    for enough in (all, any):
        for measure in shown:
            if runs and enough(isinstance(run.get(measure.name), int | float) for run in runs):
                return measure
    return None


def stored(data: Any) -> tuple[Measure, ...]:
    """The declarations of a file or a summary, checked: whatever is wrong with them is an error.

    Args:
        data: a list of tables, as `Measure.as_dict` makes them.
    """
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise ValueError("measures are no list of tables")
    try:
        return tuple(Measure(**{key: entry[key] for key in STORED if key in entry}) for entry in data)
    except (TypeError, UsageError) as error:
        raise ValueError(str(error)) from None


def of_summary(summary: Mapping[str, Any]) -> tuple[Measure, ...]:
    """The declared measures of a summary."""
    return stored(summary["measures"])


def of_result(result: Mapping[str, Any]) -> Measure:
    """The measure of a comparison or a grid."""
    return stored([result["declared"]])[0]


def own_measures(given: Any, rows: Sequence[RowsOf], remedy: str) -> tuple[Measure, ...]:
    """The measures that a user gave for a problem, each with the rows that it is measured on.

    Args:
        given: what the user gave.
        rows: the rows that the problem has, the usual ones first.
        remedy: what to give so that there are some.
    """
    if isinstance(given, Measure) or not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(f"measures is a {type(given).__name__}; give a list of coterie.Measure.")
    found: list[Measure] = []
    for measure in given:
        if not isinstance(measure, Measure) or measure.of is None:
            raise UsageError(f"{measure!r} is no measure to compute; give coterie.Measure(name, of=function).")
        if measure.name in NAMED or measure.name in {other.name for other in found}:
            raise UsageError(f"measure {measure.name} exists already; give it another name.")
        wanted: RowsOf = measure.rows or (rows[0] if rows else "")
        if wanted not in rows:
            have = ", ".join(rows) or "none"
            raise UsageError(
                f"measure {measure.name} needs {wanted or 'some'} rows; this problem has {have}. Give {remedy}, or "
                f"another rows=."
            )
        found.append(replace(measure, rows=wanted))
    return tuple(found)


def computed(measure: Measure, *arguments: Any) -> float:
    """A measure of one's own at these arguments; a function that fails, or returns no number, is reported by name."""
    assert measure.of is not None
    try:
        value = measure.of(*arguments)
    except Exception as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        raise UsageError(
            f"measure {measure.name} failed: {gist(error)}. Its function is called with "
            f"{len(arguments)} arguments ({kinds}); correct it."
        ) from error
    return number(measure.name, value)


def number(name: str, value: Any) -> float:
    """A measured value as a plain number; anything else is refused with the measure's name.

    Args:
        name: the measure.
        value: what its function returned: a number, or a tensor or array that holds one.
    """
    if not isinstance(value, bool | str):
        with suppress(TypeError, ValueError, RuntimeError):
            return float(value)
    shape = getattr(value, "shape", None)
    kind = type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise UsageError(
        f"measure {name} returned a {kind}, not a number; return one number per call, for example values.mean()."
    )
