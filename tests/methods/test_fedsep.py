"""FedSep: encode is the derivative of decode, the update descends, and learning over a thin line works."""

from functools import cache
from typing import Any

import pytest
import torch
from learners import WIDE, a_quadratic, federation, play
from torch import nn
from torch.func import vmap

import coterie
from coterie.errors import UsageError
from coterie.federation import Shard, Static, work
from coterie.federation.naming import UnknownWork
from coterie.federation.work import name_of
from coterie.methods import by_objective, count_sketch, fedsep, fedsep_redraw, two_layer, uncompressed
from coterie.methods.compressed.fedsep import sketch_decode, sketch_encode
from coterie.methods.compressed.two_layer import Learning, descend, implicit
from coterie.methods.shared.works import gradient
from coterie.numerics import Draw
from coterie.numerics.sketches import sketch
from coterie.problems import Context
from coterie.problems.catalogue import sketch as sketch_problem

SKETCHES = ("gaussian", "hadamard", "sign")
wide = {"dtype": torch.float64}


def normal(name, *shape):
    return Draw.of(3).phase(name).normal(*shape, **wide)


def one_shard(problem: Any) -> Shard:
    return Shard(problem.task, problem.train.client(0), None)


def derivative_by_differences(decode, x, v, h=1e-6):
    """(∂y/∂x)ᵀv by central differences in every entry of x at once."""
    steps = h * torch.eye(len(x), **wide)
    return (vmap(decode)(x + steps) - vmap(decode)(x - steps)) @ v / (2 * h)


def check_encode(decode, encode, shard: Shard, static: Static, x):
    """Enc{v} = −(∂y/∂x)ᵀv to 1e-4."""
    v = normal("v", shard.task.model.size)
    y = decode(shard, x, None, static, Draw.of(0))
    expected = derivative_by_differences(lambda at: decode(shard, at, None, static, Draw.of(0)), x, v)
    encoded = encode(shard, (x, y, v), None, static, Draw.of(0))
    assert float(expected.norm()) > 1e-2
    torch.testing.assert_close(encoded, -expected, rtol=1e-4, atol=1e-4)


def sketch_settings(**changes):
    usual = {"size": 8, "sketch": "gaussian", "sketch_seed": 1, "penalty": 0.0, "decode_steps": 30}
    return Static(**{**usual, "decode_step": None, "encode_steps": 100, **changes})


@cache
def regression() -> Any:
    """Logistic regression on some digits: convex, 650 parameters, and a start that is not 0."""
    return sketch_problem.sketch(WIDE, model="logistic", clients=3, test=1700)


@pytest.mark.parametrize("kind", SKETCHES)
def test_encode_is_the_derivative_of_decode_without_a_penalty(kind):
    problem = a_quadratic(dimension=24, rows=30)
    x = sketch(kind, 8, 24, 1).apply(problem.start) + 0.1 * normal("x", 8)
    check_encode(sketch_decode, sketch_encode, one_shard(problem), sketch_settings(sketch=kind), x)


@pytest.mark.parametrize(("kind", "steps"), [("gaussian", 400), ("hadamard", 200)])
def test_encode_is_the_derivative_of_decode_of_the_lasso(kind, steps):
    problem = regression()
    static = sketch_settings(size=40, sketch=kind, penalty=0.03, decode_steps=steps)
    x = sketch(kind, 40, 650, 1).apply(problem.start)
    check_encode(sketch_decode, sketch_encode, one_shard(problem), static, x)


A, B = normal("A", 6, 4), normal("B", 5, 2)


@work
def ridge(shard, shared, private, static, draw):
    """½‖Ay − x‖² + ρ/2 ‖y‖²: strongly convex, so a unique decode."""
    x, y = shared
    return 0.5 * (A @ y - x).square().sum() + 0.5 * static.rho * y.square().sum()


@work
def crooked(shard, shared, private, static, draw):
    """Not quadratic, and of the client's own rows."""
    x, y = shared
    rows = shard.train.all()
    data = 0.05 * (rows.inputs @ y - rows.labels).square().mean()
    return 0.5 * (y - torch.tanh(A[:4] @ x)).square().sum() + 0.1 * (y * x.sum()).cos().sum() + data


@pytest.mark.parametrize("series", ["neumann", "cg"])
@pytest.mark.parametrize("objective", [ridge, crooked], ids=["ridge", "general"])
def test_encode_is_the_derivative_of_decode_of_an_objective(objective, series):
    static = Static(
        objective=name_of(objective),
        decode_step=0.1,
        decode_steps=150,
        series=series,
        terms=150 if series == "neumann" else 8,
        rho=2.0,
    )
    shard = one_shard(a_quadratic())
    x = normal("x", 6 if objective is ridge else 4)
    check_encode(descend, implicit, shard, static, x)


