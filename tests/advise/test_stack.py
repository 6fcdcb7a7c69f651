"""The delivered model: a weighted mean, stored as data, and whatever is wrong with a stored one is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted import NAMES, message, rows
from safetensors.torch import load_file, save_file

from coterie.ensemble.goal import Goal
from coterie.ensemble.models import Model, fit_linear, fit_trees
from coterie.ensemble.stack import TOGETHER, Member, Stack, mean_columns, read_stack, write_stack
from coterie.errors import UsageError
from coterie.experiment.predict import load_model

KINDS = [
    pytest.param(Goal(2), {}, id="two classes"),
    pytest.param(Goal(3), {"classes": 3}, id="three classes"),
    pytest.param(Goal(), {"number": True}, id="a number"),
    pytest.param(Goal(edges=(0.5, 1.5)), {"number": True}, id="times"),
]


def stack_of(goal: Goal, world: dict[str, Any]) -> Stack:
    x, y = rows(80, 1, **world)
    y = np.abs(y) + 0.1 if goal.edges else y
    theirs = message(goal, *(lambda a, b: (a, np.abs(b) + 0.1 if goal.edges else b))(*rows(90, 2, **world)))
    own: list[tuple[str, Model]] = [("linear", fit_linear(x, y, goal))]
    if not goal.edges:
        own.append(("trees", fit_trees(x, y, goal)))
    level = np.linspace(0.0, 0.2, goal.outputs)
    pooled = (theirs.models(goal),)
    wider = np.hstack([x, *mean_columns(goal, [[m.scores(x, goal) for m in pooled[0]]])])
    members = [Member("", kind, model, 0.0 * level, 1.0, 0.25) for kind, model in own]
    members.append(Member("north", "linear", theirs.linear, level, 0.8, 0.25))
    members.append(Member(TOGETHER, "linear", fit_linear(wider, y, goal), 0.0 * level, 1.0, 0.0))
    members[-1] = members[-1]._replace(weight=1.0 - sum(m.weight for m in members))
    return Stack(goal, tuple(members), pooled)


ABOUT: dict[str, Any] = {
    "label": "label",
    "kind": "classification",
    "numeric": [{"name": n, "mean": 0.0, "deviation": 1.0, "indicator": False} for n in NAMES],
    "categorical": [],
    "image": None,
    "classes": ["c0", "c1"],
    "class_counts": [1, 1],
    "label_mean": 0.0,
    "label_deviation": 1.0,
}


def stored(folder: Path, stack: Stack) -> Path:
    for name, data in write_stack(stack, ABOUT).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_a_stack_is_the_weighted_mean_of_its_members(goal: Goal, world: dict[str, Any]) -> None:
    stack, x = stack_of(goal, world), rows(20, 5)[0]
    wider = np.hstack([x, *mean_columns(goal, [[m.scores(x, goal) for m in stack.pooled[0]]])])
    wanted: Any = 0.0
    for m in stack.members:
        scores = m.level + m.slope * m.model.scores(wider if m.holder == TOGETHER else x, goal)
        wanted = wanted + m.weight * goal.distribution(scores)
    np.testing.assert_allclose(stack.distribution(x), wanted, atol=1e-12)
    outputs = stack(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(outputs if goal.edges else goal.distribution(outputs), wanted, atol=1e-9)
    assert sum(stack.shares().values()) == pytest.approx(1.0)
    assert set(stack.shares()) == {"", "north", TOGETHER}


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_a_stored_model_predicts_the_same_to_the_last_bit(goal: Goal, world: dict[str, Any], tmp_path: Path) -> None:
    stack, x = stack_of(goal, world), rows(20, 5)[0]
    described = json.loads((stored(tmp_path, stack) / "preprocess.json").read_text())["stack"]
    found = read_stack(tmp_path, described, len(NAMES))
    np.testing.assert_array_equal(found.distribution(x), stack.distribution(x))
    assert write_stack(found, ABOUT) == write_stack(stack, ABOUT)


def change_json(key: str, value: Any, member: int | None = None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / "preprocess.json").read_text())
        place = data["stack"] if member is None else data["stack"]["members"][member]
        place[key] = value
        (folder / "preprocess.json").write_text(json.dumps(data))

    return change


def change_arrays(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        arrays = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(arrays)
        save_file(arrays, folder / "model.safetensors")

    return changed


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[Path], None]:
    return change_arrays(lambda arrays: arrays[name].__setitem__(place, value))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a cycle": put("1.left", (0, 0), 0),
    "a column that does not exist": put("1.feature", (0, 0), 5),
    "a missing array": change_arrays(lambda arrays: arrays.pop("0.weights")),
    "a pooled model is missing": change_arrays(lambda arrays: arrays.pop("4.bias")),
    "a narrow array": change_arrays(lambda a: a.update({"0.weights": a["0.weights"][:, :2].clone()})),
    "one threshold less": change_arrays(lambda a: a.update({"1.threshold": a["1.threshold"][:, :-1].clone()})),
    "an array without a number": put("2.weights", (0, 0), float("nan")),
    "an infinite level": put("2.level", (0,), float("inf")),
    "nobody": change_json("members", []),
    "a weight without a number": change_json("weight", float("nan"), 0),
    "an infinite slope": change_json("slope", float("inf"), 0),
    "a negative weight": change_json("weight", -0.5, 0),
    "a third kind": change_json("kind", "forest", 0),
    "other classes": change_json("classes", 3),
    "of times": change_json("edges", [1.0, 2.0]),
    "edges that are no times": change_json("edges", "ab"),
    "no partner's models for the member together": change_json("pooled", []),
    "weights that are no share": change_json("weight", 0.9, 0),
    "bytes": lambda folder: (folder / "model.safetensors").write_bytes(b"12") and None,
    "half a file": lambda folder: (folder / "preprocess.json").write_text('{"stack": ') and None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_is_told(damage: Callable[[Path], None], tmp_path: Path) -> None:
    stored(tmp_path, stack_of(Goal(2), {}))
    net, prepared = load_model(tmp_path)
    assert prepared.shape == (5,)
    assert isinstance(net, Stack)
    damage(tmp_path)
    with pytest.raises(UsageError, match="is damaged"):
        load_model(tmp_path)


def test_a_model_without_its_arrays_is_told(tmp_path: Path) -> None:
    (stored(tmp_path, stack_of(Goal(2), {})) / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors.*(is missing|damaged)"):
        load_model(tmp_path)


def test_estimators_of_a_program_cannot_be_stored() -> None:
    class Own:
        def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
            return inputs

    stack = Stack(Goal(2), (Member("", "model 3", Own(), np.zeros(2), 1.0, 1.0),))
    with pytest.raises(UsageError, match=r"holds a Own of your program.*use advice\.predict"):
        write_stack(stack, ABOUT)
