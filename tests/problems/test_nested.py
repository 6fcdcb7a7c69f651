"""Nested problems: derived oracles against exact derivatives, flat variables, and every bad input refused."""

from typing import Any

import pytest
import torch
from nested_cases import CASES, best_inner, finite_differences
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev

from coterie.errors import UsageError
from coterie.experiment.build import federate
from coterie.experiment.config import FederationTable
from coterie.federation import Batch
from coterie.methods.nested.phases import Inverse, NestedState, global_hypergradient
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.base import View
from coterie.problems.catalogue.minimax_quadratic import minimax_quadratic
from coterie.problems.catalogue.nested_quadratic import nested_quadratic
from coterie.problems.nested import Compositional, Minimax, Nested, SingleLevel, batch_mean
from coterie.problems.tasks.variables import Flat

WIDE = Context(0, torch.float64)
EXACT = Inverse("cg", 50, 1.0, "all")


def hypergradient(problem: Any, x: Tensor, y: Tensor, inverse: Inverse = EXACT) -> Tensor:
    fed, _ = federate(problem, FederationTable(mode="vmap"))
    return global_hypergradient(fed, NestedState(x, y, problem.task.kind), inverse, Draw.of(0))


@pytest.mark.parametrize("kind", CASES)
def test_hypergradients_equal_finite_differences(kind: str) -> None:
    problem = CASES[kind]()
    x = problem.start + 0.4
    found = hypergradient(problem, x, best_inner(problem, x))
    torch.testing.assert_close(found, finite_differences(problem, x), rtol=1e-5, atol=1e-7)