MASK = torch.tensor([1.0, 0.0, 1.0, 1.0], **wide)


@work
def masked(shard, shared, private, static, draw):
    """y = a ⊙ x."""
    return MASK * shared


@work
def by_rows(shard, shared, private, static, draw):
    return shared.sum() * shard.train.all().inputs.mean(0)


@work
def unmasked(shard, shared, private, static, draw):
    """Enc = −Diag(a)."""
    return -MASK * shared[2]


def test_encode_is_the_derivative_of_a_masked_decode():
    check_encode(masked, unmasked, one_shard(a_quadratic()), Static(), normal("x", 4))


def h_of(problem, decode):
    """h(x) = mean_k f_k(y_x)."""

    def h(x):
        theta = decode(x)
        shards = (problem.train.client(k) for k in range(problem.clients))
        return torch.stack([problem.task.full_loss(theta, rows) for rows in shards]).mean()

    return h


def check_descent(method, problem, decode, step):
    """x⁺ = x − η_g η ∇h(x) for one full-batch step, ∇h by finite differences; so h falls."""
    before = method.init(problem, problem.clients)
    move = play(method, problem, 1).x - before.x
    h, eps = h_of(problem, decode), 1e-5
    units = eps * torch.eye(len(before.x), **wide)
    slope = (vmap(h)(before.x + units) - vmap(h)(before.x - units)) / (2 * eps)
    assert float(slope.norm()) > 1e-3
    torch.testing.assert_close(move, -step * slope, rtol=1e-4, atol=1e-7)
    assert float(slope @ move) < 0.0
    assert float(h(before.x + 0.01 / step * move)) < float(h(before.x))


@pytest.mark.parametrize("penalty", [0.0, 0.03])
def test_the_update_descends_on_h(penalty):
    problem = regression()
    knobs = {"size": 40, "sketch": "gaussian", "sketch_seed": 1, "penalty": penalty, "encode_steps": 100}
    knobs["decode_steps"] = 30 if penalty == 0.0 else 400
    method = fedsep(**knobs, step=0.01, local_steps=1, batch="all", server_step=2.0)
    static = sketch_settings(**knobs)
    check_descent(method, problem, lambda x: sketch_decode(one_shard(problem), x, None, static, Draw.of(0)), 0.02)


def test_a_vanishing_penalty_changes_nothing():
    """The default server step does not jump at β = 0: while the support exceeds p it is that of β = 0."""
    problem = regression()
    knobs = {"size": 40, "sketch_seed": 1, "step": 0.05, "batch": "all", "decode_steps": 30}
    plain, nearly, sparse = (fedsep(**knobs, penalty=penalty) for penalty in (0.0, 1e-9, 0.1))
    states = [play(method, problem, 3) for method in (plain, nearly)]
    torch.testing.assert_close(states[0].x, states[1].x, rtol=1e-4, atol=1e-5)
    start = sparse.init(problem, 3)
    assert int(sparse.view(start).more["support"]) <= 40
    unit = play(fedsep(**knobs, penalty=0.1, server_step=1.0), problem, 1)
    torch.testing.assert_close(play(sparse, problem, 1).x, unit.x)
    assert float((states[0].x - start.x).norm()) > 0.1


def test_the_general_update_descends_on_h():
    problem = a_quadratic()
    knobs = {"decode_step": 0.05, "decode_steps": 300, "rho": 2.0}
    learning = Learning(0.01, 1, "all")
    method = by_objective(ridge, normal("x", 6), **knobs, series="cg", terms=8, learning=learning, server_step=2.0)
    static = Static(objective=name_of(ridge), **knobs)
    check_descent(method, problem, lambda x: descend(one_shard(problem), x, None, static, Draw.of(0)), 0.02)


