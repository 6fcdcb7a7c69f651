"""Top-k, the count sketch and uncompressed averaging: reductions, what is kept back, and what is billed."""

import pytest
import torch
from learners import a_quadratic, federation, play

from coterie.errors import UsageError
from coterie.methods import count_sketch, fedavg, top_k, uncompressed
from coterie.methods.compressed.count_sketch import sketched_steps
from coterie.methods.shared.works import gradient, local_sgd
from coterie.numerics import Draw
from coterie.numerics.sketches import count_table

D, N = 24, 5
wide = {"dtype": torch.float64}
WALK = {"step": 0.02, "local_steps": 3, "batch": 4}
FULL = {"step": 0.02, "local_steps": 1, "batch": "all"}


@pytest.fixture
def problem():
    return a_quadratic(dimension=D, rows=30)


def gradients(problem, theta):
    return federation(problem).gather(gradient, theta, draw=Draw.of(0), batch="all").rows


def test_uncompressed_is_fedavg_with_equal_weights(problem):
    one = play(uncompressed(**WALK), problem, 4)
    two = play(fedavg(**WALK, weights="uniform"), problem, 4)
    torch.testing.assert_close(one.x, two.x)


def test_the_server_step_scales_the_mean_of_the_walks(problem):
    x = problem.start
    mean = federation(problem).mean(local_sgd, x, draw=Draw.of(1).round(0).phase("walk"), step=0.02, steps=3, batch=4)
    torch.testing.assert_close(play(uncompressed(**WALK, server_step=0.3), problem, 1).x, x + 0.3 * (mean - x))


@pytest.mark.parametrize("down", ["top-k", "dense"])
def test_with_every_entry_kept_top_k_is_uncompressed(problem, down):
    one = play(top_k(k=D, down=down, **WALK, server_step=0.7), problem, 4)
    torch.testing.assert_close(one.x, play(uncompressed(**WALK, server_step=0.7), problem, 4).x)
    assert not one.error.any()


@pytest.mark.parametrize("down", ["top-k", "dense"])
def test_error_feedback_loses_nothing(problem, down):
    """x − x₀ = η_g (Σ walks − mean e_k) − e."""
    learnt, x = torch.zeros(D, **wide), problem.start
    for rounds in range(1, 6):
        learnt = learnt - 0.02 * gradients(problem, x).mean(0)
        state = play(top_k(k=3, down=down, **FULL, server_step=1.5), problem, rounds)
        x, (_, errors) = state.x, state.replicas.memory.payload
        torch.testing.assert_close(x - problem.start, 1.5 * (learnt - errors.mean(0)) - state.error)
    assert bool(state.error.any()) == (down == "top-k")
    assert int((x != problem.start).sum()) > 3


def test_without_error_feedback_only_the_largest_entries_count(problem):
    state = play(top_k(k=3, down="dense", **FULL, error_feedback=False), problem, 1)
    walks = -0.02 * gradients(problem, problem.start)
    kept = torch.where(walks.abs() >= walks.abs().topk(3, dim=1).values[:, -1:], walks, 0.0)
    torch.testing.assert_close(state.x, problem.start + kept.mean(0))
    assert not state.replicas.memory.payload[1].any()


@pytest.mark.parametrize("method", [top_k(k=3, **WALK), count_sketch(columns=8, k=3, **WALK)], ids=lambda m: m.name)
def test_copies_at_the_clients_follow_the_server(problem, method):
    """Also where clients miss rounds: what an active client learns from is the server's model."""
    fed, state = federation(problem, count=3), None
    for t in range(8):
        draw = Draw.of(1).round(t)
        state = method.init(problem, N) if state is None else state
        active = fed.begin(t + 1, draw)
        new = method.round(active, state, draw)
        memory = new.replicas.memory.payload
        copies = memory[0] if isinstance(memory, tuple) else memory
        torch.testing.assert_close(copies[active.ids], state.x.expand(3, D))
        assert new.replicas.versions[active.ids].tolist() == [t] * 3
        state = new
    assert len(set(state.replicas.versions.tolist())) > 1


def test_the_count_sketch_carries_over_what_it_did_not_send(problem):
    """S(x⁺ − x) + E⁺ = E + η_g (ρU + mean S(walks)) where what was sent is subtracted."""
    method = count_sketch(rows=2, columns=5, k=3, momentum=0.5, cancel="subtract", **FULL, server_step=0.5)
    S = count_table(2, 5, D, 0)
    state = play(method, problem, 2)
    after = play(method, problem, 3)
    walks = -0.02 * gradients(problem, state.x)
    u = 0.5 * state.momentum + S.apply(walks).mean(0)
    torch.testing.assert_close(after.momentum, u)
    torch.testing.assert_close(S.apply(after.x - state.x) + after.error, state.error + 0.5 * u)
    assert int((after.x != state.x).sum()) == 3


def test_buckets_that_were_used_are_emptied(problem):
    method = count_sketch(rows=2, columns=5, k=2, momentum=0.5, **FULL)
    state = play(method, problem, 1)
    hit = count_table(2, 5, D, 0).apply(state.x - problem.start) != 0.0
    assert 0 < int(hit.sum()) < 10
    assert not state.error[hit].any()
    assert not state.momentum[hit].any()
    assert state.error[~hit].all()


def test_a_walk_with_few_large_entries_comes_through_a_count_sketch(problem):
    """So the method is gradient descent where gradients are sparse: here one entry is, by construction, the largest."""
    S = count_table(5, 4, D, 0)
    table = (
        federation(problem)
        .gather(
            sketched_steps,
            problem.start,
            memory=count_sketch(rows=5, columns=4).init(problem, N).replicas.memory,
            draw=Draw.of(0),
            rows=5,
            columns=4,
            sketch_seed=0,
            step=0.02,
            steps=1,
            batch="all",
        )[0]
        .rows
    )
    torch.testing.assert_close(table, S.apply(-0.02 * gradients(problem, problem.start)))


def moved(method, problem, **table):
    fed = federation(problem, **table)
    play(method, problem, 3, fed=fed)
    total = fed.ledger.total
    assert total.rounds == 3
    return total.bytes_up, total.bytes_down


def test_bytes_are_those_counted_by_hand(problem):
    """3 rounds of 5 clients; a value has 8 bytes in float64, an index 4."""
    each = 3 * N
    assert moved(uncompressed(**WALK), problem) == (each * D * 8, each * D * 8)
    assert moved(top_k(k=3, **WALK), problem) == (each * 3 * 12, each * 3 * 12)
    assert moved(top_k(k=3, down="dense", **WALK), problem) == (each * 3 * 12, each * D * 8)
    assert moved(count_sketch(rows=2, columns=5, k=3, **WALK), problem) == (each * 10 * 8, each * 3 * 12)


def test_who_missed_a_round_is_sent_the_model(problem):
    """Two of five in every round: in the first nobody has missed anything, in the others somebody has."""
    up, down = moved(top_k(k=3, **WALK), problem, count=2)
    assert up == 3 * 2 * 3 * 12
    assert down == 2 * 3 * 12 + 2 * 2 * D * 8


def test_settings_that_save_nothing_are_refused(problem):
    with pytest.raises(UsageError, match=r"method.k = 25 exceeds the 24 parameters"):
        top_k(k=25).init(problem, N)
    with pytest.raises(UsageError, match=r"2 × 12 numbers for 24 parameters saves nothing; lower method.columns"):
        count_sketch(rows=2, columns=12).init(problem, N)
