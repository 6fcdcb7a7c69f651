"""What a run will show to whom, told before it starts."""

from typing import NamedTuple

from coterie.errors import CoterieError, UsageError
from coterie.experiment.build import Parts
from coterie.experiment.config import Config, FederationTable
from coterie.federation import Federation
from coterie.federation.account import Account
from coterie.federation.rehearsal import Rehearsal
from coterie.federation.remote.expectations import Expectations
from coterie.methods import Method
from coterie.numerics import Draw
from coterie.problems.base import Problem

ROUNDS = 2  # some methods ask other things in their first round


class Prospect(NamedTuple):
    """What will be seen, and why the rehearsal ended early ("" where it did not)."""

    seen: Account
    cut: str = ""


def rehearsed(method: Method, problem: Problem, table: FederationTable) -> Prospect:
    """What the first rounds of a method will show to whom; no client is asked.

    Args:
        method: the method.
        problem: what is minimised; the rows of its clients are not used.
        table: the [federation] of the run.
    """
    engine = Rehearsal(Expectations(problem.task, problem.train, problem.valid, problem.target), problem.train)
    trial = Federation.on(engine, target=table.target)
    try:
        state = method.init(problem, trial.n)
        for t in range(ROUNDS):
            draw = Draw.of(0, device=engine.sizes.device).round(t)
            state = method.round(trial.begin(t + 1, draw), state, draw)
    except UsageError:
        raise
    except (CoterieError, ArithmeticError, RuntimeError, ValueError) as error:  # replies without any meaning
        return Prospect(trial.ledger.seen, str(error).split("\n")[0][:200])
    return Prospect(trial.ledger.seen)


def announcement(prospect: Prospect) -> list[str]:
    """Who will see what, in lines for people.

    Args:
        prospect: what a rehearsal found.
    """
    names = {"server": "the server", "target": "the target", "clients": "every client"}
    lines = [f"{names[row.viewer]} will see: {row.text} ({row.cause})" for row in prospect.seen.rows()]
    return [*lines, *([f"and perhaps more: {prospect.cut}"] if prospect.cut else [])]


def prospects(parts: Parts) -> list[str]:
    """The announcement of a run on a network; a simulation shows nothing to anybody.

    Args:
        parts: the live objects of the run.
    """
    if parts.config.run.engine == "local":
        return []
    return announced(parts.config, parts.problem, parts.method)


def announced(config: Config, problem: Problem, method: Method) -> list[str]:
    """The announcement of a configured run on a network.

    Args:
        config: the configuration.
        problem: what is minimised.
        method: the method.
    """
    return announcement(rehearsed(method, problem, config.federation))
