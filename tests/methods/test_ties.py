"""The tie penalty of the weight learners: its fixed point in closed form, and equals that end with equal weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learners import a_quadratic, play, skewed
from torch import nn

from coterie import methods
from coterie.methods import Method
from coterie.methods.shared.ties import tied
from coterie.methods.weights.mirror import mirror_descent
from coterie.numerics import project_capped_simplex, project_simplex
from coterie.problems.models import FlatModel
from coterie.problems.weighting import Weighting, weighting

SLOPES = torch.tensor([0.3, -0.1, -0.1, 0.5, 0.0], dtype=torch.float64)
OUTER = {"outer_step": 0.1, "batch": "all"}
SVRG = {"outer_step": 0.1, "batch": 12, "steps": 5, "system_step": 0.05, "cap": 0.8}
LEARNERS: list[tuple[Callable[..., Method], dict[str, Any]]] = [
    (methods.meritfed, {}),
    (methods.meritfed, {"mirror": "smd", "mirror_batch": 12}),
    (methods.meritfed_zo, {}),
    (methods.primal_dual, OUTER),
    (methods.bilevel, SVRG),
    (methods.bilevel_accelerated, SVRG),
    (methods.fednest_weights, OUTER),
    (methods.exact_gd, {**OUTER, "local_steps": 1}),
    (methods.rfho, OUTER),
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
