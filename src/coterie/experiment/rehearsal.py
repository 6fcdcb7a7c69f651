"""What a run will show to whom, and how many exchanges its rounds need, told before it starts."""

from typing import NamedTuple

from coterie.errors import CoterieError, UsageError
from coterie.experiment.config import Config, FederationTable
from coterie.federation import Federation
from coterie.federation.account import Account
from coterie.federation.api import Book
from coterie.federation.rehearsal import Rehearsal
from coterie.federation.remote.expectations import Expectations
from coterie.federation.secure import Refusal, Secure, checked_library
from coterie.federation.secure.exposure import Counting
from coterie.federation.verbs import Revealing
from coterie.methods import Method
from coterie.methods.registry import SECURE
from coterie.numerics import Draw
from coterie.problems.base import Problem

ROUNDS = 2  # some methods ask other things in their first round
COMPARING = {
    "clip": "set federation.clip = none.",
    "norm": "leave it out; federation.range bounds every number.",
    "compress": "set federation.compress = none, or use fedsep, whose sketches can be summed.",
}
"""Settings of [federation] that a secure run refuses, and the remedy."""


class Prospect(NamedTuple):
    """What will be seen, the exchanges of a round, and why the rehearsal ended early ("" where it did not)."""

    seen: Account
    exchanges: int
    cut: str = ""


def rehearsed(method: Method, problem: Problem, table: FederationTable) -> Prospect:
    """What the first rounds of a method will ask for and show to whom; no client is asked.

    Args:
        method: the method.
        problem: what is minimised; the rows of its clients are not used.
        table: the [federation] of the run.
    """
    engine = Rehearsal(Expectations(problem.task, problem.train, problem.valid, problem.target), problem.train)
    trial = Federation.on(engine, book=Book(exposure=Counting()), target=table.target, secure=secure_of(table))
    cut, t = "", 0
    try:
        state = method.init(problem, trial.n)
        for t in range(ROUNDS):
            draw = Draw.of(0, device=engine.sizes.device).round(t)
            state = method.round(trial.begin(t + 1, draw), state, draw)
    except UsageError:
        raise
    except Revealing as error:
        raise UsageError(f"{method.name} cannot be run so: {error} {_instead(method.name)}") from None
    except Refusal as error:
        raise UsageError(f"{method.name} cannot be run so: {error}") from None
    except (CoterieError, ArithmeticError, RuntimeError, ValueError) as error:  # replies without any meaning
        cut = str(error).split("\n")[0][:200]
    return Prospect(trial.ledger.seen, -(-trial.ledger.total.rounds // (t + 1)), cut)


def _instead(name: str) -> str:
    """What to use in place of a method that shows single updates."""
    setting = SECURE.get(name, "")
    if "=" in setting:
        return f"{name} can be secure with {setting} in [method]."
    return "Instead of it use bilevel, meritfed with method.solver = lagged, or fedavg."


def announcement(prospect: Prospect) -> list[str]:
    """Who will see what, in lines for people.

    Args:
        prospect: what a rehearsal found.
    """
    names = {"server": "the server", "target": "the target", "clients": "every client"}
    lines = [f"{names[row.viewer]} will see: {row.text} ({row.cause})" for row in prospect.seen.rows()]
    return [*lines, *([f"and perhaps more: {prospect.cut}"] if prospect.cut else [])]


def secure_of(table: FederationTable) -> Secure | None:
    """The settings of secure sums in [federation]; None where they are off."""
    return Secure(table.reveal, table.threshold, table.range, table.partners) if table.secure else None


def check_secure(config: Config, method: Method, problem: Problem) -> None:
    """Refuse what a secure run cannot do, before anything is started; what it can do is rehearsed.

    Args:
        config: the configuration.
        method: the method.
        problem: what is minimised.
    """
    table, secure = config.federation, secure_of(config.federation)
    if secure is None:
        return
    checked_library()
    for key, instead in COMPARING.items():
        if getattr(table, key) not in (None, False, "none", "auto"):
            raise UsageError(f"federation.{key} looks at single updates, which a secure run hides; {instead}")
    secure.check(table.count or max(1, round(table.active * problem.clients)))
    rehearsed(method, problem, table)


def announced(config: Config, problem: Problem, method: Method) -> list[str]:
    """The announcement of a configured run on a network.

    Args:
        config: the configuration.
        problem: what is minimised.
        method: the method.
    """
    return announcement(rehearsed(method, problem, config.federation))
