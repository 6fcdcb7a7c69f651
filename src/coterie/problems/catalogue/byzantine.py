"""Byzantine clients as an option of a weighting problem: the last ones attack (known friends come first).

So strangers attack before friends do, and `friends` counts only those that stay honest. What the attackers do is in
`federation/attacks.py`; label-flip is done here, y → C − 1 − y on the attackers' rows: they then answer honestly. The
run to compare with is the same problem with attack = "none", in which the same clients do as the others.
"""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from coterie.errors import UsageError
from coterie.federation import Attack, Stack
from coterie.federation.stages.attacks import AttackName
from coterie.problems.weighting import Weighting

AttackOption = Literal["none"] | AttackName
Attackers = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0.0, lt=1.0)]


def head_count(attackers: int | float, clients: int) -> int:
    """A share of the clients, rounded, or a count as it is."""
    return attackers if isinstance(attackers, int) else round(attackers * clients)


def with_attackers(
    problem: Weighting, attack: AttackOption, attackers: int | float, strength: float | None, attack_from: int = 1
) -> Weighting:
    """The problem in which the last clients attack, from a round on; unchanged where attack is "none"."""
    if attack == "none":
        return problem
    honest = problem.clients - max(1, head_count(attackers, problem.clients))
    if attack == "label-flip" and attack_from > 1:
        raise UsageError("problem.attack = label-flip alters data from the start; leave problem.attack_from out.")
    if honest < 1:
        raise UsageError(
            f"problem.attackers = {attackers:g} leaves none of the {problem.clients} clients honest; lower it."
        )
    return replace(
        problem,
        attack=Attack(attack, honest, strength, attack_from),
        train=_flipped(problem, honest) if attack == "label-flip" else problem.train,
        friends=None if problem.friends is None else min(problem.friends, honest),
        best_weights=None,  # they are known for honest clients only
    )


def _flipped(problem: Weighting, honest: int) -> Stack:
    """The training rows with the attackers' labels reversed."""
    classes = problem.task.classes
    if classes is None:
        raise UsageError("problem.attack = label-flip needs classes to confuse, and this problem has none.")
    *others, labels = problem.train.columns
    first = int(problem.train.offsets[honest])  # rows lie in the order of the clients
    return replace(problem.train, columns=(*others, torch.cat([labels[:first], classes - 1 - labels[first:]])))
