"""Learned weights in a Flower app that has its own clients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the extra coterie[flower] is not installed")

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from coterie.errors import UsageError
from coterie.federation import Federation, LocalEngine
from coterie.flower import LearnedWeights
from coterie.methods import meritfed
from coterie.numerics import Draw
from coterie.problems.models import FlatModel
from coterie.problems.weighting import weighting

STEP = 0.3


@pytest.fixture
def problem() -> Any:
    """Three clients of linear regression: the first has the target's slope, the others another."""
    draw = Draw.of(0)
    x = draw.phase("x").normal(4, 20, 3)
    slopes = torch.stack([torch.tensor([1.0, 2.0, 3.0])] * 2 + [torch.tensor([-1.0, 0.0, 5.0])] * 2)
    y = torch.einsum("knd,kd->kn", x, slopes)[..., None]
    torch.manual_seed(0)
    return weighting([(x[k], y[k]) for k in (1, 2, 3)], (x[0], y[0]), FlatModel(torch.nn.Linear(3, 1)), "squared")


def record(problem: Any, theta: torch.Tensor) -> ArrayRecord:
    return ArrayRecord(problem.task.model.state_dict(theta))


def reply(problem: Any, node: int, theta: torch.Tensor) -> Any:
    """What a client that trained sends back."""
    content = RecordDict({"arrays": record(problem, theta), "metrics": MetricRecord({"num-examples": 20})})
    return SimpleNamespace(content=content, has_error=lambda: False, metadata=SimpleNamespace(src_node_id=node))


def failed(node: int) -> Any:
    error = SimpleNamespace(reason="gone")
    return SimpleNamespace(error=error, has_error=lambda: True, metadata=SimpleNamespace(src_node_id=node))


def walked(problem: Any, x: torch.Tensor, k: int) -> torch.Tensor:
    return x - STEP * problem.task.full_gradient(x, problem.train.client(k))


def strategy(problem: Any, **settings: Any) -> LearnedWeights:
    batch = problem.target.valid.all()
    return LearnedWeights(torch.nn.Linear(3, 1), (batch.inputs, batch.labels), "squared", **settings)


def trained(learner: LearnedWeights, problem: Any, rounds: int) -> torch.Tensor:
    x = problem.start
    for t in range(1, rounds + 1):
        learner._sent = record(problem, x)
        arrays, _ = learner.aggregate_train(t, [reply(problem, 10 + k, walked(problem, x, k)) for k in (2, 0, 1)])
        x = learner._vector(arrays.to_torch_state_dict())
    return x


def test_clients_that_take_one_gradient_step_make_it_meritfed(problem: Any) -> None:
    """A reduction: the model and the weights of coterie's own method, round by round."""
    learner = strategy(problem, mirror_step=0.5, mirror_steps=4)
    method = meritfed(step=STEP, mirror_step=0.5, mirror_steps=4)
    fed = Federation.on(LocalEngine(problem.task, problem.train, None, problem.target))
    state = method.init(problem, 3)
    for t in range(5):
        state = method.round(fed.begin(t + 1, Draw.of(0)), state, Draw.of(0).round(t))
    torch.testing.assert_close(trained(learner, problem, 5), state.x)
    weights = torch.tensor([learner.weights[10 + k] for k in range(3)])
    torch.testing.assert_close(weights, state.w)
    assert sorted(learner.history) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("method", ["meritfed", "projected-gradient"])
def test_the_client_that_helps_gets_the_weight(problem: Any, method: str) -> None:
    learner = strategy(problem, method=method, mirror_step=0.5, outer_step=0.1)
    x = trained(learner, problem, 30)
    weights = learner.history[30]
    assert weights[10] > 0.9
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(x[:3], torch.tensor([1.0, 2.0, 3.0]), atol=0.2, rtol=0)


def test_weights_are_among_the_metrics_and_failures_are_left_out(problem: Any) -> None:
    learner, x = strategy(problem, mirror_steps=0), problem.start
    learner._sent = record(problem, x)
    nan = reply(problem, 11, walked(problem, x, 1) * torch.nan)
    arrays, metrics = learner.aggregate_train(1, [reply(problem, 10, walked(problem, x, 0)), failed(12), nan])
    assert metrics["weight/10"] == 1.0
    assert "weight/11" not in metrics
    torch.testing.assert_close(learner._vector(arrays.to_torch_state_dict()), walked(problem, x, 0))
    assert learner.aggregate_train(2, [failed(10), failed(12)])[0] is None
    learner.aggregate_train(3, [reply(problem, 10 + k, walked(problem, x, k)) for k in range(3)])
    assert learner.history[3] == pytest.approx({10: 1 / 3, 11: 1 / 3, 12: 1 / 3})  # the new ones come with the mean


def test_the_constructor_is_fedavg_s_and_misfits_are_explained(problem: Any) -> None:
    assert strategy(problem, fraction_train=0.5, min_train_nodes=3).fraction_train == 0.5
    with pytest.raises(UsageError, match="projected-gradient"):
        strategy(problem, method="magic")
    with pytest.warns(DeprecationWarning, match="projected-gradient"):
        assert strategy(problem, method="primal-dual").method == "projected-gradient"
    learner = strategy(problem)
    with pytest.raises(UsageError, match="'bias'"):
        learner._vector({"weight": torch.zeros(1, 3)})


def test_a_reply_that_lacks_an_array_is_left_out_and_named(problem: Any) -> None:
    """The round is the one without that client; today's and tomorrow's models do not depend on its other arrays."""
    x = problem.start
    honest = [reply(problem, 10 + k, walked(problem, x, k)) for k in (0, 1)]
    state = problem.task.model.state_dict(x)

    def odd(arrays: dict[str, torch.Tensor]) -> Any:
        found = reply(problem, 12, x)
        found.content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 20})})
        return found

    first, *others = state
    cases = {
        f"lacks {first!r}": {name: state[name] for name in others},
        f"its {first!r} has shape (2,)": state | {first: torch.ones(2)},
        "it has 'more'": state | {"more": torch.ones(2)},
    }
    expected, _ = _round(problem, honest)
    for word, arrays in cases.items():
        new, learner = _round(problem, [*honest, odd(arrays)])
        assert word in learner.left_out[1][12]
        assert sorted(learner.history[1]) == [10, 11]
        torch.testing.assert_close(new, expected)
    two = reply(problem, 12, x)
    two.content["again"] = record(problem, x)
    assert "2 records" in _round(problem, [*honest, two])[1].left_out[1][12]
    alone = strategy(problem)
    alone._sent = record(problem, x)
    assert alone.aggregate_train(1, [odd({})])[0] is None


def _round(problem: Any, replies: list[Any]) -> tuple[torch.Tensor, LearnedWeights]:
    learner = strategy(problem)
    learner._sent = record(problem, problem.start)
    arrays, _ = learner.aggregate_train(1, replies)
    assert arrays is not None
    return learner._vector(arrays.to_torch_state_dict()), learner
