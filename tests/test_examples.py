"""examples/micro.py is the algorithm: it imports NumPy alone, and its rounds are those of `meritfed`."""

import ast
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.experiment.build import federate
from coterie.experiment.config import FederationTable
from coterie.methods import meritfed
from coterie.numerics import Draw
from coterie.problems.models import FlatModel
from coterie.problems.weighting import weighting

MICRO = Path(__file__).resolve().parent.parent / "examples" / "micro.py"
LAST_WORDS = "This file is the algorithm; everything else is speed and safety."


@pytest.fixture(scope="module")
def micro() -> Any:
    spec = spec_from_file_location("micro", MICRO)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("seed", "steps"), [(0, 5), (3, 1), (4, 0)])
def test_its_rounds_are_those_of_meritfed(micro: Any, seed: int, steps: int) -> None:
    """Models and weights agree to 1e-10 after every one of ten rounds, on the same rows, with full batches."""
    clients, target, _, start = micro.federation(seed=seed)
    features, classes = start.shape
    model = FlatModel(nn.Linear(features, classes, bias=False))
    problem = weighting(clients, target, model, "cross_entropy", dtype=torch.float64)
    fed, _ = federate(problem, FederationTable(mode="vmap"))
    method = meritfed(step=0.8, mirror_step=2.0, mirror_steps=steps)
    state = method.init(problem, fed.n)
    x, w = state.x.numpy().reshape(classes, features).T, np.full(len(clients), 1 / len(clients))
    for t in range(10):
        draw = Draw.of(1).round(t)
        state = method.round(fed.begin(t + 1, draw), state, draw)
        x, w = micro.meritfed_round(x, w, clients, target, gamma=0.8, alpha=2.0, steps=steps)
        np.testing.assert_allclose(x.T.flatten(), state.x.numpy(), rtol=0, atol=1e-10)
        np.testing.assert_allclose(w, state.w.numpy(), rtol=0, atol=1e-10)
    assert (w.max() - w.min() > 0.1) == (steps > 0)


def test_its_gradient_is_the_derivative_of_the_loss(micro: Any) -> None:
    (X, y), h = micro.federation()[1], 1e-6
    x = np.random.default_rng(1).normal(size=(20, 4))

    def loss(at: np.ndarray) -> float:
        return float(-np.mean(np.log(micro.softmax(X @ at)[np.arange(len(y)), y])))

    found = micro.gradient(x, X, y)
    for i, j in ((0, 0), (7, 2), (19, 3)):
        step = np.zeros_like(x)
        step[i, j] = h
        assert found[i, j] == pytest.approx((loss(x + step) - loss(x - step)) / (2 * h), abs=1e-8)


def test_it_is_short_and_needs_numpy_alone() -> None:
    tree = ast.parse(MICRO.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert names == ["numpy"]
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    assert len(MICRO.read_text(encoding="utf-8").splitlines()) <= 110
    assert (ast.get_docstring(tree) or "").endswith(LAST_WORDS)


def test_it_runs_as_a_script_and_finds_the_friends() -> None:
    done = subprocess.run([sys.executable, str(MICRO)], capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    weights = {kind: [float(words[2]) for words in lines if words[:1] == [kind]] for kind in ("friend", "stranger")}
    assert (len(weights["friend"]), len(weights["stranger"])) == (4, 8)
    assert sum(weights["friend"]) > 0.9
    accuracy = {words[0]: float(words[-1]) for words in lines if words[:1] in (["alone"], ["average"], ["learned"])}
    assert accuracy["learned"] > max(accuracy["alone"], accuracy["average"]) + 0.1
