"""mean-estimation: groups, closed-form oracles, what is known exactly, and the best weights."""

import pytest
import torch

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.base import View
from coterie.problems.catalogue.mean_estimation import mean_estimation

WIDE = Context(0, torch.float64)
SMALL = {"friends": 2, "near": 3, "far": 2, "samples": 40, "validation": 30, "dimension": 4}


@pytest.fixture(scope="module")
def full():
    return mean_estimation(Context(0), shift=0.1)


def a_point(d=4, seed=3):
    return Draw.of(seed).normal(d, dtype=torch.float64)


def simplex(n, seed):
    return torch.softmax(2 * Draw.of(seed).normal(n, dtype=torch.float64), 0)


def test_the_papers_size_is_the_default(full):
    assert (full.clients, full.friends, len(full.start)) == (150, 5, 10)
    assert set(full.train.counts.tolist()) == {1000}
    assert full.target.valid.capacity == 1000
    assert float(full.start.norm()) == pytest.approx(1.0)
    assert full.start.unique().numel() == 1
    assert full.offers == {"gradient", "hvp", "target", "friends", "optimal-weights"}


def test_each_group_has_its_own_mean_and_unit_variance(full):
    rows = full.train.columns[0].double().reshape(150, 1000, 10)
    e = full.exact.means[2]
    assert float(e.norm()) == pytest.approx(1.0)
    for part, mean in ((slice(5), 0.0), (slice(5, 100), 0.1), (slice(100, 150), e)):
        some = rows[part]
        tolerance = 5 / some[..., 0].numel() ** 0.5
        assert float((some.mean((0, 1)) - mean).abs().max()) < tolerance
        assert float((some - mean).square().mean((0, 1)).sub(1).abs().max()) < 2 * tolerance
    assert float(full.target.valid.all().inputs.mean(0).abs().max()) < 5 / 1000**0.5


def test_the_authors_geometry():
    """‖mean of the near clients‖ = μ, and e alternates: orthogonal to that mean and to the start."""
    problem = mean_estimation(WIDE, shift=0.1, distance=2.0, near=2, far=1, samples=10, geometry="authors")
    _, near, far = problem.exact.means
    torch.testing.assert_close(near, torch.full((10,), 0.1 / 10**0.5, dtype=torch.float64))
    assert float(near.norm()) == pytest.approx(0.1)
    assert float(far.norm()) == pytest.approx(2.0)
    assert float(far @ near) == pytest.approx(0.0, abs=1e-15)
    assert float(far @ problem.start) == pytest.approx(0.0, abs=1e-15)
    text = mean_estimation(WIDE, shift=0.1, distance=2.0, near=2, far=1, samples=10)
    assert torch.equal(text.train.columns[0][:5], problem.train.columns[0][:5])  # only the means differ


def test_the_target_is_client_0_with_validation_rows_of_its_own():
    problem = mean_estimation(WIDE, **SMALL)
    assert torch.equal(problem.target.train.all().inputs, problem.train.client(0).all().inputs)
    assert not torch.isin(problem.target.valid.all().inputs, problem.train.columns[0]).any()


@pytest.mark.parametrize(
    "weight", [None, torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)], ids=["", "padded"]
)
def test_the_oracles_are_derivatives_of_the_loss(weight):
    task = mean_estimation(WIDE, **SMALL).task
    rows = Draw.of(1).normal(5, 4, dtype=torch.float64)
    batch, x, v = Batch((rows,), weight), a_point(), a_point(seed=4)
    kept = rows if weight is None else rows[weight > 0]
    assert float(task.loss(x, batch)) == pytest.approx(float((x - kept).square().mean()))
    torch.testing.assert_close(task.gradient(x, batch), torch.func.grad(task.loss)(x, batch))
    torch.testing.assert_close(task.hvp(x, v, batch), torch.func.hessian(task.loss)(x, batch) @ v)


def test_full_oracles_are_those_of_all_rows():
    problem = mean_estimation(WIDE, **SMALL)
    task, rows, x, v = problem.task, problem.train.client(3), a_point(), a_point(seed=4)
    batch = Batch((problem.train.columns[0][120:160],))
    torch.testing.assert_close(task.full_loss(x, rows), task.loss(x, batch))
    torch.testing.assert_close(task.full_gradient(x, rows), task.gradient(x, batch))
    torch.testing.assert_close(task.full_hvp(x, v, rows), 0.5 * v)


