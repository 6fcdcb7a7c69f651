"""How checks look at states and records: values by name, equal to the last bit or nearly, and errors that say which."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.federation.tree import named_leaves
from coterie.federation.work import Handle, Memory


class ConformanceError(AssertionError):
    """A check that a method or problem fails: which one, what was found, and the remedy."""


def require(condition: object, found: str) -> None:
    """Raise `ConformanceError` unless the condition holds.

    Args:
        condition: what must be true.
        found: what was found otherwise.
    """
    if not condition:
        raise ConformanceError(found)


class Check(NamedTuple):
    """One check of a method or problem: what must hold, how it is tried, and the remedy."""

    name: str
    run: Callable[..., object]
    remedy: str


def passed(name: str, checks: Iterable[Check], *given: Any) -> list[str]:
    """The names of the checks, which all passed; the first that fails is an error with its name and the remedy.

    Args:
        name: the method or problem.
        checks: the checks.
        given: what each of them is called with, and a folder of its own behind it.
    """
    done = []
    for check in checks:
        try:
            with TemporaryDirectory(prefix="coterie-check-") as folder:
                check.run(*given, Path(folder))
        except Exception as error:  # whatever the method or problem itself raises
            known = isinstance(error, AssertionError | CoterieError)
            found = str(error) if known else f"{type(error).__name__}: {error}"
            raise ConformanceError(f"{name} fails “{check.name}”: {found.rstrip('.')}. {check.remedy}") from error
        done.append(check.name)
    return done


def values(state: Any, recall: Callable[[Handle], Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Everything in a state by name, what clients remember too.

    Args:
        state: the state of a method.
        recall: asks the nodes for the rows of a memory that lies there.
    """
    for name, leaf in named_leaves(state):
        if isinstance(leaf, Memory):
            payload = leaf.payload if recall is None or not isinstance(leaf.payload, Handle) else recall(leaf.payload)
            for inner, tensor in named_leaves(payload):
                yield f"{name}@{inner}", tensor
        else:
            yield name, leaf


def assert_same(one: Any, two: Any) -> None:
    """Equal to the last bit."""
    a, b = dict(values(one)), dict(values(two))
    require(a.keys() == b.keys(), f"the states have the values {sorted(a)} and {sorted(b)}")
    for name in a:
        if isinstance(a[name], Tensor):
            require(a[name].dtype == b[name].dtype, f"{name} is of {a[name].dtype} and {b[name].dtype}")
            require(torch.equal(a[name], b[name]), f"{name} differs by up to {_distance(a[name], b[name]):.3g}")
        else:
            require(a[name] == b[name], f"{name} is {a[name]!r} and {b[name]!r}")


def assert_near(one: Any, two: Any, tolerance: float) -> None:
    """Equal up to a tolerance, relative and absolute."""
    a, b = dict(values(one)), dict(values(two))
    require(a.keys() == b.keys(), f"the states have the values {sorted(a)} and {sorted(b)}")
    for name in a:
        if isinstance(a[name], Tensor):
            near(a[name], b[name], tolerance, name)


def near(one: Tensor, two: Tensor, tolerance: float, name: str) -> None:
    """Two tensors, equal up to a tolerance."""
    try:
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        raise ConformanceError(f"{name}: {error}") from None


def assert_on_simplex(weights: Tensor, tolerance: float) -> None:
    """Client weights that are not negative and add up to 1, in every row."""
    require(bool((weights >= 0.0).all()), f"a client weight is negative: {float(weights.min()):.3g}")
    gap = float((weights.double().sum(-1) - 1.0).abs().max())
    require(gap < tolerance, f"the client weights add up to 1 ± {gap:.3g}")


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The recorded rounds of a result folder, without the time that they took."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


def _distance(one: Tensor, two: Tensor) -> float:
    return float((one.double() - two.double()).abs().max()) if one.shape == two.shape and one.numel() else float("nan")