@work
def linear(shard, shared, private, static, draw):
    """½‖y − Bx‖²: a model of five numbers that two stand for."""
    x, y = shared
    return 0.5 * (y - B.to(y) @ x).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_general_decode_is_measured_where_x_has_another_size_than_the_model(dtype):
    B_true = torch.tensor([1.0, -1.0])
    inputs = normal("inputs", 3, 40, 4).float()
    shards = [(x, x @ (B.float() @ B_true)[:4] + (B.float() @ B_true)[4]) for x in inputs]
    more = {"target": shards[0], "test": shards[1], "loss": "squared", "dtype": dtype}
    problem = coterie.Weighting.on(shards, model=nn.Linear(4, 1), **more)
    knobs = {"decode_step": 0.5, "decode_steps": 30, "learning": Learning(0.1, 5, "all"), "server_step": 0.2}
    done = coterie.fit(problem, by_objective(linear, torch.zeros(2), **knobs), rounds=60, mode="vmap")
    assert done.history[-1]["test_loss"] < 1e-2 * done.history[0]["test_loss"]
    torch.testing.assert_close(done._result.view.model, (B @ B_true.double()).to(dtype), atol=0.1, rtol=0.0)


@pytest.mark.parametrize(
    ("decode", "complaint"),
    [(masked, r"x is decoded to shape \(3,\), the model has \(4,\)"), (by_rows, "x has 3 numbers and the model 4")],
    ids=["another size", "needs rows"],
)
def test_an_x_that_the_server_cannot_decode_is_refused_before_the_first_round(decode, complaint, monkeypatch):
    monkeypatch.setattr("test_fedsep.MASK", torch.ones(3, **wide))
    method = two_layer(decode, unmasked, torch.zeros(3))
    with pytest.raises(UsageError, match=f"{complaint}.* give model=, a function"):
        method.init(a_quadratic(), 3)


def test_an_explicit_pair_learns_what_its_decode_can_reach():
    """Masked gradient descent: entries outside the mask stay, the others reach their optimum."""
    problem = a_quadratic(curvature=1.0)
    method = two_layer(masked, unmasked, problem.start, learning=Learning(0.5, 1, "all"), model=lambda x: MASK * x)
    state = play(method, problem, 200)
    G, _ = federation(problem).gather(gradient, method.view(state).model, draw=Draw.of(0), batch="all")
    assert float((MASK * G.mean(0)).abs().max()) < 1e-8
    assert float(G.mean(0).abs().max()) > 1e-3
    assert torch.equal(state.x[MASK == 0.0], problem.start[MASK == 0.0])


def test_only_works_are_found():
    static = Static(objective=name_of(ridge), decode="os:getcwd")
    assert static.work("objective") is ridge
    with pytest.raises(UnknownWork, match="is no work"):
        static.work("decode")


def test_without_penalty_one_full_step_is_projected_gradient_descent():
    problem = a_quadratic(dimension=24, rows=30)
    S = sketch("hadamard", 8, 24, 5)
    method = fedsep(size=8, sketch_seed=5, step=0.05, local_steps=1, batch="all", server_step=3.0)
    theta = problem.start
    for rounds in (1, 2, 3):
        G, _ = federation(problem).gather(gradient, theta, draw=Draw.of(0), batch="all")
        theta = theta - 0.15 * S.adjoint(S.apply(G.mean(0)))
        torch.testing.assert_close(method.view(play(method, problem, rounds)).model, theta)


@pytest.mark.parametrize("kind", SKETCHES)
def test_learning_stays_in_p_dimensions_and_error_feedback_would_be_void(kind):
    problem = a_quadratic(dimension=24, rows=30)
    S = sketch(kind, 8, 24, 0)
    M = S.apply(torch.eye(24, **wide)).T
    method = fedsep(size=8, sketch=kind, decode_steps=30, encode_steps=30, step=0.02, batch=4)
    moved = method.view(play(method, problem, 5)).model - problem.start
    inside = torch.linalg.pinv(M) @ M
    torch.testing.assert_close(inside @ moved, moved)
    lost = normal("v", 24) - inside @ normal("v", 24)
    torch.testing.assert_close(S.apply(lost), torch.zeros(8, **wide))


def test_a_fresh_sketch_each_round_leaves_the_first_p_dimensions():
    problem = a_quadratic(dimension=24, rows=30)
    method = fedsep_redraw(size=2, step=0.02, batch=4)
    states = [play(method, problem, rounds) for rounds in (1, 2, 3)]
    moves = torch.stack([s.theta - problem.start for s in states])
    assert torch.linalg.matrix_rank(moves) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", SKETCHES)
def test_error_feedback_of_the_redrawn_sketch_loses_nothing(kind):
    """What clients sent and what they still hold back is what they learnt: θ − θ₀ = Σ v − mean e."""
    problem = a_quadratic(dimension=24, rows=30)
    knobs = {"size": 8, "sketch": kind, "solve_steps": 40, "error_feedback": True}
    method = fedsep_redraw(**knobs, step=0.02, local_steps=1, batch="all")
    theta, learnt = problem.start, torch.zeros(24, **wide)
    for rounds in range(1, 5):
        G, _ = federation(problem).gather(gradient, theta, draw=Draw.of(0), batch="all")
        learnt = learnt - 0.02 * G.mean(0)
        state = play(method, problem, rounds)
        theta, (copies, errors) = state.theta, state.replicas.memory.payload
        torch.testing.assert_close(theta - problem.start, learnt - errors.mean(0))
    torch.testing.assert_close(copies[0], play(method, problem, rounds - 1).theta)


