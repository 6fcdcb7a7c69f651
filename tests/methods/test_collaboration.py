"""Personal models by collaboration: what each method reduces to, its weights by hand, its traffic, a small figure."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from learners import federation, play
from test_collaborate import local, mean_estimation, own_shards, run, validation_loss
from torch import Tensor

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.methods import (
    Method,
    apple,
    cobo,
    dpfl,
    fedala,
    fedamp,
    fedavg,
    fedcollab,
    fedfomo,
    local_train,
    pfedgraph,
)
from coterie.methods.collaboration.cobo import matching
from coterie.methods.collaboration.fedala import last_entries
from coterie.methods.collaboration.fedamp import by_cosine, by_distance
from coterie.methods.collaboration.fedcollab import bound, divergence, inside, partition
from coterie.methods.collaboration.fedfomo import favourites
from coterie.methods.collaboration.models import on_simplex
from coterie.methods.collaboration.pfedgraph import graph
from coterie.numerics import Draw
from coterie.problems import Weighting

WIDE = torch.float64
WALK: dict[str, Any] = {"step": 0.1, "local_steps": 3, "batch": 4}
WHOLE: dict[str, Any] = {"step": 0.1, "local_steps": 2, "batch": "all"}


@pytest.fixture(scope="module")
def small() -> Weighting:
    return mean_estimation((2, 3), rows=8, dimension=3)[0]


@pytest.fixture(scope="module")
def classes() -> Weighting:
    """Two classes in the plane, of four clients; the last two have them the wrong way round."""
    shards = [(x.double(), y) for x, y in own_shards()]
    train, valid = [(x[:40], y[:40]) for x, y in shards], [(x[40:], y[40:]) for x, y in shards]
    return local(train, validation=valid, dtype="float64")


def alone(problem: Weighting, rounds: int, **settings: Any) -> Tensor:
    """The models of local training."""
    method = local_train(**settings, everyone=True)
    models: Tensor = method.view(play(method, problem, rounds)).model
    return models


def traffic(method: Method, problem: Weighting, rounds: int) -> tuple[int, int, int]:
    fed = federation(problem)
    play(method, problem, rounds, fed=fed)
    total = fed.ledger.total
    return total.rounds, total.floats_down, total.floats_up


def gradient_of(problem: Weighting, k: int, x: Tensor) -> Tensor:
    """∇L_k on all training rows of client k."""
    g: Tensor = problem.task.full_gradient(x, problem.train.client(k))
    return g


def test_positive_merits_are_weights_and_without_any_there_is_another_choice() -> None:
    merits = torch.tensor([[2.0, -1.0, 2.0], [-1.0, 0.0, -3.0]])
    torch.testing.assert_close(on_simplex(merits, torch.eye(3)[:2]), torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]))


# FedFomo


def test_fedfomo_is_local_training_where_nobody_can_help() -> None:
    for problem in (mean_estimation((1,), rows=10)[0], mean_estimation((1, 1, 1), rows=10, far=100.0)[0]):
        method = fedfomo(**WALK)
        s = play(method, problem, 4)
        assert torch.equal(s.U, alone(problem, 4, **WALK))
        assert torch.equal(s.W, torch.eye(problem.clients, dtype=WIDE))


def test_fedfomo_weights_in_numpy(small: Weighting) -> None:
    """All others are downloaded, so that the third round's weights follow from what clients hold after the second."""
    method = fedfomo(**WALK, downloads=4)
    before, after = (play(method, small, rounds) for rounds in (2, 3))
    x, u = (rows.numpy() for rows in before.kept.payload)
    rows = [small.valid.client(k).all().labels.numpy() for k in range(5)]  # type: ignore[union-attr]

    def loss(k: int, at: Any) -> float:
        return float(0.5 * ((at - rows[k]) ** 2).sum(1).mean())

    helped = 0
    for i in range(5):
        merits = np.array([(loss(i, x[i]) - loss(i, u[n])) / np.linalg.norm(u[n] - x[i]) for n in range(5)])
        positive = np.maximum(merits, 0.0)
        weights = positive / positive.sum() if positive.any() else np.eye(5)[i]
        np.testing.assert_allclose(after.W[i], weights, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(after.kept.payload[0][i], weights @ u, rtol=1e-9)
        np.testing.assert_allclose((after.P - before.P)[i], np.where(np.arange(5) == i, 0.0, merits), rtol=1e-8)
        helped += int((weights > 0).sum())
    assert helped > 5


def test_fedfomo_downloads_the_models_that_helped_most() -> None:
    P = torch.tensor([[9.0, 1.0, 3.0, 2.0], [0.0, 0.0, -1.0, 5.0], [0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 0.0]])
    chosen = favourites(P, 2, 0.0, Draw.of(0))
    assert chosen[[0, 3]].tolist() == [[2, 3], [0, 1]]
    assert chosen[1].tolist() == [3, 0]
    random = torch.stack([favourites(P, 2, 1.0, Draw.of(seed)) for seed in range(40)])
    for k in range(4):
        assert sorted(set(random[:, k].flatten().tolist())) == [j for j in range(4) if j != k]


def test_fedfomo_traffic(small: Weighting) -> None:
    """The start once, then M models down; a model and M + 1 merits up."""
    d, K, M = 3, 5, 2
    assert traffic(fedfomo(downloads=M), small, 3) == (3, K * (d + 2 * M * d), K * (3 * d + 2 + 2 * (M + 1)))


# FedAMP


def test_fedamp_attention_in_numpy() -> None:
    X = Draw.of(3).normal(4, 6, dtype=WIDE)
    x = X.numpy()
    for strength, width in ((0.5, 4.0), (100.0, 4.0)):
        found, wanted = by_distance(X, strength, width).numpy(), np.zeros((4, 4))
        for i, j in product(range(4), range(4)):
            if i != j:
                wanted[i, j] = strength / width * np.exp(-((x[i] - x[j]) ** 2).sum() / width)
        for i in range(4):
            wanted[i] *= min(1.0, 0.75 / wanted[i].sum())
            wanted[i, i] = 1.0 - wanted[i].sum()
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    cosines = (x @ x.T) / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(x, axis=1))
    wanted = np.exp(3.0 * cosines) * (1 - np.eye(4))
    wanted = 0.6 * wanted / wanted.sum(1, keepdims=True) + 0.4 * np.eye(4)
    np.testing.assert_allclose(by_cosine(X, 3.0, 0.4), wanted, rtol=1e-12)


