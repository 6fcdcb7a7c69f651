"""Weight learners run unchanged on every weighting problem: two rounds each, finite, with weights on the simplex."""

from inspect import signature

import pytest
import torch

from coterie.experiment.build import assemble, make_problem
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.methods.registry import METHODS
from coterie.problems.catalogue.registry import PROBLEMS, problem_entry

SMALL = {
    "toy-cosine": {"clients": 5, "dimension": 6, "rows": 12, "noise": 0.5},
    "noisy-clients": {"model": "logistic", "noisy_rows": 30, "clients": 5},
    "groups": {"model": "logistic", "clients": 5, "train": 30},
    "friends": {"model": "logistic", "clients": 5, "friends": 2},
    "mixture": {"model": "logistic", "clients": 5, "friends": 3, "rows": 20},
    "mean-estimation": {"friends": 2, "near": 2, "far": 2, "samples": 20, "validation": 50, "shift": 0.1},
    "quadratic": {},
}
GENTLE = {"step": 1e-3, "outer_step": 1e-3, "series_step": 1e-2, "lipschitz": 100.0}
CHEAP = {"exact-gd": {"inner": "gradient", "local_steps": 1, "batch": 4, "damping": 1e-2}}
WITHOUT_CLASSES = ("toy-cosine", "mean-estimation", "quadratic")
learners = [entry for entry in METHODS if entry.learns_weights]
ALIKE = ("noisy-clients", "mixture")  # digits again, as groups and friends
problems = [
    pytest.param(entry.name, marks=[pytest.mark.slow] if entry.name in ALIKE else [])
    for entry in PROBLEMS
    if entry.name in SMALL
]


BUILT = {}


def shared(config):
    """The problem of a configuration, built once for all learners."""
    key = config.run.problem, repr(config.problem)
    if key not in BUILT:
        BUILT[key] = make_problem(config)
    return BUILT[key]


@pytest.mark.parametrize("problem", problems)
@pytest.mark.parametrize("learner", learners, ids=lambda entry: entry.name)
def test_it_runs(learner, problem):
    if "everyone" in learner.make().needs and "everyone" not in signature(problem_entry(problem).make).parameters:
        pytest.skip("only the target has validation rows here")
    if "classes" in learner.make().needs and problem in WITHOUT_CLASSES:
        pytest.skip("labels are numbers here")
    known = learner.make().settings
    settings = {**{key: value for key, value in GENTLE.items() if key in known}, **CHEAP.get(learner.name, {})}
    method = {f"method.{key}": value for key, value in settings.items()}
    sizes = {f"problem.{key}": value for key, value in SMALL[problem].items()}
    run = {"run.method": learner.name, "run.problem": problem, "run.rounds": 2, "run.baselines": []}
    config = load(sets={**sizes, **method}, flags={**run, "federation.mode": "vmap"})
    result = run_rounds(assemble(config, None, shared(config)), None)
    assert result.summary["outcome"] == "finished", result.summary["message"]
    w = result.view.weights
    assert bool(torch.isfinite(result.view.model).all())
    assert float(w.min()) >= 0.0
    torch.testing.assert_close(w.sum(-1), torch.ones_like(w.sum(-1)), atol=1e-5, rtol=0)
