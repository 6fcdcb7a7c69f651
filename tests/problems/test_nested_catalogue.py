"""Hyper-cleaning, ridge-path, few-shot meta-learning, the robust minimax problem, penalty tuning: recipes and closed
forms, and that nobody is sent another client's weights."""

from typing import Any

import numpy as np
import pytest
import torch
from nested_cases import mean_outer
from scipy.optimize import minimize
from torch import Tensor

import coterie
from coterie.errors import UsageError
from coterie.problems import Context, Simplex
from coterie.problems.base import View
from coterie.problems.catalogue.distributionally_robust import distributionally_robust
from coterie.problems.catalogue.hyper_cleaning import clean_share, hyper_cleaning
from coterie.problems.catalogue.meta_learning import meta_learning
from coterie.problems.catalogue.penalty_tuning import penalty_tuning
from coterie.problems.catalogue.ridge_path import ridge_path

WIDE = Context(0, torch.float64)
STEPS: dict[str, Any] = {"step": 2.0, "local_steps": 2, "series": "cg", "terms": 5, "batch": "all"}


def test_no_client_is_sent_the_weights_of_another_s_rows() -> None:
    problem = hyper_cleaning(WIDE, clients=4)
    n, d_y = len(problem.start), len(problem.inner_start)
    assert n % d_y  # so that its multiples tell the two apart
    fit = coterie.fit(problem, coterie.methods.fednest(outer_step=300.0, **STEPS), rounds=2, mode="vmap")
    for cause, moved in fit.ledger.by_cause.items():
        assert moved.floats_up % (4 * d_y) == 0, cause
        assert moved.floats_down % (4 * d_y) == 0, cause
    assert fit.ledger.by_cause["fednest/own-outer-steps"].floats_up == 0
    weights = fit.variables["x"]
    assert weights.shape == (4, n)
    assert float(weights.std(0).max()) > 0.0


def test_the_weights_of_corrupted_rows_fall() -> None:
    problem = hyper_cleaning(WIDE, clients=4)
    fit = coterie.fit(problem, coterie.methods.fednest(outer_step=300.0, **STEPS), rounds=12, record=12, mode="vmap")
    first, last = fit.history[0], fit.history[-1]
    assert last["clean_share"] > first["clean_share"] + 0.05
    assert last["test_accuracy"] > first["test_accuracy"] + 0.3


def test_shared_weights_are_the_same_problem() -> None:
    own, shared = hyper_cleaning(WIDE, clients=3), hyper_cleaning(WIDE, clients=3, own=False)
    assert shared.offers == {"nested"}
    settings = {**STEPS, "terms": 3}
    one = coterie.fit(own, coterie.methods.fednest(outer_step=50.0, **settings), rounds=2, mode="vmap")
    other = coterie.fit(shared, coterie.methods.fednest(outer_step=150.0, **settings), rounds=2, mode="vmap")
    counts = shared.train.counts.tolist()
    for k, mine in enumerate(other.variables["x"].split(counts)):
        torch.testing.assert_close(one.variables["x"][k, : counts[k]], mine, rtol=1e-8, atol=1e-10)
    assert one.history[-1]["clean_share"] == pytest.approx(other.history[-1]["clean_share"], rel=1e-9)


def test_corruption_is_the_share_asked_for() -> None:
    clean, spoilt = (hyper_cleaning(Context(3), clients=2, corruption=c) for c in (0.0, 0.5))
    same = (clean.train.columns[-1] == spoilt.train.columns[-1]).double().mean()
    assert float(same) == pytest.approx(0.55, abs=0.05)  # a tenth of the draws are the true label
    assert torch.equal(clean.valid.columns[-1], spoilt.valid.columns[-1])
    true = [torch.tensor([True, False]), torch.tensor([True, True, False])]
    assert clean_share(torch.zeros(3), true) == pytest.approx(3 / 5)
    assert clean_share(torch.tensor([[0.0, -50.0, 9.0], [0.0, 0.0, -50.0]]), true) == pytest.approx(1.0)


@pytest.mark.parametrize("penalty", ["features", "clients"])
def test_scipy_finds_no_better_penalties(penalty: Any) -> None:
    problem = ridge_path(WIDE, clients=4, penalty=penalty, features=6, relevant=2, rows=6)
    exact = problem.exact
    shape = tuple(exact.start.shape)

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.from_numpy(x).reshape(shape)
        return float(exact.objective(at)), exact.hypergradient(at).flatten().numpy()

    start = exact.start.flatten().numpy()
    found = minimize(value, start, jac=True, method="L-BFGS-B", bounds=[(-8.0, 8.0)] * start.size, tol=1e-14)
    assert exact.least <= found.fun + 1e-10
    assert exact.least == pytest.approx(found.fun, abs=1e-6)
    x = exact.start + 0.3 * torch.arange(start.size, dtype=torch.float64).reshape(shape) / start.size
    assert float(exact.objective(x)) == pytest.approx(float(_value(problem, x)), rel=1e-10)


def _value(problem: Any, x: Tensor) -> Tensor:
    """h(x) from the losses at the clients, whose penalties may be their own."""
    rows = x if x.dim() == 2 else x.expand(problem.clients, -1)
    y = problem.exact.inner(x)
    slopes = [problem.task.inner_gradient(rows[k], y, problem.train.client(k).all()) for k in range(problem.clients)]
    assert float(torch.stack(slopes).mean(0).norm()) < 1e-10
    values = [problem.task.f(rows[k], y, problem.valid.client(k).all()) for k in range(problem.clients)]
    return torch.stack(values).mean()