def test_fedamp_is_local_training_or_averaging_at_its_ends(small: Weighting) -> None:
    s = play(fedamp(**WALK, attention="cosine", own=1.0, penalty=0.0), small, 3)
    torch.testing.assert_close(s.X, alone(small, 3, **WALK))
    s = play(fedamp(**WALK, strength=1e12, width=1e9, penalty=0.0), small, 3)
    torch.testing.assert_close(s.X.mean(0), play(fedavg(**WALK, weights="uniform"), small, 3).x)


def test_fedamp_local_steps_are_proximal(small: Weighting) -> None:
    method = fedamp(**WHOLE, penalty=0.5, strength=2.0, width=3.0)
    before, after = play(method, small, 1), play(method, small, 2)
    messages = by_distance(before.X, 2.0, 3.0) @ before.X
    for k in range(5):
        x = messages[k]
        for _ in range(2):
            x = x - 0.1 * (gradient_of(small, k, x) + 0.25 * (x - messages[k]))
        torch.testing.assert_close(after.X[k], x)


def test_fedamp_traffic(small: Weighting) -> None:
    assert traffic(fedamp(), small, 3) == (3, 3 * 5 * 3, 3 * 5 * 3)


# APPLE


def test_apple_with_fixed_weights_is_averaging(small: Weighting) -> None:
    """One step of core models with p = 1/K moves their mean as FedAvg's step does."""
    method = apple(step=0.1, local_steps=1, batch="all", weight_step=0.0)
    s = play(method, small, 3)
    theirs = play(fedavg(step=0.1, local_steps=1, batch="all"), small, 3).x
    torch.testing.assert_close(method.view(s).model, theirs.expand(5, -1))
    torch.testing.assert_close(method.view(s).weights, torch.full((5, 5), 0.2, dtype=WIDE))


def test_apple_steps_by_autograd(small: Weighting) -> None:
    """Both variables follow the gradient of L_i(Σ_j p_j c_j) + (μλ/2) ‖p − p⁰‖², and λ halves half-way."""
    method = apple(step=0.06, local_steps=2, batch="all", weight_step=0.02, penalty=0.7, horizon=2)
    before, after = play(method, small, 1), play(method, small, 2)
    C, anchor = before.C, torch.full((5,), 0.2, dtype=WIDE)
    for k in range(5):
        c, p = C[k], before.kept.payload[0][k]

        def goal(c: Tensor, p: Tensor, k: int = k) -> Tensor:
            x = p @ torch.cat([C[:k], c[None], C[k + 1 :]])
            loss: Tensor = small.task.full_loss(x, small.train.client(k))
            return loss + 0.5 * 0.7 * 0.5 * (p - anchor).square().sum()

        for _ in range(2):
            slope_c, slope_p = torch.func.grad(goal, argnums=(0, 1))(c, p)
            c, p = c - 0.3 * slope_c, p - 0.02 * slope_p
        torch.testing.assert_close(after.C[k], c)
        torch.testing.assert_close(after.kept.payload[0][k], p)


