"""Variables that stay at a client, sets, validation at the server, several inner problems, test rows: against the same
problem written without them, and against closed forms. What no method supports is refused before the first round."""

from typing import Any

import pytest
import torch
from torch import Tensor

import coterie
from coterie.errors import UsageError
from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.problems import Ball, Box, PerClient, Simplex
from coterie.problems.nested import NestedProblem, batch_mean

M, D, P = 4, 3, 2
WIDE: dict[str, Any] = {"dtype": torch.float64}
RUN: dict[str, Any] = {"mode": "vmap"}


def normal(name: str, *shape: int) -> Tensor:
    return Draw.of(7).phase(name).normal(*shape, dtype=torch.float64)


def shards(name: str, n: int = 5) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, the client's number, labels."""
    return [
        (normal(f"{name} x {k}", n, P), torch.full((n,), k), normal(f"{name} y {k}", n) + 0.5 * k) for k in range(M)
    ]


def errors(y: Tensor, batch: Batch) -> Tensor:
    return (batch.inputs @ y - batch.labels).square()


def own_inner(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """Ridge regression; x weighs a penalty that depends on the rows, and shifts the solution."""
    penalty = (batch.inputs * x[:P].exp() * y).square().sum(-1) + x[2] * (batch.inputs @ y)
    return batch_mean(errors(y, batch) + penalty, batch) + y.square().sum()


def own_outer(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    return batch_mean(errors(y, batch), batch) + 0.1 * x.square().sum()


def all_inner(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    return own_inner(x[batch.columns[1][:1]][0], y, batch)


def all_outer(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    return own_outer(x[batch.columns[1][:1]][0], y, batch)


STEPS: dict[str, Any] = {"step": 0.2, "local_steps": 2, "series": "cg", "terms": 4, "batch": "all"}


def own_x(**more: Any) -> NestedProblem:
    return coterie.Nested(own_inner, own_outer).on(
        shards("t"), shards("v"), x=PerClient(torch.zeros(D)), y=torch.zeros(P), **WIDE, **more
    )


def test_own_outer_variables_are_those_of_one_shared_matrix() -> None:
    shared = coterie.Nested(all_inner, all_outer).on(
        shards("t"), shards("v"), x=torch.zeros(M, D), y=torch.zeros(P), **WIDE
    )
    one = coterie.fit(own_x(), coterie.methods.fednest(outer_step=0.2, **STEPS), rounds=3, **RUN)
    other = coterie.fit(shared, coterie.methods.fednest(outer_step=0.2 * M, **STEPS), rounds=3, **RUN)
    torch.testing.assert_close(one.variables["x"], other.variables["x"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.variables["y"], other.variables["y"], rtol=1e-10, atol=1e-12)
    by_client = coterie.fit(own_x(), coterie.methods.fednest(outer_step=0.2, **STEPS), rounds=3, mode="sequential")
    torch.testing.assert_close(one.variables["x"], by_client.variables["x"], rtol=1e-10, atol=1e-12)
    assert one.variables["x"].shape == (M, D)
    assert float(one.variables["x"].std(0).min()) > 1e-4  # they differ from client to client
    assert one.history[-1]["outer_loss"] == pytest.approx(other.history[-1]["outer_loss"], rel=1e-10)


def test_soba_keeps_own_outer_variables_at_their_client() -> None:
    shared = coterie.Nested(all_inner, all_outer).on(
        shards("t"), shards("v"), x=torch.zeros(M, D), y=torch.zeros(P), **WIDE
    )
    one = coterie.fit(own_x(), coterie.methods.soba(step=0.1, outer_step=0.05), rounds=4, **RUN)
    other = coterie.fit(shared, coterie.methods.soba(step=0.1, outer_step=0.05 * M), rounds=4, **RUN)
    torch.testing.assert_close(one.variables["x"], other.variables["x"], rtol=1e-10, atol=1e-12)
    assert float(one.variables["x"].abs().max()) > 1e-3
    assert one.ledger.total.floats_up == 4 * M * 2 * P  # D_y and D_v
    assert one.ledger.total.floats_down == 4 * M * 2 * P  # y and v
    with pytest.raises(UsageError, match=r"give numbers for method\.step"):
        coterie.fit(own_x(), coterie.methods.soba(), rounds=1)


def test_own_outer_variables_never_leave_their_client() -> None:
    fit = coterie.fit(own_x(), coterie.methods.fednest(outer_step=0.2, **STEPS), rounds=2, **RUN)
    causes = fit.ledger.by_cause
    assert causes["fednest/own-outer-steps"].floats_up == 0
    for cause, moved in causes.items():  # everything that moves is a y, or a product of its size
        assert moved.floats_up % (M * P) == 0, cause
        assert moved.floats_down % (M * P) == 0, cause
    # per round: q, y⁺, ∇_y f, at most 4 products; each P numbers up per client
    assert fit.ledger.total.floats_up <= 2 * (3 + 4) * M * P


def test_own_inner_variables_are_exact_with_local_hypergradients() -> None:
    """g_k = ½ h_k y² − y (c_k·x), f_k = ½ (y − a_k)² + ½ ‖x‖²: y_k = c_k·x / h_k, and x* solves a linear system."""
    h, c, a = 1.0 + normal("h", M, 1).sigmoid(), normal("c", M, D), normal("a", M)
    rows = [(h[k : k + 1], c[k : k + 1], a[k : k + 1]) for k in range(M)]

    def inner(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        h_k, c_k, _ = (column[0] for column in batch.columns)
        return 0.5 * h_k[0] * y.square().sum() - y.sum() * (c_k @ x)

    def outer(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return 0.5 * (y.sum() - batch.labels[0]).square() + 0.5 * x.square().sum()

    problem = coterie.Nested(inner, outer).on(rows, x=torch.zeros(D), y=PerClient(torch.zeros(1)), **WIDE)
    settings: dict[str, Any] = {"step": 2.0, "local_steps": 4, "terms": 20, "lipschitz": 2.0, "batch": "all"}
    method = coterie.methods.lfednest(outer_step=0.5, inner_rounds=2, **settings)
    fit = coterie.fit(problem, method, rounds=30, record=30, **RUN)
    j = c / h
    best = torch.linalg.solve(torch.eye(D, dtype=torch.float64) + j.T @ j / M, j.T @ a / M)
    torch.testing.assert_close(fit.variables["x"], best, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(fit.variables["y"][:, 0], j @ best, rtol=0.0, atol=1e-6)
    total = fit.ledger.total
    assert total.rounds == 30  # one per round
    assert total.floats_up == 30 * M * (D + 2)  # x_k, and two numbers of the series
    assert total.floats_down == 30 * M * D


def test_methods_without_support_are_refused_with_those_that_fit() -> None:
    with pytest.raises(UsageError, match=r"nested with x per client\. Methods that fit: .*fednest"):
        coterie.fit(own_x(), coterie.methods.lfednest(), rounds=1)
    problem = coterie.Nested(own_inner, own_outer).on(
        shards("t"), shards("v"), x=torch.zeros(D), y=PerClient(torch.zeros(P)), **WIDE
    )
    with pytest.raises(UsageError, match=r"nested with y per client\. Methods that fit: .*lfednest"):
        coterie.fit(problem, coterie.methods.fednest(), rounds=1)


def test_variables_without_anything_in_common_are_refused() -> None:
    both: dict[str, Any] = {"x": PerClient(torch.zeros(D)), "y": PerClient(torch.zeros(P))}
    with pytest.raises(UsageError, match="nothing in common"):
        coterie.Nested(own_inner, own_outer).on(shards("t"), **both)
    with pytest.raises(UsageError, match="nothing in common"):
        coterie.SingleLevel(lambda x, b: errors(x, b).mean()).on(shards("t"), x=PerClient(torch.zeros(P)))
    with pytest.raises(UsageError, match="cannot be PerClient"):
        coterie.Compositional(lambda x, b: x, lambda y, b: y.sum()).on(
            shards("t"), x=torch.zeros(2), y=PerClient(torch.zeros(2))
        )


@pytest.mark.parametrize("make", [lambda: Box(1.0, 0.0), lambda: Ball(-1.0), lambda: Simplex(0.0)])
def test_empty_sets_are_refused(make: Any) -> None:
    with pytest.raises(UsageError, match="empty"):
        make()


def test_projections_are_the_nearest_points() -> None:
    v = normal("v", 6) * 2.0
    torch.testing.assert_close(Box(-0.5, torch.full((6,), 0.5)).project(v), v.clamp(-0.5, 0.5))
    centre = normal("centre", 6)
    inside = Ball(0.7, centre).project(v)
    torch.testing.assert_close(inside, centre + 0.7 * (v - centre) / (v - centre).norm())
    torch.testing.assert_close(Ball(100.0, centre).project(v), v)
    w = Simplex(3.0).project(v)
    assert float(w.min()) >= 0.0
    assert float(w.sum()) == pytest.approx(3.0)
    slope = v - w  # the normal cone: equal on the support, not larger elsewhere
    assert float((slope[w > 0] - slope[w > 0].max()).abs().max()) < 1e-12
    assert bool((slope[w == 0] <= slope[w > 0].max() + 1e-12).all())


def test_no_projection_is_refused() -> None:
    def on(**sets: Any) -> NestedProblem:
        return coterie.Nested(own_inner, own_outer).on(shards("t"), x=torch.zeros(D), y=torch.zeros(P), **WIDE, **sets)

    with pytest.raises(UsageError, match="x_set is no projection"):
        on(x_set=lambda v: 0.5 * v)
    with pytest.raises(UsageError, match="the set is empty"):
        on(x_set=lambda v: v / 0.0)
    with pytest.raises(UsageError, match="x_set is a str"):
        on(x_set="simplex")
    with pytest.raises(UsageError, match=r"must return a tensor of shape \(3,\)"):
        on(x_set=lambda v: v[:2])
    with pytest.raises(UsageError, match="y_set is for minimax problems"):
        on(y_set=Box())
    with pytest.raises(UsageError, match="x_set is a dict, and x is none"):
        on(x_set={"a": Box()})


def test_the_minimum_in_a_box_is_found() -> None:
    """f(x, y) = ½‖y − a‖², y*(x) = x: the minimum of ½‖x − a‖² over the box is the projection of a."""
    goals = [normal(f"a {k}", 1, D) * 2.0 for k in range(M)]
    problem = coterie.Nested(
        lambda x, y, b: 0.5 * (y - x).square().sum(), lambda x, y, b: 0.5 * (y - b.inputs[0]).square().sum()
    ).on(goals, x=torch.full((D,), 5.0), y=torch.zeros(D), x_set=Box(-0.1, 0.2), **WIDE)
    assert float(problem.start.max()) == pytest.approx(0.2)
    best = torch.stack(goals).mean((0, 1)).clamp(-0.1, 0.2)
    fit = coterie.fit(problem, coterie.methods.soba(step=1.0, outer_step=0.3), rounds=60, record=60, **RUN)
    torch.testing.assert_close(fit.variables["x"], best, rtol=0.0, atol=1e-6)
    for name in ("fednest", "lfednest", "lfednest-nonalt", "lfednest-svrg"):
        make = getattr(coterie.methods, name.replace("-", "_"))
        method = make(step=1.0, local_steps=2, outer_step=0.8, outer_steps=2, lipschitz=1.0, terms=2, batch="all")
        fit = coterie.fit(problem, method, rounds=15 if name == "fednest" else 3, **RUN)
        if name == "fednest":
            torch.testing.assert_close(fit.variables["x"], best, rtol=0.0, atol=1e-6)
        assert float(fit.variables["x"].max()) <= 0.2 + 1e-12
        assert float(fit.variables["x"].min()) >= -0.1 - 1e-12


def test_a_game_on_the_simplex_finds_the_worst_clients() -> None:
    """min_x max_{y ∈ Δ} Σ_j y_j (x − a_j)² − ½ρ‖y‖², each client with its own a_j: x and y are known by symmetry."""
    a = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    rows = [(a[k : k + 1], torch.full((1,), k)) for k in range(3)]

    def payoff(x: dict[str, Tensor], y: Tensor, batch: Batch) -> Tensor:
        return 3.0 * y[batch.labels[:1]].sum() * (x["place"].sum() - batch.inputs[0]).square() - 0.5 * y.square().sum()

    problem = coterie.Minimax(payoff).on(
        rows, x={"place": torch.full((1,), 0.7)}, y=torch.zeros(3), y_set=Simplex(), x_set={"place": Box(-2, 2)}, **WIDE
    )
    torch.testing.assert_close(problem.inner_start, torch.full((3,), 1 / 3, dtype=torch.float64))
    method = coterie.methods.fednest(step=0.5, local_steps=1, inner_rounds=3, outer_step=0.2, batch="all")
    fit = coterie.fit(problem, method, rounds=40, record=40, **RUN)
    # at x = 0 the two ends lose 1, the middle 0: y maximises y₁ + y₃ − ½‖y‖² on the simplex, y = (½, 0, ½)
    torch.testing.assert_close(fit.variables["x.place"], torch.zeros(1, dtype=torch.float64), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(
        fit.variables["y"], torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64), atol=1e-6, rtol=0
    )
    with pytest.raises(UsageError, match="x_set names 'spot', but x has the parts place"):
        coterie.Minimax(payoff).on(rows, x={"place": torch.ones(1)}, y=torch.zeros(3), x_set={"spot": Box()})


def test_validation_at_the_server_is_validation_at_every_client() -> None:
    valid = shards("v")[0]
    settings: dict[str, Any] = {"outer_step": 0.2, **STEPS}

    def on(rows: Any) -> Any:
        problem = coterie.Nested(own_inner, own_outer).on(
            shards("t"), rows, x=torch.zeros(D), y=torch.zeros(P), test=shards("w")[0], **WIDE
        )
        return coterie.fit(problem, coterie.methods.fednest(**settings), rounds=3, **RUN)

    one, other = on(valid), on([valid] * M)
    torch.testing.assert_close(one.variables["x"], other.variables["x"], rtol=1e-9, atol=1e-12)
    for name in ("outer_loss", "inner_loss", "test_loss"):
        assert one.history[-1][name] == pytest.approx(other.history[-1][name], rel=1e-9)
    assert "fednest/outer-y-gradient" in other.ledger.by_cause
    assert "fednest/outer-y-gradient" not in {k for k, v in one.ledger.by_cause.items() if v.floats_up}
    assert one.ledger.total.rounds == other.ledger.total.rounds - 2 * 3  # no ∇_y f, no x⁺
    problem = coterie.Nested(own_inner, own_outer).on(shards("t"), valid, x=torch.zeros(D), y=torch.zeros(P))
    with pytest.raises(UsageError, match=r"set method\.outer_steps=1"):
        coterie.fit(problem, coterie.methods.fednest(outer_steps=2), rounds=1)
    with pytest.raises(UsageError, match="nested with validation at the server"):
        coterie.fit(problem, coterie.methods.lfednest(), rounds=1)


def test_validation_at_the_server_cannot_need_what_stays_at_a_client() -> None:
    with pytest.raises(UsageError, match="needs x, which stays"):
        coterie.Nested(own_inner, own_outer).on(
            shards("t"), shards("v")[0], x=PerClient(torch.zeros(D)), y=torch.zeros(P)
        )
    problem = coterie.Nested(own_inner, lambda x, y, b: errors(y, b).mean()).on(
        shards("t"), shards("v")[0], x=PerClient(torch.zeros(D)), y=torch.zeros(P), **WIDE
    )
    fit = coterie.fit(problem, coterie.methods.fednest(outer_step=2.0, **STEPS), rounds=10, **RUN)
    assert fit.history[-1]["outer_loss"] < fit.history[0]["outer_loss"]


def test_several_inner_problems_are_one_with_a_sum() -> None:
    inner = {"a": own_inner, "b": lambda x, y, b: errors(y, b).mean() + x.square().sum() * y.square().sum()}

    def summed(x: Tensor, y: dict[str, Tensor], batch: Batch) -> Tensor:
        return inner["a"](x, y["a"], batch) + inner["b"](x, y["b"], batch)

    def outer(x: Tensor, y: dict[str, Tensor], batch: Batch) -> Tensor:
        return errors(0.5 * (y["a"] + y["b"]), batch).mean() + 0.1 * x.square().sum()

    start: dict[str, Any] = {"x": torch.ones(D), "y": {"a": torch.zeros(P), "b": torch.zeros(P)}, **WIDE}
    fits = [
        coterie.fit(
            coterie.Nested(g, outer).on(shards("t"), shards("v"), **start),
            coterie.methods.fednest(**STEPS),
            rounds=2,
            **RUN,
        )
        for g in (inner, summed)
    ]
    torch.testing.assert_close(fits[0].variables["x"], fits[1].variables["x"])
    assert set(fits[0].variables) == {"x", "y.a", "y.b"}
    with pytest.raises(UsageError, match="one variable for each inner loss"):
        coterie.Nested(inner, outer).on(shards("t"), x=torch.ones(D), y=torch.zeros(P))


def test_test_rows_are_measured_and_never_trained_on() -> None:
    counts = coterie.Measure("worst_error", of=lambda x, y, b: errors(y, b).max(), rows="test")
    problem = own_x(test=shards("w"), measures=[counts])
    fit = coterie.fit(problem, coterie.methods.fednest(outer_step=0.2, **STEPS), rounds=1, **RUN)
    assert {"test_loss", "worst_error", "outer_loss", "inner_loss"} <= set(fit.history[-1])
    plain = coterie.fit(own_x(), coterie.methods.fednest(outer_step=0.2, **STEPS), rounds=1, **RUN)
    assert torch.equal(fit.variables["x"], plain.variables["x"])
    with pytest.raises(UsageError, match="4 train shards but 2 test shards"):
        own_x(test=shards("w")[:2])
