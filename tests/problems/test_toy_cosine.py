"""toy-cosine: what it promises about convexity, exactness and noise."""

import pytest
import torch

from coterie.federation import LocalEngine
from coterie.numerics import Draw, project_simplex
from coterie.problems import Context
from coterie.problems.catalogue.toy_cosine import CONVEXITY, toy_cosine

WIDE = Context(0, torch.float64)


def some_weights(seed, n=15):
    return torch.softmax(2 * Draw.of(seed).normal(n, dtype=torch.float64), 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_function_is_strongly_convex_enough_and_no_more_redrawn_than_needed(seed):
    f = toy_cosine(Context(seed, torch.float64)).exact.functions
    lowest = torch.linalg.eigvalsh(f.Q - f.a[:, :, None] * f.a[:, None, :])[:, 0]
    assert float(lowest.min()) >= CONVEXITY
    assert float(lowest.median()) < 5 * CONVEXITY


def test_derivatives_are_those_of_the_function():
    f = toy_cosine(WIDE).exact.functions.pick(3)
    theta, v = Draw.of(0).normal(20, dtype=torch.float64), Draw.of(1).normal(20, dtype=torch.float64)
    torch.testing.assert_close(f.gradient(theta), torch.func.grad(f.value)(theta))
    torch.testing.assert_close(f.hessian(theta), torch.func.hessian(f.value)(theta))
    torch.testing.assert_close(f.hvp(theta, v), f.hessian(theta) @ v)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_inner_optimum_is_exact(seed):
    exact, w = toy_cosine(WIDE).exact, some_weights(seed)
    f, theta = exact.functions.pick(slice(None, -1)), exact.theta(w)
    assert float((w @ f.gradient(theta)).norm()) < 1e-12
    walked = torch.zeros(20, dtype=torch.float64)
    for _ in range(2000):
        walked = walked - 0.05 * w @ f.gradient(walked)
    torch.testing.assert_close(walked, theta, atol=1e-6, rtol=0)


def test_the_hypergradient_is_the_derivative_of_the_objective():
    exact, w, h = toy_cosine(WIDE).exact, some_weights(5), 1e-6
    basis = torch.eye(15, dtype=torch.float64)
    difference = torch.stack([(exact.objective(w + h * e) - exact.objective(w - h * e)) / (2 * h) for e in basis])
    torch.testing.assert_close(exact.hypergradient(w), difference, atol=1e-7, rtol=1e-6)


def test_stationarity_is_what_the_paper_plots():
    exact, w = toy_cosine(WIDE).exact, some_weights(5)
    expected = (w - project_simplex(w - 0.001 * exact.hypergradient(w))).norm()
    torch.testing.assert_close(exact.stationarity(w), expected)


def test_exact_values_can_be_vectorised_over_weights():
    exact = toy_cosine(WIDE).exact
    W = torch.stack([some_weights(s) for s in range(4)])
    torch.testing.assert_close(torch.func.vmap(exact.objective)(W), torch.stack([exact.objective(w) for w in W]))


def looks(problem, size, steps, name):
    """Estimates of client 2 at one point, each on its own batch."""
    rows, task = problem.train.client(2), problem.task
    theta, v = torch.full((20,), 0.1, dtype=torch.float64), torch.full((20,), 0.5, dtype=torch.float64)
    index = Draw.of(3).phase(name).batches(rows.count, size, steps)
    if name == "hvp":
        return torch.stack([task.hvp(theta, v, rows.take(i)) for i in index]), task.full_hvp(theta, v, rows)
    oracle, full = getattr(task, name), getattr(task, f"full_{name}")
    return torch.stack([oracle(theta, rows.take(i)) for i in index]), full(theta, rows)


@pytest.mark.parametrize(("name", "norm"), [("loss", 1.0), ("gradient", 1.0), ("hvp", 0.5 * 20**0.5)])
def test_a_batch_has_the_noise_it_should_have_and_all_rows_have_none(name, norm):
    sigma = 0.5
    problem = toy_cosine(WIDE, noise=sigma)
    one, exact = looks(problem, 1, 1500, name)
    four, _ = looks(problem, 4, 1500, name)
    assert float(one.std(0).mean()) == pytest.approx(sigma * norm, rel=0.06)
    assert float(four.std(0).mean()) == pytest.approx(sigma * norm / 2, rel=0.06)
    assert float((one.mean(0) - exact).abs().max()) < 0.1
    quiet = toy_cosine(WIDE)
    torch.testing.assert_close(looks(quiet, 1, 3, name)[0][0], exact)


def test_looks_come_in_pairs_so_all_rows_together_are_exact():
    problem = toy_cosine(WIDE, noise=0.5)
    rows, theta = problem.train.client(4), torch.full((20,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(problem.task.gradient(theta, rows.all()), problem.task.full_gradient(theta, rows))


def test_noise_of_hessians_is_symmetric():
    E = toy_cosine(WIDE, noise=0.5).task.E
    assert torch.equal(E, E.mT)


def test_what_it_measures_and_offers():
    problem = toy_cosine(WIDE, clients=4)
    assert problem.offers == {"gradient", "hvp", "target"}
    assert LocalEngine(problem.task, problem.train, None, problem.target).sizes.tolist() == [1024] * 4
    from coterie.problems.base import View

    measures = problem.measure(View(problem.start, some_weights(0, 4)))
    assert set(measures) == {"validation_loss", "objective", "stationarity"}
    assert set(problem.measure(View(problem.start))) == {"validation_loss"}


def test_the_seed_decides():
    a, b, c = (toy_cosine(Context(s, torch.float64)).exact.functions for s in (0, 0, 1))
    assert torch.equal(a.Q, b.Q)
    assert not torch.equal(a.Q, c.Q)