def test_apple_traffic(small: Weighting) -> None:
    assert traffic(apple(), small, 2) == (2, 2 * 5 * (5 * 3 + 1), 2 * 5 * 3)


# FedALA


def test_fedala_with_fixed_weights_is_fedavg(small: Weighting) -> None:
    s = play(fedala(**WALK, weight_step=0.0), small, 3)
    assert torch.equal(s.x, play(fedavg(**WALK), small, 3).x)


def test_fedala_learns_the_weights_of_the_last_layers_by_hand(classes: Weighting) -> None:
    method = fedala(**WHOLE, layers=1, weight_step=3.0, weight_steps=2, first_steps=3)
    one, two = play(method, classes, 1), play(method, classes, 2)
    assert [last_entries(classes.task.model, classes.start, count) for count in (1, 2, None)] == [2, 6, 6]
    for k in range(4):
        own, weights = one.kept.payload[0][k], torch.ones(6, dtype=WIDE)
        for _ in range(3):
            g = gradient_of(classes, k, own + weights * (one.x - own))
            weights[4:] = (weights - 3.0 * g * (one.x - own)).clamp(0.0, 1.0)[4:]
        torch.testing.assert_close(two.kept.payload[1][k], weights)
        x = own + weights * (one.x - own)
        for _ in range(2):
            x = x - 0.1 * gradient_of(classes, k, x)
        torch.testing.assert_close(two.kept.payload[0][k], x)
    assert float(two.kept.payload[1].min()) < 1.0


def test_fedala_moves_no_more_than_fedavg(small: Weighting) -> None:
    assert traffic(fedala(), small, 3) == traffic(fedavg(), small, 3)


# pFedGraph


def test_pfedgraph_rows_satisfy_the_optimality_conditions() -> None:
    """Of λ‖w − p‖² − ⟨w, cos⟩ on the simplex, with cosines computed here: one multiplier where w > 0, and no less."""
    moved, p = Draw.of(5).normal(6, 4, dtype=WIDE), torch.arange(1.0, 7.0, dtype=WIDE) / 21.0
    moved[1] = 2.0 * moved[0] + 0.01
    unit = moved.numpy() / np.linalg.norm(moved.numpy(), axis=1, keepdims=True)
    cosines = unit @ unit.T
    cosines[cosines > 0.9] = 1.0
    assert cosines[0, 1] == 1.0
    for penalty in (0.1, 0.8):
        W = graph(moved, p, penalty).numpy()
        np.testing.assert_allclose(W.sum(1), 1.0)
        slopes = 2.0 * penalty * (W - p.numpy()) - cosines
        for w, slope in zip(W, slopes, strict=True):
            assert np.ptp(slope[w > 1e-12]) < 1e-9
            assert slope[w <= 1e-12].min(initial=np.inf) >= slope[w > 1e-12].max() - 1e-9


def test_pfedgraph_with_a_strong_penalty_is_fedavg(small: Weighting) -> None:
    s = play(pfedgraph(**WALK, graph_penalty=1e12), small, 3)
    torch.testing.assert_close(s.X, play(fedavg(**WALK), small, 3).x.expand(5, -1))


def test_pfedgraph_pull_is_the_gradient_of_the_cosine(small: Weighting) -> None:
    method = pfedgraph(**WHOLE, penalty=0.3)
    before, after = play(method, small, 1), play(method, small, 2)
    units = [u / u.norm() for u in alone(small, 1, **WHOLE)]
    torch.testing.assert_close(before.m, before.W @ torch.stack(units))

    def goal(x: Tensor, k: int) -> Tensor:
        loss: Tensor = small.task.full_loss(x, small.train.client(k))
        return loss - 0.3 * (before.m[k] @ x) / x.norm()

    U = []
    for k in range(5):
        x = before.X[k]
        for _ in range(2):
            x = x - 0.1 * torch.func.grad(goal)(x, k)
        U.append(x)
    torch.testing.assert_close(after.X, after.W @ torch.stack(U))


