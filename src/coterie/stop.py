"""Rules that end a run early: patience, tolerance, reached; or any function of the record.

`coterie.fit(…, stop=stop.patience("validation_loss", 20))`, or `run.stop = "patience(validation_loss, 20)"` in a
configuration, where the text is parsed as data. A rule sees the record, one entry per recorded round. The run then
counts as finished; the reason is an event and in the summary.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.errors import UsageError, unknown
from coterie.measures import Measure
from coterie.schedules import FUNCTION, called, refuse_function

Record = Sequence[Mapping[str, Any]]
Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
    """When to stop, by one measure or by a function.

    Args:
        data: what config.toml holds: a text such as "patience(validation_loss, 20)".
        measure: the measure that it looks at; empty for a function.
        reason: why to stop, from the rounds and values of the measure and whether more is better; empty to continue.
        function: a function of the record instead.
        higher: whether more is better, once that is known.
    """

    data: str
    measure: str = ""
    reason: Callable[[list[tuple[int, float]], bool], str] = lambda seen, higher: ""
    function: Function | None = None
    higher: bool = False

    def bound(self, measures: Iterable[Measure]) -> "Rule":
        """The rule for a record with these measures; a measure that is not among them is refused."""
        if self.function is not None:
            return self
        known = {measure.name: measure for measure in measures}
        if self.measure not in known:
            raise unknown(f"measure in run.stop = {self.data!r}:", self.measure, known)
        return replace(self, higher=known[self.measure].higher)

    def __call__(self, record: Record) -> str:
        """Why to stop after the last round of a record; empty to continue."""
        if self.function is not None:
            found = self.function(list(record))
            return found if isinstance(found, str) else f"the rule {self.data} said so" if found else ""
        values = [(int(line["round"]), line.get(self.measure)) for line in record]
        seen = [(t, math.nan if value is None else float(value)) for t, value in values]
        return self.reason(seen, self.higher) if seen else ""


def patience(measure: str, rounds: int, least: float = 0.0) -> Rule:
    """Stop when a measure has not improved for so many rounds.

    Args:
        measure: its name in the record, for example "validation_loss".
        rounds: how long to wait for an improvement.
        least: an improvement counts only if it is larger.

    Example:
        >>> rule = patience("loss", 2).bound([Measure("loss")])
        >>> rule([{"round": t, "loss": v} for t, v in enumerate([3.0, 2.0, 2.5])])
        ''
        >>> rule([{"round": t, "loss": v} for t, v in enumerate([3.0, 2.0, 2.5, 2.1])])
        'loss has not improved for 2 rounds; its best was 2 in round 1'
    """
    _check("patience", measure, rounds=(rounds, 1), least=(least, 0.0))

    def reason(seen: list[tuple[int, float]], higher: bool) -> str:
        best_round, best = seen[0]
        for t, value in seen[1:]:
            gain = value - best if higher else best - value
            if gain > least or (math.isnan(best) and not math.isnan(value)):
                best_round, best = t, value
        waited = seen[-1][0] - best_round
        words = f"{measure} has not improved{by} for {waited} rounds; {its} was {best:.4g} in round {best_round}"
        return words if waited >= rounds else ""

    more = f", least={least!r}" if least else ""
    by, its = (f" by more than {least:g}", "the value to beat") if least else ("", "its best")
    return Rule(f"patience({measure}, {rounds}{more})", measure, reason)


def tolerance(measure: str, change: float, rounds: int = 10) -> Rule:
    """Stop when a measure stays within a small range for so many rounds.

    Args:
        measure: its name in the record.
        change: the largest difference between two values that counts as no change.
        rounds: how long it must stay.

    Example:
        >>> rule = tolerance("loss", 0.01, 2)
        >>> rule([{"round": t, "loss": v} for t, v in enumerate([3.0, 2.0, 2.001, 2.002])])
        'loss has changed by at most 0.01 for 2 rounds'
    """
    _check("tolerance", measure, change=(change, 0.0), rounds=(rounds, 1))

    def reason(seen: list[tuple[int, float]], higher: bool) -> str:
        last = seen[-1][0]
        within = [value for t, value in seen if t >= last - rounds]
        if last - seen[0][0] < rounds or len(within) < 2 or any(math.isnan(v) for v in within):
            return ""
        small = max(within) - min(within) <= change
        return f"{measure} has changed by at most {change:g} for {rounds} rounds" if small else ""

    return Rule(f"tolerance({measure}, {change!r}, {rounds})", measure, reason)


def reached(measure: str, value: float) -> Rule:
    """Stop when a measure is at least as good as a value.

    Args:
        measure: its name in the record.
        value: what is good enough; whether more or less is better, the measure's declaration says.

    Example:
        >>> reached("loss", 2.0).bound([Measure("loss")])([{"round": 5, "loss": 1.5}])
        'loss reached 1.5, at least as good as 2'
    """
    _check("reached", measure, value=(value, -math.inf))

    def reason(seen: list[tuple[int, float]], higher: bool) -> str:
        now = seen[-1][1]
        good = now >= value if higher else now <= value
        return f"{measure} reached {now:.4g}, at least as good as {value:g}" if good else ""

    return Rule(f"reached({measure}, {value!r})", measure, reason)


KINDS: dict[str, Callable[..., Rule]] = {f.__name__: f for f in (patience, tolerance, reached)}


def _check(kind: str, measure: Any, **given: tuple[Any, float]) -> None:
    if not isinstance(measure, str) or not measure:
        raise UsageError(f"stop.{kind}: measure is {measure!r}; give the name of a recorded measure.")
    for name, (value, least) in given.items():
        number = int if name == "rounds" else int | float
        if isinstance(value, bool) or not isinstance(value, number) or not math.isfinite(value) or value < least:
            raise UsageError(f"stop.{kind}: {name} is {value!r}; it must be a number of at least {least:g}.")


def rule(value: Any) -> Rule:
    """The rule that a value stands for: a `Rule`, its text, or a function of the record."""
    if isinstance(value, Rule):
        return value
    if isinstance(value, str):
        refuse_function(value, "run.stop", "a text such as patience(validation_loss, 20)")
        found: Rule = called(value, "stop rule", KINDS)
        return found
    if callable(value):
        return Rule(f"{FUNCTION}{getattr(value, '__name__', type(value).__name__)}", function=value)
    raise UsageError(f"stop is {value!r}; give coterie.stop.patience(…) or a function of the record.")
