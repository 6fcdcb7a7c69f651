"""The tie penalty and the logistic link: their weights in closed form, and equals that end with equal weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learners import a_quadratic, gradients, play, skewed
from torch import nn

from coterie import methods
from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.experiment.measuring import weight_statistics
from coterie.methods import Method
from coterie.methods.shared.ties import saturating, tied
from coterie.methods.weights.mirror import mirror_descent
from coterie.numerics import project_capped_simplex, project_simplex
from coterie.problems.models import FlatModel
from coterie.problems.weighting import Weighting, weighting

SLOPES = torch.tensor([0.3, -0.1, -0.1, 0.5, 0.0], dtype=torch.float64)
OUTER = {"outer_step": 0.1, "batch": "all"}
SVRG = {"outer_step": 0.1, "batch": 12, "steps": 5, "system_step": 0.05, "cap": 0.8}
LEARNERS = [
    (methods.meritfed, {"step": 0.1, "mirror_step": 0.1}),
    (methods.meritfed, {"mirror": "smd", "mirror_batch": 12}),
    pytest.param(methods.meritfed_zo, {}, marks=pytest.mark.slow),
    (methods.primal_dual, OUTER),
    pytest.param(methods.bilevel, SVRG, marks=pytest.mark.slow),
    pytest.param(methods.bilevel_accelerated, SVRG, marks=pytest.mark.slow),
    (methods.fednest_weights, OUTER),
    pytest.param(methods.exact_gd, {**OUTER, "local_steps": 1}, marks=pytest.mark.slow),
    pytest.param(methods.rfho, OUTER, marks=pytest.mark.slow),
    (methods.sustain, OUTER),
]


@pytest.mark.parametrize("tie", [0.5, 1.0, 5.0])
def test_the_fixed_point_for_constant_slopes_is_a_projection_in_either_geometry(tie: float) -> None:
    wanted = project_simplex(-SLOPES / tie)
    w, capped = skewed(5), skewed(5)
    for _ in range(300):
        w = project_simplex(w - 0.1 * tied(SLOPES, w, tie))
        capped = project_capped_simplex(capped - 0.1 * tied(SLOPES, capped, tie), 0.4)
    torch.testing.assert_close(w, wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(capped, project_capped_simplex(-SLOPES / tie, 0.4), atol=1e-6, rtol=0)
    mirrored = mirror_descent(skewed(5), lambda w, i: SLOPES, step=1.0, steps=500, tie=tie)
    torch.testing.assert_close(mirrored, wanted, atol=1e-3, rtol=0)


def test_without_the_penalty_the_slope_is_returned_as_it_is() -> None:
    assert tied(SLOPES, skewed(5), 0.0) is SLOPES


def test_exact_gd_takes_the_projected_step_of_the_penalised_goal() -> None:
    problem, w = a_quadratic(), skewed(5)
    method = methods.exact_gd(outer_step=0.003, local_steps=1, tie=2.0)
    s = play(method, problem, 1, state=method.init(problem, 5)._replace(w=w))
    slope = problem.exact.hypergradient(w) + 2.0 * (w - 0.2)
    torch.testing.assert_close(s.w, project_simplex(w - 0.003 * slope), atol=1e-10, rtol=0)


def twins() -> Weighting:
    """Regressions of four clients, of whom 0 and 1 hold the same rows, and the target's optimum is theirs."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 12, 3, generator=draw, dtype=torch.float64)
    inputs[1] = inputs[0]
    optima = torch.tensor([[1.0, -1.0, 0.5]] * 2 + [[-1.0, 1.0, 0.0], [0.0, 0.5, -1.0]], dtype=torch.float64)
    labels = torch.einsum("kni,ki->kn", inputs, optima)
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    shards = [(inputs[k], labels[k]) for k in range(4)]
    return weighting(shards, shards[0], FlatModel(net), "squared", friends=2, dtype=torch.float64, device="cpu")


@pytest.mark.parametrize(("factory", "settings"), LEARNERS, ids=lambda value: getattr(value, "__name__", ""))
def test_identical_clients_end_with_equal_weights(factory: Callable[..., Method], settings: dict[str, Any]) -> None:
    problem, start = twins(), torch.tensor([0.1, 0.4, 0.25, 0.25], dtype=torch.float64)

    def weights(tie: float) -> torch.Tensor:
        method = factory(**settings, tie=tie)
        s = method.init(problem, 4)
        s = s._replace(**{name: start for name in ("w", "w_ag", "w_before") if hasattr(s, name)})
        return method.view(play(method, problem, 20, state=s)).weights

    apart, together = weights(0.0), weights(5.0)
    assert apart[1] - apart[0] > 0.2
    estimated = factory is methods.meritfed_zo  # its slopes of equals differ by chance
    assert abs(together[1] - together[0]) < (0.05 if estimated else 1e-3)
    assert together[:2].sum() > 0.5


