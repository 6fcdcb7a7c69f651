"""What the tests of weight learners share: problems in float64, federations, and rounds without the experiment loop."""

from typing import Any

import torch

from coterie.experiment.build import federate
from coterie.experiment.config import FederationTable
from coterie.federation import Federation
from coterie.methods import Method
from coterie.methods.shared.works import goal_gradient, gradient
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.quadratic import quadratic
from coterie.problems.catalogue.toy_cosine import toy_cosine

WIDE = Context(0, torch.float64)


def a_quadratic(**settings: Any) -> Any:
    return quadratic(WIDE, **{"clients": 5, "dimension": 4, "rows": 12, "curvature": 2.0, **settings})


def a_toy(**settings: Any) -> Any:
    return toy_cosine(WIDE, **settings)


def federation(problem: Any, **table: Any) -> Federation:
    return federate(problem, FederationTable(mode="vmap", **table))[0]


def play(method: Method, problem: Any, rounds: int, *, state: Any = None, fed: Federation | None = None) -> Any:
    """The state after some rounds with everything else at rest."""
    fed = fed or federation(problem)
    state = method.init(problem, fed.n) if state is None else state
    for t in range(rounds):
        draw = Draw.of(1).round(t)
        state = method.round(fed.begin(t + 1, draw), state, draw)
    return state


def gradients(problem: Any, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All ∇L_k(θ) and ∇L_0(θ), exactly."""
    fed, draw = federation(problem), Draw.of(0)
    G, _ = fed.gather(gradient, theta, draw=draw, batch="all")
    return G, fed.ask_target(goal_gradient, theta, draw=draw, batch="all")


def skewed(n: int) -> torch.Tensor:
    """Weights that are neither uniform nor on the boundary."""
    w = torch.arange(1.0, n + 1, dtype=torch.float64)
    return w / w.sum()
