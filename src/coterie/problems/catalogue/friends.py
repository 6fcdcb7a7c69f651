"""`friends`: 15 clients, of which 5 draw from the target's distribution and 10 have permuted labels.

With `everyone`, each client is a target too: a third of its rows are for validation, and its model is tested on the
test rows as it labels them.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.catalogue.byzantine import Attackers, AttackOption, with_attackers
from coterie.problems.data.digits import digits
from coterie.problems.data.partition import set_apart, thinned
from coterie.problems.models import FlatModel, build
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count, Name, Positive


def friends(
    context: Context,
    *,
    data: Literal["digits"] = "digits",
    model: Name = "mlp",
    clients: Count = 15,
    friends: Count = 5,
    validation: Count = 60,
    test: Count = 400,
    selection: Annotated[int, Field(ge=0)] = 0,
    everyone: bool = False,
    skew: Positive | None = None,
    attack: AttackOption = "none",
    attackers: Attackers = 0.4,
    strength: Positive | None = None,
    attack_from: Count = 1,
) -> Weighting:
    """Digits split evenly over the clients; strangers see every label through one permutation without a fixed point.

    The standard first problem: a good method finds the friends. With an attack, the last clients are Byzantine:
    strangers first, and friends only where the attackers outnumber the strangers.

    Args:
        validation: rows of the target that judge the weights.
        test: rows set aside to test the target's model.
        selection: rows of these that are set apart for choosing among models and settings; they train nothing.
        everyone: every client is a target too: a third of its rows are for validation, and its model is tested on
            its own labels.
        attack_from: first round in which the attackers attack.

    Example:
        >>> from coterie.problems import Context
        >>> problem = friends(Context(0), clients=6, friends=2)
        >>> problem.clients, problem.friends
        (6, 2)
    """
    if friends > clients:
        raise UsageError(f"problem.friends is {friends}, but there are only {clients} clients; lower it.")
    images = digits()
    rows_left = len(images.y) - validation - test
    if rows_left < 2 * clients:
        raise UsageError(
            f"digits has {len(images.y)} rows; {validation} for validation and {test} for the test leave "
            f"{max(0, rows_left)} for {clients} clients. Lower problem.validation, problem.test or problem.clients."
        )
    draw = Draw.of(context.seed).phase("friends")
    order = draw.permutation(len(images.y))
    x, y = images.x[order], images.y[order]
    wrong = _derangement(draw.phase("labels"), 10)
    each = rows_left // clients
    shards = []
    for k in range(clients):
        part = slice(validation + test + k * each, validation + test + (k + 1) * each)
        shards.append((x[part], y[part] if k < friends else wrong[y[part]]))
    net = FlatModel(build(model, tuple(x.shape[1:]), 10, context.seed))
    held_out = x[validation : validation + test], y[validation : validation + test]
    chooses, tested = set_apart(held_out, selection, draw.phase("selection"))
    own: dict[str, Any] = {}
    if everyone:
        third = max(1, each // 3)
        own["valid"] = [(inputs[:third], labels[:third]) for inputs, labels in shards]
        own["tests"] = [tested, (tested[0], wrong[tested[1]])] if friends < clients else [tested]
        own["groups"] = [0 if k < friends else 1 for k in range(clients)]
        shards = [(inputs[third:], labels[third:]) for inputs, labels in shards]
    problem = weighting(
        thinned(shards, skew, draw.phase("skew")),
        (x[:validation], y[:validation]),
        net,
        "cross_entropy",
        test=tested,
        selection=chooses,
        friends=friends,
        **context.tensor_options,
        **own,
    )
    return with_attackers(problem, attack, attackers, strength, attack_from)


def _derangement(draw: Draw, n: int) -> torch.Tensor:
    """A permutation that moves everything: one random cycle through all."""
    order = draw.permutation(n)
    moved = torch.empty_like(order)
    moved[order] = order.roll(1)
    return moved
