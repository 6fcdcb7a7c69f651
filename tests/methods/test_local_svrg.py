"""Local-SVRG: a reduction, the variance-reduced limit, the averaged output, the rounds."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from coterie.federation import Call, Federation, LocalEngine, pack
from coterie.federation.api import Replies
from coterie.federation.tree import rows
from coterie.federation.work import name_of
from coterie.methods import local_train
from coterie.methods.baselines.local_svrg import SVRGSteps, five_epochs, solve
from coterie.numerics import Draw
from coterie.problems import Weighting
from coterie.problems.base import Context
from coterie.problems.catalogue.quadratic import quadratic


@pytest.fixture(scope="module")
def problem() -> Weighting:
    return quadratic(Context(seed=3, dtype=torch.float64), clients=4, friends=2, dimension=5, rows=20, curvature=3.0)


def federation(problem: Weighting, **options: object) -> Federation:
    return Federation.on(LocalEngine(problem.task, problem.train, problem.valid, problem.target, **options))


w = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def test_one_step_is_gradient_descent_on_the_weighted_loss(problem: Weighting) -> None:
    """At the start anchor and iterate agree, so the correction removes the batch altogether."""
    x = solve(federation(problem), "model", problem.start, w, SVRGSteps(0.1, 1, 0.5, 1, 3), Draw.of(0))
    exact = torch.einsum("k,kij,kj->i", w, problem.exact.hessians, problem.start - problem.exact.optima)
    assert torch.allclose(x, problem.start - 0.1 * exact, atol=1e-12)


@pytest.mark.slow
def test_batches_do_not_keep_it_from_the_exact_minimiser(problem: Weighting) -> None:
    svrg = SVRGSteps(0.1, 1, 0.1, 600, 3)
    x = solve(federation(problem), "model", problem.start, w, svrg, Draw.of(1))
    assert (x - problem.exact.theta(w)).norm() < 1e-10


def test_the_linear_system_is_solved(problem: Weighting) -> None:
    theta = problem.exact.theta(w)
    goal = problem.exact.target_hessian @ (theta - problem.exact.target_optimum)
    h = solve(
        federation(problem), "system", goal, w, SVRGSteps(0.25, 1, 0.2, 120, 10), Draw.of(2), constants=(theta, goal)
    )
    exact = torch.linalg.solve(torch.einsum("k,kij->ij", w, problem.exact.hessians), goal)
    assert (h - exact).norm() < 1e-9


def test_the_averaged_output_is_the_weighted_mean_of_all_iterates(problem: Weighting) -> None:
    """Replays the steps at every length and averages the server's iterates by hand."""
    svrg = SVRGSteps(0.1, 1, 0.2, 6, 3, average=True, convexity=1.0)
    last = [
        solve(federation(problem), "model", problem.start, w, svrg._replace(steps=t, average=False), Draw.of(4))
        for t in range(1, 7)
    ]
    iterates = torch.stack([problem.start, *last])
    u = torch.tensor([(1 - svrg.decay) ** -(t + 1) for t in range(7)], dtype=torch.float64)
    averaged = solve(federation(problem), "model", problem.start, w, svrg, Draw.of(4))
    assert torch.allclose(averaged, (u / u.sum()) @ iterates, atol=1e-12)


def test_one_coin_in_two_refreshes_the_same_anchors_in_both_modes(problem: Weighting) -> None:
    svrg = SVRGSteps(0.1, 4, 0.5, 12, 3)
    one, other = (
        solve(federation(problem, mode=mode), "model", problem.start, w, svrg, Draw.of(5))
        for mode in ("vmap", "sequential")
    )
    assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(
    ("steps", "period", "average"), [(12, 3, False), (13, 3, False), (12, 3, True), (5, 10, False)]
)
def test_rounds_are_one_and_t_over_tau(problem: Weighting, steps: int, period: int, average: bool) -> None:
    fed = federation(problem)
    solve(fed, "model", problem.start, w, SVRGSteps(0.1, period, 0.1, steps, 3, average), Draw.of(0))
    assert fed.ledger.total.rounds == 1 + -(-steps // period) + average


def test_the_target_alone_reaches_its_own_minimiser(problem: Weighting) -> None:
    method = local_train(step=0.1, local_steps=100, batch=3, refresh=0.1)
    state = method.init(problem, 4)
    for t in range(6):
        state = method.round(federation(problem), state, Draw.of(0).round(t))
    assert (state.x - problem.exact.target_optimum).norm() < 1e-9


class Dropping(LocalEngine):
    """Client 2 does not answer when it is asked to begin; every work's clients are written down."""

    def execute(self, call: Call, ids: torch.Tensor) -> Iterator[Replies]:
        asked.append((name_of(call.work), ids.tolist()))
        for replies in super().execute(call, ids):
            if not name_of(call.work).startswith("local-svrg/begin"):
                yield replies
                continue
            stay = replies.ids != 2
            yield Replies(replies.ids[stay], rows(replies.values, stay), rows(replies.memory, stay))


asked: list[tuple[str, list[int]]] = []


@pytest.mark.parametrize("average", [False, True])
def test_a_client_that_fails_to_begin_is_not_asked_for_steps(problem: Weighting, average: bool) -> None:
    """It has no anchor: its steps would be those of an anchor of zeros."""
    asked.clear()
    engine = Dropping(problem.task, problem.train, problem.valid, problem.target)
    svrg = SVRGSteps(0.1, 2, 0.5, 5, 3, average=average, convexity=1.0)
    found = solve(Federation.on(engine), "model", problem.start, w, svrg, Draw.of(0))
    assert asked[0] == ("local-svrg/begin-model", [0, 1, 2, 3])
    assert [ids for _, ids in asked[1:]] == [[0, 1, 3]] * (3 + average)
    others = replace(federation(problem), ids=torch.tensor([0, 1, 3]))
    assert torch.equal(found, solve(others, "model", problem.start, w, svrg, Draw.of(0)))


@pytest.mark.parametrize(
    ("rows", "steps"),
    [([40, 60, 80], 40), ([40, 60, 300], 150), ([40, 60, 600], 300), ([40, 60, 10**6], 300), ([3, 3, 3], 1)],
)
def test_a_client_that_declares_a_million_rows_lengthens_a_solve_tenfold_at_most(rows: list[int], steps: int) -> None:
    stack = pack([(torch.zeros(n, 1), torch.zeros(n)) for n in (1, 1, 1)])
    engine = LocalEngine(None, replace(stack, counts=torch.tensor(rows)), None, None)
    assert five_epochs(Federation.on(engine), batch=10) == steps