@pytest.mark.slow
def test_fednest_closes_the_gap_of_the_ridge_path() -> None:
    problem = ridge_path(WIDE, clients=4, features=6, relevant=2, rows=6)
    method = coterie.methods.fednest(outer_step=5.0, step=1.0, local_steps=4, series="cg", terms=6, batch="all")
    fit = coterie.fit(problem, method, rounds=15, record=15, mode="vmap")
    assert fit.history[-1]["gap"] < 0.6 * fit.history[0]["gap"]
    assert fit.history[-1]["gap"] >= -1e-12


def test_few_shot_tasks_have_disjoint_rows_and_unseen_test_classes() -> None:
    problem = meta_learning(WIDE, clients=6, classes=3, shots=2, queries=4, hidden=8, test_tasks=5)
    assert problem.offers == {"nested with y per client"}
    assert problem.train.counts.tolist() == [6] * 6
    assert problem.valid.counts.tolist() == [12] * 6
    for k in range(6):
        support, query = problem.train.client(k).all(), problem.valid.client(k).all()
        assert support.labels.bincount().tolist() == [2, 2, 2]
        distances = torch.cdist(support.inputs.flatten(1), query.inputs.flatten(1))
        assert float(distances.min()) > 0.0
    with pytest.raises(UsageError, match="test tasks have 4 classes"):
        meta_learning(WIDE, classes=5, shots=1)
    with pytest.raises(UsageError, match="lower them"):
        meta_learning(WIDE, shots=500)


@pytest.mark.slow
def test_few_shot_learning_learns() -> None:
    problem = meta_learning(WIDE, clients=10, shots=3, hidden=16, test_tasks=30)
    settings: dict[str, Any] = {"step": 0.5, "local_steps": 4, "terms": 10, "lipschitz": 40.0, "batch": "all"}
    fit = coterie.fit(problem, coterie.methods.lfednest(outer_step=0.3, **settings), rounds=8, record=8, mode="vmap")
    assert fit.history[-1]["outer_loss"] < 0.8 * fit.history[0]["outer_loss"]
    assert fit.history[-1]["test_accuracy"] > 0.6


def test_the_worst_mixture_is_the_maximum_on_the_simplex() -> None:
    problem = distributionally_robust(WIDE, clients=3, penalty=2.0)
    x = problem.start
    losses = []
    for k in range(3):
        batch = problem.train.client(k).all()
        e = torch.eye(3, dtype=torch.float64)[k]
        losses.append((problem.task.f(x, e, batch) + 0.5 * 2.0 * (e - 1 / 3).square().sum()) / 3.0)
    y = Simplex().project(1 / 3 + torch.stack(losses) / 2.0)  # the maximiser, in closed form
    values = [mean_outer(problem, x, point) for point in (y, problem.inner_start, torch.eye(3, dtype=torch.float64)[0])]
    assert float(values[0]) > max(map(float, values[1:]))
    method = coterie.methods.fednest(step=0.5, local_steps=1, inner_rounds=8, outer_step=1e-9, batch="all")
    fit = coterie.fit(problem, method, rounds=2, mode="vmap")
    torch.testing.assert_close(fit.variables["y"], y, rtol=0.0, atol=1e-5)
    assert "validation_accuracy_worst" in fit.history[-1]
    fair = coterie.fit(problem, coterie.methods.fedavg_s(step=0.2, outer_step=0.3, batch="all"), rounds=5, mode="vmap")
    assert float(fair.variables["y"].sum()) == pytest.approx(1.0)


def test_penalties_of_classes_are_those_of_the_benchmark() -> None:
    problem = penalty_tuning(WIDE, clients=2, rows=60)
    assert problem.start.tolist() == [-2.0] * 10
    assert int(problem.train.counts.sum() + problem.valid.counts.sum()) == 60
    x, batch = problem.start, problem.train.client(0).all()
    y = torch.linspace(-1, 1, 640, dtype=torch.float64)
    added = problem.task.g(x, y, batch) - problem.task.f(x, y, batch)
    assert float(added) == pytest.approx(0.5 * np.exp(-2.0) * float(y.square().sum()))
    measures = problem.measure(View(x, inner=best_inner_step(problem)))
    assert {"outer_loss", "inner_loss", "test_accuracy"} <= set(measures)
    with pytest.raises(UsageError, match="lower it"):
        penalty_tuning(WIDE, rows=5000)


def best_inner_step(problem: Any) -> Tensor:
    """One gradient step, which is enough to measure something."""
    batch = problem.train.client(0).all()
    return problem.inner_start - problem.task.inner_gradient(problem.start, problem.inner_start, batch)


@pytest.mark.slow
def test_covertype_is_the_benchmark_s_problem() -> None:
    try:
        problem = penalty_tuning(Context(0), data="covtype", clients=4, rows=2000, test=1000)
    except UsageError as error:
        pytest.skip(str(error))
    assert len(problem.start) == 7
    assert len(problem.inner_start) == 7 * 54
    method = coterie.methods.fednest(outer_step=1.0, step=1.0, series="cg", batch="all")
    fit = coterie.fit(problem, method, rounds=5, record=5, mode="vmap")
    assert fit.history[-1]["test_accuracy"] > fit.history[0]["test_accuracy"]