def test_measures():
    problem, x = mean_estimation(WIDE, **SMALL), a_point()
    w = simplex(7, 0)
    measures = problem.measure(View(x, w))
    assert measures["distance_to_optimum"] == pytest.approx(float(x.norm()))
    # L_0(x) − L_0(0) on a sample is the excess and a term linear in the sample's mean, which vanishes in expectation
    rows = problem.target.valid
    loss = problem.task.full_loss
    linear = 2 / 4 * float(x @ rows.all().inputs.mean(0))
    excess = float(loss(x, rows) - loss(torch.zeros_like(x), rows))
    assert measures["objective"] == pytest.approx(excess + linear)
    assert measures["validation_loss"] == pytest.approx(float(loss(x, rows)))
    assert measures["near_weight"] == pytest.approx(float(w[2:5].sum()))
    assert measures["far_weight"] == pytest.approx(float(w[5:].sum()))
    assert set(problem.measure(View(x))) == {"distance_to_optimum", "objective", "validation_loss"}


@pytest.mark.parametrize("shift", [0.0, 0.01, 0.1, 3.0])
def test_no_weights_are_better_than_the_best_in_expectation(shift):
    exact = mean_estimation(WIDE, **SMALL, shift=shift).exact
    w = exact.best_weights()
    assert float(w.sum()) == pytest.approx(1.0)
    assert float(w.min()) >= 0.0
    least = float(exact.error(w))
    for seed in range(200):
        other = simplex(7, seed)
        for mixed in (other, w + 0.01 * (other - w)):
            assert float(exact.error(mixed)) >= least * (1 - 1e-12)


def test_best_weights_of_indistinguishable_groups_are_equal():
    exact = mean_estimation(WIDE, **{**SMALL, "far": 0}, shift=0.0).exact
    torch.testing.assert_close(exact.best_weights(), torch.full((5,), 0.2, dtype=torch.float64))
    alone = mean_estimation(WIDE, **{**SMALL, "near": 0}, distance=100.0).best_weights
    torch.testing.assert_close(alone, torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_expected_error_is_that_of_the_pooled_mean():
    found, w = [], simplex(7, 1)
    for seed in range(300):
        problem = mean_estimation(Context(seed, torch.float64), **SMALL, shift=0.2)
        pooled = w @ problem.train.columns[0].reshape(7, 40, 4).mean(1)
        found.append(float(pooled.square().sum() - problem.exact.error(w)))  # the far mean differs from seed to seed
    found = torch.tensor(found)
    assert abs(float(found.mean())) < 4 * float(found.std()) / 300**0.5
    assert float(found.std()) < 0.2


def test_the_seed_decides_and_rows_do_not_depend_on_the_type():
    same, again, other = (mean_estimation(Context(seed), **SMALL) for seed in (0, 0, 1))
    assert torch.equal(same.train.columns[0], again.train.columns[0])
    assert not torch.equal(same.train.columns[0], other.train.columns[0])
    assert torch.equal(mean_estimation(WIDE, **SMALL).train.columns[0].float(), same.train.columns[0])


@pytest.mark.parametrize(("key", "value"), [("shift", -0.1), ("friends", 0), ("near", -1), ("samples", 0)])
def test_impossible_sizes_are_refused(key, value):
    with pytest.raises(UsageError, match=rf"problem\.{key} = {value}"):
        load(sets={f"problem.{key}": value}, flags={"run.problem": "mean-estimation"})


@pytest.mark.slow
def test_in_a_long_run_with_default_settings_meritfed_beats_the_known_friends():
    """μ = .001, 5,000 rounds: a constant mirror step ends at 3.0e-3 in squared error, SGD-Ideal at 1.8e-3."""
    errors = {}
    for method in ("meritfed", "sgd-ideal"):
        flags = {"run.rounds": 5000, "run.record": 5000, "run.baselines": []}
        sets = {"run.problem": "mean-estimation", "run.method": method, "problem.shift": 0.001}
        errors[method] = run_rounds(assemble(load(sets=sets, flags=flags)), None).summary["final"]["objective"]
    assert errors["meritfed"] < 0.3 * errors["sgd-ideal"]
