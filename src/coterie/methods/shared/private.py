"""Any method whose clients clip their updates and add noise; how often each was asked becomes part of its state.

So the budget goes on where a resumed run left off, and the record shows it round by round.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.errors import NoClients
from coterie.federation import Federation
from coterie.federation.api import Book
from coterie.federation.stages.privacy import Mechanism, Private, composed, epsilon, innermost
from coterie.methods.base import Method
from coterie.numerics import Draw
from coterie.problems.base import Problem, View


class PrivateState(NamedTuple):
    """The method's own state, how many uploads each client made, [n], and the most uploads of one in a round."""

    inner: Any
    uploads: Tensor
    at_once: int


def private(
    method: Method,
    everyone: Federation,
    mechanism: Mechanism,
    delta: float,
    before: Sequence[float] = (),
    run: str = "",
) -> Method:
    """The same method with private uploads.

    Args:
        method: the method.
        everyone: the federation of all clients.
        mechanism: how each upload is clipped and made noisy.
        delta: δ of the ε that is recorded.
        before: the noise multipliers of what every client released before the first round.
        run: a name of the run; runs of other names have independent noise.
    """

    def rounds(fed: Federation, s: PrivateState, draw: Draw) -> PrivateState:
        made: list[Private] = []

        def wrap(engine: Any) -> Any:
            made.append(Private(engine, mechanism, s.uploads, run))
            return made[0]

        def after(inner: Any) -> PrivateState:
            uploads = made[0].uploads
            return PrivateState(inner, uploads, max(s.at_once, int((uploads - s.uploads).max())))

        line = replace(fed, engine=innermost(fed.engine, wrap))
        try:
            return after(method.round(line, s.inner, draw))
        except NoClients as error:  # the round is skipped, but what was uploaded before is known to the server
            error.state = after(s.inner)
            raise

    def rejected(before: PrivateState, after: PrivateState) -> PrivateState:
        return after._replace(inner=method.rejected(before.inner, after.inner))  # what was uploaded is spent

    def init(problem: Problem, n: int) -> PrivateState:
        none = torch.zeros(n, dtype=torch.int64, device=everyone.sizes.device)
        return PrivateState(method.init(problem, n), none, 0)

    def view(s: PrivateState) -> View:
        seen, uploads = method.view(s.inner), int(s.uploads.max())
        spent = epsilon(composed([(mechanism.noise, uploads), *((z, 1) for z in before)]), 1, delta)
        budget = {"uploads": uploads, "uploads_a_round": s.at_once, "epsilon": spent if isfinite(spent) else None}
        return seen._replace(more={**seen.more, **budget})

    return replace(method, init=init, round=rounds, view=view, rejected=rejected)


def check_private(method: Method, problem: Problem, everyone: Federation) -> None:
    """Refuse, before the first round, a method that sends what noise cannot hide."""
    fed = replace(everyone, book=Book())
    method.round(fed, method.init(problem, fed.n), Draw.of(0, everyone.sizes.device))