def test_pfedgraph_traffic(small: Weighting) -> None:
    assert traffic(pfedgraph(), small, 3) == (3, 45, 45)
    assert traffic(pfedgraph(penalty=0.1), small, 3) == (3, 90, 45)


# CoBo


def test_cobo_without_a_pull_is_local_training(small: Weighting) -> None:
    torch.testing.assert_close(play(cobo(**WALK, pull=0.0), small, 3).X, alone(small, 3, **WALK))


def test_cobo_round_by_hand(small: Weighting) -> None:
    """Links follow the inner product of both gradients half-way, models the gradient of the penalty."""
    method = cobo(step=0.1, local_steps=1, batch="all", weight_step=0.03, pull=0.8)
    before, after = play(method, small, 2), play(method, small, 3)
    partner = matching(torch.arange(5), 5, Draw.of(1).round(2).phase("pairs")).tolist()
    links = before.links.clone()
    for i, j in enumerate(partner):
        if i != j:
            middle = (before.X[i] + before.X[j]) / 2
            links[i, j] += 0.03 * gradient_of(small, i, middle) @ gradient_of(small, j, middle)
    links = links.clamp(0.0, 1.0)
    torch.testing.assert_close(after.links, links)
    assert torch.equal(after.links, after.links.T)
    for i in range(5):

        def penalty(x: Tensor, i: int = i) -> Tensor:
            return 0.5 * (links[i] * (x - before.X).square().sum(1)).sum()

        rho = 0.8 / (0.1 * 5)
        slope = gradient_of(small, i, before.X[i]) + rho * torch.func.grad(penalty)(before.X[i])
        torch.testing.assert_close(after.X[i], before.X[i] - 0.1 * slope)


def test_cobo_pairs_are_a_matching_of_the_participants() -> None:
    seen = set()
    for seed in range(30):
        partner = matching(torch.tensor([0, 2, 3, 5, 6]), 7, Draw.of(seed))
        assert torch.equal(partner[partner], torch.arange(7))
        assert partner[[1, 4]].tolist() == [1, 4]
        assert int((partner != torch.arange(7)).sum()) == 4
        seen |= {tuple(sorted((i, j))) for i, j in enumerate(partner.tolist()) if i != j}
    assert len(seen) == 10


def test_cobo_traffic(small: Weighting) -> None:
    assert traffic(cobo(), small, 3) == (3, 90, 90)


# DPFL


def test_dpfl_chooses_as_double_greedy_does(small: Weighting) -> None:
    method = dpfl(**WALK, budget=2)
    s = play(method, small, 1)
    U = alone(small, 1, **WALK)
    torch.testing.assert_close(s.U, U)
    draw = Draw.of(1).round(0).phase("choice")
    for i in range(5):
        others, own = [j for j in range(5) if j != i], draw.client(i)
        order = own.phase("order").permutation(4).tolist()
        chances = own.phase("chances").uniform(4, dtype=WIDE).tolist()

        def reward(members: set[int], i: int = i) -> float:
            return -float(validation_loss(small, i, U[sorted(members)].mean(0)))

        grown, shrunk = {i}, set(range(5))
        for t in range(4):
            j = others[order[t]]
            a = max(0.0, reward(grown | {j}) - reward(grown))
            b = max(0.0, reward(shrunk - {j}) - reward(shrunk))
            add = chances[t] < (a / (a + b) if a + b > 0.0 else 1.0) and len(grown) <= 2
            grown, shrunk = (grown | {j}, shrunk) if add else (grown, shrunk - {j})
        wanted = torch.tensor([float(j in grown) / len(grown) for j in range(5)], dtype=WIDE)
        torch.testing.assert_close(s.W[i], wanted)
        torch.testing.assert_close(s.kept.payload[0][i], wanted @ U)
    assert 1 <= int((s.W > 0).sum(1).max()) <= 3


def test_dpfl_keeps_its_candidates_and_downloads_nothing_else(small: Weighting) -> None:
    method, fed, d = dpfl(**WALK, budget=2), federation(small), 3
    first = play(method, small, 1, fed=fed)
    chosen = fed.ledger.by_cause["dpfl/choose-and-mix"]
    assert (chosen.rounds, chosen.floats_down, chosen.floats_up) == (1, 5 * (4 * (d + 1) + 1), 5 * 4)
    assert torch.equal(first.candidates, ((first.W > 0) & ~torch.eye(5, dtype=torch.bool)).double())
    later = federation(small)
    second = play(method, small, 1, state=first, fed=later)
    assert torch.equal(second.candidates, first.candidates)
    assert bool((second.W[first.W == 0] == 0).all())
    counts = first.candidates.sum(1)
    again = later.ledger.by_cause["dpfl/choose-and-mix"]
    assert again.floats_down == int(sum(n * (d + 1) + 1 for n in counts if n))
    assert (later.ledger.total.rounds, again.floats_up) == (2, int(counts.sum()))