def test_the_logistic_link_in_closed_form_and_without_units() -> None:
    sums = torch.tensor([3.0, 3.2, 5.0, 4.0, 3.8], dtype=torch.float64)
    u = (sums - 3.0) / 2.0
    wanted = 1.0 / (1.0 + torch.exp((u - 0.4) / 0.05))
    torch.testing.assert_close(saturating(sums), wanted / wanted.sum())
    torch.testing.assert_close(saturating(1e6 * sums - 7.0), saturating(sums))
    assert torch.equal(saturating(torch.full((4,), 2.0)), torch.full((4,), 0.25))
    nearly = saturating(torch.tensor([0.0, 1.0, 2.0, 9.0, 10.0]))  # a fifth of the range apart, and yet equal
    assert float(nearly[2] / nearly[0]) > 0.98
    assert float(nearly[3:].sum()) < 0.001


@pytest.mark.parametrize("solver", ["mirror", "quadratic", "projected", "lagged"])
def test_meritfed_with_the_logistic_link_makes_equals_equal_and_sums_slopes(solver: Any) -> None:
    problem, start = twins(), torch.tensor([0.1, 0.4, 0.25, 0.25], dtype=torch.float64)
    method = methods.meritfed(link="logistic", mirror_steps=2, solver=solver, step=0.1)
    s = play(method, problem, 5, state=method.init(problem, 4)._replace(w=start))
    assert abs(float(s.w[0] - s.w[1])) < 1e-12
    assert float(s.w[:2].sum()) > 0.9
    torch.testing.assert_close(s.w, saturating(s.sums[0]))
    half = methods.meritfed(link="logistic", mirror_steps=2, solver=solver, step=0.1, mirror_step=7.0)
    assert torch.equal(play(half, problem, 5, state=half.init(problem, 4)._replace(w=start)).w, s.w)  # no step size


def test_the_first_slopes_are_summed_by_hand() -> None:
    problem = a_quadratic()
    s = play(methods.meritfed(link="logistic", mirror_steps=2, step=0.1), problem, 1)
    G, _ = gradients(problem, problem.start)
    w, total = torch.full((5,), 0.2, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for _ in range(2):
        total = total - 0.1 * G @ gradients(problem, problem.start - 0.1 * w @ G)[1]
        w = saturating(total)
    torch.testing.assert_close(s.sums[0] - s.sums[0].min(), total - total.min())  # a common part does not count
    torch.testing.assert_close(s.x, problem.start - 0.1 * w @ G)


@pytest.mark.parametrize("more", [{"tie": 0.1}, {"restart": True}, {"average": True}, {"cut": 3}])
def test_what_has_no_meaning_for_the_logistic_link_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="sums the slopes of all rounds and has no step size; leave out"):
        methods.meritfed(link="logistic", **more)


def test_the_record_says_how_unequal_friends_are() -> None:
    for order in ([0.05, 0.3, 0.25], [0.35, 0.15, 0.1]):  # the farthest from their mean is the least, the largest
        weights = torch.tensor([*order, 0.4])
        found = weight_statistics(weights, 3)
        assert found["friends_weight"] == pytest.approx(0.6)
        assert found["friends_spread"] == pytest.approx(0.75)
    assert "friends_spread" not in weight_statistics(torch.tensor([0.0, 0.0, 1.0]), 2)
    assert "friends_spread" not in weight_statistics(weights, None)


@pytest.mark.slow
def test_equal_friends_of_digits_get_equal_weights_and_no_accuracy_is_lost() -> None:
    """Six seeds, 100 rounds (docs/papers/meritfed.md): mirror descent leaves friends up to two thirds apart."""
    spreads, accuracies = {}, {}
    for link in ("softmax", "logistic"):
        sets = {"method.link": link, "run.record": 100, "federation.mode": "vmap"}
        finals = []
        for seed in range(6):
            flags = {"run.problem": "friends", "run.rounds": 100, "run.baselines": [], "run.seed": seed}
            finals.append(run_rounds(assemble(load(sets=sets, flags=flags)), None).summary["final"])
        spreads[link] = max(final["friends_spread"] for final in finals)
        accuracies[link] = sum(final["test_accuracy"] for final in finals) / 6
    assert spreads["softmax"] > 0.5
    assert spreads["logistic"] < 0.3
    assert accuracies["logistic"] > accuracies["softmax"] - 0.002