def moved(method, problem, rounds=3, **table):
    fed = federation(problem, **table)
    play(method, problem, rounds, fed=fed)
    total = fed.ledger.total
    assert total.rounds == rounds
    return total


def test_p_numbers_go_each_way():
    problem = a_quadratic(dimension=24, rows=30)
    for method in (fedsep(size=7), fedsep(size=7, penalty=0.1), fedsep_redraw(size=7)):
        total = moved(method, problem)
        assert (total.bytes_up, total.bytes_down) == (3 * 5 * 7 * 8, 3 * 5 * 7 * 8)  # 3 rounds, 5 clients, float64
        assert (total.floats_up, total.floats_down) == (105, 105)


def test_fixed_sketches_need_no_memory_so_absence_costs_nothing_and_redrawn_ones_send_the_model():
    problem = a_quadratic(dimension=24, rows=30)
    assert moved(fedsep(size=7), problem, count=2).floats_down == 3 * 2 * 7
    total = moved(fedsep_redraw(size=7), problem, count=2)
    assert total.floats_up == 3 * 2 * 7
    assert total.floats_down == 2 * 7 + 2 * 2 * 24  # in rounds 2 and 3 somebody had missed the round before


@pytest.mark.parametrize("settings", [{"size": 4}, {"size": 5}])
@pytest.mark.parametrize("make", [fedsep, fedsep_redraw])
def test_a_sketch_that_saves_nothing_is_refused_before_the_first_round(make, settings):
    problem = a_quadratic()
    with pytest.raises(UsageError, match="below 4; larger saves nothing, use uncompressed"):
        make(**settings).init(problem, 5)


def test_other_bad_settings_are_refused():
    with pytest.raises(UsageError, match=r"size = 0.*greater than or equal to 1"):
        fedsep(size=0)
    with pytest.raises(UsageError, match="sketch = 'fourier'"):
        fedsep(sketch="fourier")
    with pytest.raises(UsageError, match="above 1/‖S‖² = 1, where proximal gradient need not converge"):
        fedsep(size=2, penalty=0.1, decode_step=5.0).init(a_quadratic(), 5)


def test_an_unfinished_decode_shows_in_the_record():
    problem = regression()
    gaps = []
    for steps in (1, 10, 400):
        method = fedsep(size=40, penalty=0.03, decode_steps=steps)
        more = method.view(method.init(problem, 3)).more
        assert 0 < more["support"] < 650
        gaps.append(more["decode_gap"])
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-6


@cache
def images(partition: str) -> Any:
    return sketch_problem.sketch(Context(0), model="mlp", partition=partition)


def accuracy(method, partition="iid", rounds=40):
    problem = images(partition)
    return problem.measure(method.view(play(method, problem, rounds)))["test_accuracy"]


def test_the_server_step_is_what_makes_a_small_sketch_learn():
    """d = 4810, p = 200: with η_g = 1 as for averages nothing is learnt in 40 rounds."""
    assert accuracy(fedsep(size=200)) > 0.85
    assert accuracy(fedsep(size=200, server_step=1.0)) < 0.6


@pytest.mark.parametrize("partition", ["iid", "classes"])
@pytest.mark.slow
def test_at_high_compression_fedsep_beats_the_count_sketch_and_fresh_sketches_beat_both(partition):
    """Figure 2 in small: 50 numbers a round for 4810 parameters, each way."""
    fixed, fresh = accuracy(fedsep(size=50), partition), accuracy(fedsep_redraw(size=50), partition)
    table = accuracy(count_sketch(columns=50, k=25), partition)
    assert table + 0.3 < fixed
    assert fixed + 0.15 < fresh


def test_little_is_lost_at_low_compression():
    assert accuracy(fedsep(size=1000)) > accuracy(uncompressed()) - 0.02


@pytest.mark.slow
def test_the_fast_sketches_learn_what_the_dense_one_learns():
    dense, *fast = (accuracy(fedsep(size=200, sketch=kind, decode_steps=4, encode_steps=4)) for kind in SKETCHES)
    assert dense > 0.85
    assert max(abs(dense - one) for one in fast) < 0.04