def test_dpfl_alone_is_local_training() -> None:
    problem = mean_estimation((1,), rows=10)[0]
    method = dpfl(**WALK)
    assert torch.equal(method.view(play(method, problem, 3)).model, alone(problem, 3, **WALK))


# FedCollab


def test_fedcollab_bound_and_partition_by_trying_all() -> None:
    sizes, blocks = torch.tensor([30, 60, 20, 50, 40]), torch.tensor([0, 0, 1, 1, 1])
    noise = 0.05 * Draw.of(0).uniform(5, 5, dtype=WIDE)
    D = (torch.where(blocks[:, None] == blocks, 0.02, 0.8) + noise + noise.T).fill_diagonal_(0.0)
    n = sizes.double().numpy()

    def by_hand(labels: tuple[int, ...], C: float) -> float:
        total = 0.0
        for i in range(5):
            members = [j for j in range(5) if labels[j] == labels[i]]
            alpha = {j: n[j] / sum(n[members]) for j in members}
            spread = np.sqrt(sum(a**2 / (n[j] / n.sum()) for j, a in alpha.items()) / n.sum())
            total += C * spread + sum(a * float(D[i, j]) for j, a in alpha.items())
        return total

    partitions = [p for p in product(range(5), repeat=5) if all(k <= len({*p[:i]}) for i, k in enumerate(p))]
    assert len(partitions) == 52  # Bell's number: each partition once
    for C in (0.3, 1.0, 5.0):
        value, labels = min((by_hand(labels, C), labels) for labels in partitions)
        found = partition(D, sizes, C)
        assert bound(D, sizes, found, C) == pytest.approx(by_hand(tuple(found.tolist()), C), rel=1e-12)
        assert bound(D, sizes, found, C) == pytest.approx(value, rel=1e-12)
        same = np.array(labels)[:, None] == np.array(labels)
        assert ((found[:, None] == found).numpy() == same).all()
    assert partition(D, sizes, 1.0).tolist() == [0, 0, 2, 2, 2]
    torch.testing.assert_close(inside(torch.tensor([0, 0, 2, 2, 2]), sizes)[3, 2:], sizes[2:].double() / 110)
    right = torch.tensor([[1.0, 0.5, 1.0], [0.4, 1.0, 0.9], [0.8, 1.0, 1.0]])
    torch.testing.assert_close(divergence(right)[0], torch.tensor([0.0, 0.0, 0.8]))


def test_fedcollab_at_its_ends_is_averaging_or_local_training(classes: Weighting) -> None:
    quick: dict[str, Any] = {**WALK, "divergence_rounds": 3, "divergence_steps": 3}
    s = play(fedcollab(**quick, generalisation=1e6), classes, 2)
    torch.testing.assert_close(s.X, play(fedavg(**WALK), classes, 2).x.expand(4, -1))
    s = play(fedcollab(**quick, generalisation=1e-6), classes, 2)
    friends = (s.coalitions[:, None] == s.coalitions) & ~torch.eye(4, dtype=torch.bool)
    singles = ~friends.any(1)
    assert bool(singles.any())
    assert torch.equal(s.X[singles], alone(classes, 2, **WALK)[singles])


def test_fedcollab_discriminators_are_logistic_regressions_of_both_clients(classes: Weighting) -> None:
    """Pairs train one discriminator by averaging; its first step is the gradient of the logistic loss at 0."""
    fed = federation(classes)
    method = fedcollab(batch="all", divergence_rounds=1, divergence_steps=1, divergence_step=0.5)
    play(method, classes, 1, fed=fed)
    features = 2 * 3  # classes × (inputs + 1)
    steps, judged = (fed.ledger.by_cause[f"fedcollab/{name}"] for name in ("discriminator-steps", "recognised-share"))
    assert (steps.rounds, steps.floats_down, steps.floats_up) == (1, 4 * 4 * features, 4 * 4 * features)
    assert (judged.rounds, judged.floats_down, judged.floats_up) == (1, 4 * 4 * features, 4 * 4)

    def mean(k: int) -> Tensor:
        batch = classes.train.client(k).all()
        rows = torch.cat([batch.inputs, torch.ones(len(batch.inputs), 1, dtype=WIDE)], dim=1)
        return torch.stack([(rows * (batch.labels == c)[:, None]).mean(0) for c in range(2)])

    h = 0.5 * (mean(0) - mean(3)) / 2 * 0.5  # σ(0) = ½ on either side, and the server's mean of both
    shares = []
    for k, sign in ((0, 1.0), (3, -1.0)):
        batch = classes.valid.client(k).all()  # type: ignore[union-attr]
        said = (h[batch.labels, :2] * batch.inputs).sum(1) + h[batch.labels, 2]
        shares.append(float((sign * said > 0).double().mean()))
    D = divergences_of(classes, method)
    assert float(D[0, 3]) == pytest.approx(max(0.0, sum(shares) - 1.0))
    assert float(D[0, 3]) > 0.5 > float(D[0, 1])


