"""The model that is delivered: members with weights, as arrays in a file, evaluated by a few lines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coterie.ensemble.goal import Goal
from coterie.ensemble.message import LARGEST, check_trees
from coterie.ensemble.models import Linear, Model, Trees
from coterie.errors import UsageError

TOGETHER = "together"
PREPARED, ARRAYS = "preprocess.json", "model.safetensors"
ROUNDING = 1e-6
KINDS: dict[str, Any] = {"linear": Linear, "trees": Trees}


class Member(NamedTuple):
    """A model of the stack.

    Args:
        holder: whose it is; "" for one's own, "together" for one's own that takes the partners' mean scores as columns.
        kind: linear or trees.
        model: the arrays.
        level: what is added to its scores, [q].
        slope: what they are multiplied by before.
        weight: its share of the predictions.
    """

    holder: str
    kind: str
    model: Model
    level: np.ndarray
    slope: float
    weight: float


class Stack(NamedTuple):
    """Members by weight, and the partners' models whose mean scores the member "together" takes as columns."""

    goal: Goal
    members: tuple[Member, ...]
    pooled: tuple[tuple[Model, ...], ...] = ()

    def distribution(self, inputs: np.ndarray) -> np.ndarray:
        """Probabilities of classes or intervals, or the number, [n, …].

        Args:
            inputs: columns as they stand in a file, NaN where missing, [n, p].
        """
        total: Any = 0.0
        for member in self.members:
            x = inputs
            if member.holder == TOGETHER:
                pairs = [[model.scores(inputs, self.goal) for model in pair] for pair in self.pooled]
                x = np.hstack([inputs, *mean_columns(self.goal, pairs)])
            scores = member.level + member.slope * member.model.scores(x, self.goal)
            total = total + member.weight * self.goal.distribution(scores)
        return np.asarray(total)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Scores of the distribution, as networks give them."""
        found = self.distribution(inputs.double().numpy())
        return torch.from_numpy(found if self.goal.edges else self.goal.scores(found))

    def shares(self) -> dict[str, float]:
        """By holder, its share of the predictions."""
        found: dict[str, float] = {}
        for member in self.members:
            found[member.holder] = found.get(member.holder, 0.0) + member.weight
        return found


def mean_columns(goal: Goal, scores: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """The mean over partners of what their models of each kind say of each row, as columns.

    Args:
        goal: the kind of the label.
        scores: by partner, those of its models, linear and trees.
    """
    return [np.mean([goal.columns(models[j]) for models in scores], axis=0) for j in range(len(scores[0]))]


def write_stack(stack: Stack, about: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a model folder, by name.

    Args:
        stack: the model.
        about: the columns and classes, as `Preparation.as_dict` gives them.
    """
    from safetensors.torch import save

    arrays = {f"{i}.{name}": value for i, (_, model) in enumerate(_models(stack)) for name, value in _named(model)}
    arrays |= {f"{i}.level": member.level for i, member in enumerate(stack.members)}
    described = [{"holder": m.holder, "kind": m.kind, "slope": m.slope, "weight": m.weight} for m in stack.members]
    pooled = [[_kind(model) for model in pair] for pair in stack.pooled]
    model = {"classes": stack.goal.classes, "edges": list(stack.goal.edges), "members": described, "pooled": pooled}
    tensors = {name: torch.from_numpy(np.array(value, order="C")) for name, value in arrays.items()}
    return {PREPARED: json.dumps({**about, "stack": model}, indent=1).encode(), ARRAYS: save(tensors)}


def _models(stack: Stack) -> Iterator[tuple[str, Model]]:
    yield from ((m.kind, m.model) for m in stack.members)
    yield from ((_kind(model), model) for pair in stack.pooled for model in pair)


def _kind(model: Model) -> str:
    return "linear" if isinstance(model, Linear) else "trees"


def _named(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    if not isinstance(model, Linear | Trees):
        raise UsageError(
            f"the advice's model holds a {type(model).__name__} of your program, which is no data and cannot be "
            "stored; use advice.predict, or call coterie.advise without models."
        )
    yield from model._asdict().items()


def read_stack(folder: Path, described: Mapping[str, Any], columns: int) -> Stack:
    """The model of a folder; whatever is wrong with it is a `ValueError`.

    Args:
        folder: with its arrays.
        described: the entry "stack" of its preprocess.json.
        columns: how many inputs there are.
    """
    goal = Goal(int(described["classes"]), tuple(map(float, described["edges"])))
    try:
        tensors = load_file(folder / ARRAYS)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    members = list(described["members"])
    width = (1 if goal.edges else 2) * (goal.classes if goal.classes > 2 else 1)

    def model(i: int, kind: str, extra: int = 0) -> Model:
        arrays = {name: tensors[f"{i}.{name}"].numpy() for name in KINDS[kind]._fields}
        return _checked(KINDS[kind](**arrays), goal, columns + extra)

    try:
        found = tuple(
            Member(
                str(m["holder"]),
                str(m["kind"]),
                model(i, m["kind"], width if m["holder"] == TOGETHER else 0),
                _finite(tensors[f"{i}.level"].numpy(), (goal.outputs,)),
                float(m["slope"]),
                float(m["weight"]),
            )
            for i, m in enumerate(members)
        )
        places = count(len(members))
        pooled = tuple(tuple(model(next(places), kind) for kind in kinds) for kinds in described["pooled"])
    except KeyError as error:
        raise ValueError(f"its part {error} is missing") from None
    if not found or not np.isfinite([(m.slope, m.weight) for m in found]).all():
        raise ValueError("its weights are not finite")
    if abs(sum(m.weight for m in found) - 1.0) > ROUNDING:
        raise ValueError("its weights do not add up to 1")
    whole = ["linear"] if goal.edges else [*KINDS]
    if any(kinds != whole for kinds in described["pooled"]) or (TOGETHER in [m.holder for m in found]) > len(pooled):
        raise ValueError("models of partners are missing that one of its members takes as columns")
    return Stack(goal, found, pooled)


def _finite(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if (
        array.shape != shape
        or array.dtype.kind not in "if"
        or not np.isfinite(array).all()
        or (np.abs(array) > LARGEST).any()
    ):
        raise ValueError(f"an array of shape {array.shape} should be {shape}, of finite numbers")
    return array


def _checked(model: Linear | Trees, goal: Goal, columns: int) -> Model:
    """A model whose arrays fit the columns and each other."""
    _finite(model.fill, (columns,))
    if isinstance(model, Linear):
        _finite(model.weights, (goal.classes or 1, columns))
        _finite(model.bias, (goal.outputs,))
        return model
    outputs = goal.classes if goal.classes > 2 else 1
    _finite(model.base, (outputs,))
    if model.feature.ndim != 2 or len(model.feature) % outputs:
        raise ValueError("its trees do not fit its outputs")
    for array in model[:5]:
        _finite(array, model.feature.shape)
    check_trees(model, columns)
    return model