def test_the_closed_form_is_its_own_finite_difference_and_the_hypergradient() -> None:
    problem = nested_quadratic(WIDE, clients=4, dimension=3, inner_dimension=5)
    x = Draw.of(3).normal(3, dtype=torch.float64)
    exact = problem.exact.hypergradient(x)
    torch.testing.assert_close(exact, finite_differences(problem, x), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(exact, grad(problem.exact.objective)(x), rtol=1e-9, atol=1e-9)
    y = problem.exact.inner(x)
    torch.testing.assert_close(hypergradient(problem, x, y), exact, rtol=1e-8, atol=1e-8)
    ell = float(torch.linalg.eigvalsh(problem.exact.hessian).max())
    series = hypergradient(problem, x, y, Inverse("deterministic", 200, ell, "all"))
    torch.testing.assert_close(series, exact, rtol=1e-8, atol=1e-8)
    assert float(problem.exact.hypergradient(problem.exact.optimum).norm()) < 1e-12


def test_hypergradients_of_the_other_kinds_equal_their_closed_forms() -> None:
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    game = minimax_quadratic(WIDE, clients=5, dimension=3, centred=False)
    h, lam, t, b = (column.mean(0) for column in game.train.columns)
    y = (b - t * x) / h
    torch.testing.assert_close(hypergradient(game, x, y), lam * x - t * y)
    A = Draw.of(2).client(torch.arange(4)).normal(1, 3, 3, dtype=torch.float64)
    goals = Draw.of(3).client(torch.arange(4)).normal(1, 3, dtype=torch.float64)
    place: dict[str, Any] = {"x": torch.zeros(3), "dtype": torch.float64}
    composed = Compositional(lambda x, b: b.inputs[0] @ x, lambda y, b: 0.5 * (y - b.inputs[0]).square().sum())
    mean = A.mean((0, 1))
    found = hypergradient(composed.on(list(A), list(goals), **place), x, mean @ x)
    torch.testing.assert_close(found, mean.T @ (mean @ x - goals.mean((0, 1))))
    single = SingleLevel(lambda x, b: 0.5 * (x - b.inputs[0]).square().sum()).on(list(goals), **place)
    torch.testing.assert_close(hypergradient(single, x, x[:0]), x - goals.mean((0, 1)))


@pytest.mark.parametrize("centred", [True, False])
def test_the_saddle_point_is_one(centred: bool) -> None:
    problem = minimax_quadratic(WIDE, clients=7, dimension=3, centred=centred)
    saddle = problem.exact
    assert float(hypergradient(problem, saddle.x, saddle.y).norm()) < 1e-12
    assert float((best_inner(problem, saddle.x) - saddle.y).norm()) < 1e-12
    assert (float(saddle.y.norm()) < 1e-12) is centred
    assert problem.measure(View(saddle.x, inner=saddle.y))["distance_to_optimum"] == 0.0


def test_the_paper_s_minimax_problem_is_at_spread_zero() -> None:
    problem = minimax_quadratic(WIDE, clients=50, dimension=3, spread=0.0)
    h, lam, t, b = problem.train.columns
    assert bool((h == 1.0).all())
    assert bool((lam == 10.0).all())
    assert float(t.min()) > 0.0
    assert float(t.max()) < 0.1
    assert float(b.mean(0).abs().max()) < 1e-12
    x, y = torch.ones(3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    expected = -(0.5 * y @ y - b[4] @ y + t[4] * y @ x) + 5.0 * x @ x
    torch.testing.assert_close(problem.task.f(x, y, problem.train.client(4).all()), expected)


@pytest.mark.parametrize("kind", ["bilevel", "minimax", "compositional"])
def test_oracles_equal_dense_derivatives(kind: str) -> None:
    problem = CASES[kind]()
    task, batch, goal = problem.task, problem.train.client(1).all(), (problem.valid or problem.train).client(1).all()
    x, y = problem.start + 0.1, problem.inner_start + 0.2
    v = Draw.of(1).normal(len(y), dtype=torch.float64)
    torch.testing.assert_close(task.inner_gradient(x, y, batch), grad(task.g, argnums=1)(x, y, batch))
    torch.testing.assert_close(task.inner_hvp(x, y, v, batch), hessian(task.g, argnums=1)(x, y, batch) @ v)
    cross = jacfwd(jacrev(task.g, argnums=0), argnums=1)(x, y, batch)  # d_x × d_y
    torch.testing.assert_close(task.cross(x, y, v, batch), cross @ v)
    torch.testing.assert_close(task.direct_gradient(x, y, goal), grad(task.f, argnums=0)(x, y, goal))
    torch.testing.assert_close(task.outer_gradient(x, y, goal), grad(task.f, argnums=1)(x, y, goal))


def test_inner_and_outer_rows_may_differ() -> None:
    problem = CASES["bilevel"]()
    assert problem.train.counts.tolist() == [6] * 4
    assert problem.valid is not None
    assert problem.valid.counts.tolist() == [5] * 4
    assert problem.offers == {"nested"}
    assert CASES["minimax"]().offers == {"nested", "minimax"}
    assert CASES["single-level"]().offers == {"nested", "gradient"}


def test_variables_are_views_of_one_flat_vector() -> None:
    net = nn.Linear(3, 2)
    flat = Flat({"net": net, "scale": torch.ones(2, 2)}, "x").to(dtype=torch.float64, device="cpu")
    assert flat.size == 8 + 4
    theta = torch.arange(12.0, dtype=torch.float64)
    value = flat(theta)
    assert value["scale"].data_ptr() == theta[8:].data_ptr()
    weight, bias = theta[:6].view(2, 3), theta[6:8]
    inputs = torch.ones(5, 3, dtype=torch.float64)
    torch.testing.assert_close(value["net"](inputs), inputs @ weight.T + bias)
    assert value["net"].flat.data_ptr() == theta.data_ptr()
    named = flat.named(theta)
    assert list(named) == ["x.net.weight", "x.net.bias", "x.scale"]
    assert named["x.scale"].shape == (2, 2)
    assert torch.equal(flat.start[:6], net.weight.detach().double().reshape(-1))


def test_measures_and_names_of_one_s_own_problem() -> None:
    problem = CASES["bilevel"]()
    view = View(problem.start, inner=problem.inner_start)
    assert set(problem.measure(view)) == {"outer_loss", "inner_loss"}
    assert set(problem.named(view)) == {"x.scale", "x.penalty", "y"}
    assert set(CASES["single-level"]().measure(View(problem.start[:3]))) == {"outer_loss"}


def test_losses_that_ignore_padding_go_client_by_client() -> None:
    shards = [(torch.randn(n, 2), torch.randn(n)) for n in (3, 5)]

    def careless(x: Tensor, batch: Batch) -> Tensor:
        return (batch.inputs @ x - batch.labels).square().mean()

    def careful(x: Tensor, batch: Batch) -> Tensor:
        return batch_mean((batch.inputs @ x - batch.labels).square(), batch)

    start = torch.zeros(2)
    assert SingleLevel(careless).on(shards, x=start).task.mixes_rows
    assert not SingleLevel(careful).on(shards, x=start).task.mixes_rows
    assert not SingleLevel(careless).on(shards[:1] * 2, x=start).task.mixes_rows


SHARDS = [(torch.ones(4, 2), torch.ones(4)), (torch.ones(4, 2), torch.zeros(4))]


def good(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    return (batch.inputs @ (x + y) - batch.labels).square().mean() + y.square().sum()


def refused(inner: Any, outer: Any = good, x: Any = None, y: Any = None, **more: Any) -> str:
    x = torch.ones(2) if x is None else x
    with pytest.raises(UsageError) as error:
        Nested(inner, outer).on(SHARDS, x=x, y=torch.ones(2) if y is None else y, **more)
    return str(error.value)


def test_an_inner_loss_without_y_is_refused() -> None:
    text = refused(lambda x, y, batch: (batch.inputs @ x).square().mean())
    assert "the inner loss does not depend on y" in text
    assert "SingleLevel" in text


def test_a_loss_that_is_no_single_number_is_refused() -> None:
    text = refused(lambda x, y, batch: (batch.inputs @ (x + y)).square())
    assert "shape (4,)" in text
    assert ".mean()" in text
    assert "not a tensor" in refused(lambda x, y, batch: float(good(x, y, batch)))
    assert "the outer loss returned a tensor of shape (1,)" in refused(good, lambda x, y, b: good(x, y, b)[None])


def test_a_detached_graph_is_refused() -> None:
    for cut in (lambda x, y, b: good(x, y.detach(), b), lambda x, y, b: good(x, y, b).detach()):
        text = refused(cut)
        assert "graph is cut" in text
        assert ".detach()" in text
    assert "no x in it" in refused(lambda x, y, b: good(x.detach(), y, b))

    def unwatched(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            return good(x, y, batch)

    assert "the outer loss changes with x, but its graph is cut" in refused(good, unwatched)


def test_values_that_are_not_finite_are_refused() -> None:
    text = refused(lambda x, y, batch: good(x, y, batch) + (batch.labels.sum() - 0.0).log() * y.sum())
    assert "is -inf at the start on client 1" in text
    assert "is nan" in refused(good, lambda x, y, b: good(x, y, b) * (y.sum() - 10.0).sqrt())
    assert "gradient of the inner loss in y is not finite" in refused(
        lambda x, y, b: good(x, y, b) + (y - y.detach()).abs().sqrt().sum()
    )
    assert "start value of y holds NaN" in refused(good, y=torch.tensor([1.0, float("nan")]))


def test_problems_without_influence_of_x_are_refused() -> None:
    def only_y(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return (batch.inputs @ y - batch.labels).square().mean()

    assert "x has no influence" in refused(only_y, only_y)
    assert "depends on neither x nor y" in refused(good, lambda x, y, b: b.labels.mean())
    with pytest.raises(UsageError, match="nothing to minimise"):
        SingleLevel(lambda x, batch: batch.labels.mean()).on(SHARDS, x=torch.ones(2))
    with pytest.raises(UsageError, match="f does not depend on y"):
        Minimax(lambda x, y, b: x.square().sum()).on(SHARDS, x=torch.ones(2), y=torch.ones(2))
    with pytest.raises(UsageError, match="r does not depend on x"):
        Compositional(lambda x, b: b.inputs.mean(0), lambda y, b: y.sum()).on(SHARDS, x=torch.ones(2))
    with pytest.raises(UsageError, match="does not depend on y = mean"):
        Compositional(lambda x, b: x, lambda y, b: b.labels.mean()).on(SHARDS, x=torch.ones(2))


def test_misfits_of_shapes_and_types_are_explained() -> None:
    assert "fails on client 0" in refused(lambda x, y, b: (b.inputs @ y.reshape(3)).mean())
    assert "x is a int" in refused(good, x=3)
    assert "real numbers" in refused(good, x=torch.tensor([1, 2]))
    assert "one of each" in refused(good, valid=SHARDS[:1])
    with pytest.raises(UsageError, match="r gives a tensor of shape"):
        Compositional(lambda x, b: x, lambda y, b: y.sum()).on(SHARDS, x=torch.ones(2), y=torch.ones(3))
    with pytest.raises(UsageError, match="r returned a float"):
        Compositional(lambda x, b: 1.0, lambda y, b: y.sum()).on(SHARDS, x=torch.ones(2))


def test_losses_that_cannot_be_differentiated_twice_are_refused_and_others_run_one_by_one() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return y.square().sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2.0 * ctx.saved_tensors[0] * g

    assert "second derivatives" in refused(lambda x, y, b: good(x, y, b) + Once.apply(y))

    def branching(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return good(x, y, batch) if y.sum() > 0 else 2.0 * good(x, y, batch)

    problem = Nested(branching, good).on(SHARDS, x=torch.ones(2), y=torch.ones(2))
    assert not problem.task.vmaps
    assert "torch.where" in problem.task.reason