def divergences_of(problem: Weighting, method: Method) -> Tensor:
    """The estimates of a method's first round, from the replies that its clients send."""
    seen: dict[str, Tensor] = {}
    fed = federation(problem)
    engine, execute = fed.engine, type(fed.engine).execute

    def watched(self: Any, call: Any, ids: Tensor) -> Any:
        for replies in execute(self, call, ids):
            seen[call.work.__name__] = replies.values
            yield replies

    type(engine).execute = watched  # type: ignore[method-assign]
    try:
        play(method, problem, 1, fed=fed)
    finally:
        type(engine).execute = execute  # type: ignore[method-assign]
    return divergence(seen["recognised_share"])


def test_fedcollab_refuses_several_inputs() -> None:
    x = torch.randn(6, 2)
    shard = ((x, x), torch.zeros(6).long())

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.net(a + b)
            return out

    problem = Weighting.on([shard] * 2, validation=[shard] * 2, model=Two(), loss="cross_entropy")
    with pytest.raises(UsageError, match="take one array of inputs, and this problem has several; choose"):
        fedcollab().init(problem, 2)


# all of them


FIGURES: dict[str, Method] = {
    "fedfomo": fedfomo(**WHOLE),
    "fedamp": fedamp(**WHOLE, width=0.2),
    "pfedgraph": pfedgraph(**WHOLE),
    "cobo": cobo(**WHOLE, weight_step=0.3),
    "dpfl": dpfl(**WHOLE),
}


@pytest.mark.parametrize("name", FIGURES)
def test_weight_goes_to_the_clients_of_the_same_mean(name: str) -> None:
    """Mean estimation with two groups: weights lie inside, and models come nearer to the means than alone."""
    problem, centres = mean_estimation((4, 4), rows=20, dimension=4)
    method = FIGURES[name]
    rounds = 40 if name == "cobo" else 20  # it looks at each pair once in seven rounds
    view = method.view(play(method, problem, rounds))
    assert problem.groups is not None
    assert view.weights is not None
    inside_group = (view.weights * (problem.groups[:, None] == problem.groups)).sum(1)
    assert float(inside_group.mean()) > 0.9
    error = (view.model - centres).square().sum(1).mean()
    by_self = (alone(problem, rounds, **WHOLE) - centres).square().sum(1).mean()
    assert float(error) < 0.8 * float(by_self)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedfomo", "fedamp", "apple", "pfedgraph", "dpfl", "fedcollab"])
def test_personal_models_of_digits_groups_are_better_than_one_for_all_and_than_alone(name: str) -> None:
    """Setting 4, 40 rounds, all settings at their defaults (the table of docs/collaborate.md)."""
    settings = {"problem__setting": 4, "problem__everyone": True, "run__record": 40}
    accuracy = run(name, 40, **settings).summary["final"]["personal_accuracy"]
    for other in ("fedavg", "local-train"):
        assert accuracy > run(other, 40, **settings).summary["final"]["personal_accuracy"] + 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("cobo", 0.05), ("fedala", 0.02)])
def test_slower_ones_are_ahead_of_one_model_for_all_on_friends(name: str, least: float) -> None:
    """Where strangers permute the labels; `cobo` has to look at each pair first, `fedala` has one global model."""
    ours, theirs = (
        run_rounds(
            assemble(
                load(
                    sets={"problem.everyone": True, "run.record": 40, "federation.mode": "vmap"},
                    flags={"run.method": method, "run.problem": "friends", "run.rounds": 40, "run.baselines": []},
                )
            ),
            None,
        ).summary["final"]["personal_accuracy"]
        for method in (name, "fedavg")
    )
    assert ours > theirs + least
