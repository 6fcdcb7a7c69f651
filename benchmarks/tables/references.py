"""What a user could do by hand with scikit-learn: alone, stacked, pooled, and partners added one by one."""

from collections.abc import Callable

import numpy as np
from scipy.optimize import nnls

from benchmarks.tables.federations import Federation
from benchmarks.tables.models import Encoder, Fit, Task, folds, linear, task_of, trees, tuned
from benchmarks.tables.sources import Columns, joined, take

STEPS = 200  # of EM
INTERCEPT = 10.0  # an indicator this large is hardly penalised


def references(drawn: Federation) -> dict[str, np.ndarray]:
    """Predictions for the test rows by name."""
    task = task_of(drawn.table, drawn.own)
    return {**alone(task, drawn), "pooled": everything(task, drawn), "add-one": add_one(task, drawn)}


def alone(task: Task, drawn: Federation) -> dict[str, np.ndarray]:
    """Best alone: the better of a tuned linear model and trees, held out; own stack: both, weighed on held-out rows."""
    own, y = drawn.own, task.targets(drawn.own)
    held, test, rows = [], [], np.empty(0, dtype=int)
    for given, fill in candidates(task):
        encode = Encoder(own, drawn.table.features, fill=fill)
        x = encode(own)
        fit = tuned(task, x, y) if given is linear else given
        parts = [(fit(task, x[seen], y[seen])(x[out]), out) for seen, out in folds(task, y)]
        held.append(np.concatenate([one for one, _ in parts]))
        rows = np.concatenate([out for _, out in parts])
        test.append(fit(task, x, y)(encode(drawn.test)))
    best = int(np.argmin([task.losses(one, y[rows]).sum() for one in held]))
    return {"best alone": test[best], "own stack": mixed(weights(task, held, y[rows]), test)}


def candidates(task: Task) -> list[tuple[Fit, bool]]:
    """Models, and whether missing numbers are filled in for them."""
    return [(linear, True)] if task.kind == "times" else [(linear, True), (trees, False)]


def weights(task: Task, predictions: list[np.ndarray], y: np.ndarray) -> np.ndarray:
    """On the simplex: the most likely ones by EM; of numbers those of the least squares."""
    if task.kind == "numbers":
        found = nnls(np.stack(predictions, 1), y)[0]
        return np.asarray(found / found.sum()) if found.sum() > 0 else np.full(len(found), 1 / len(found))
    likelihood = np.stack([task.likelihood(one, y) for one in predictions], 1)
    share = np.full(len(predictions), 1 / len(predictions))
    for _ in range(STEPS):
        joint = likelihood * share
        share = (joint / joint.sum(1, keepdims=True)).mean(0)
    return share


def mixed(share: np.ndarray, predictions: list[np.ndarray]) -> np.ndarray:
    """The weighted mean."""
    return np.asarray(sum(weight * one for weight, one in zip(share, predictions, strict=True)))


def everything(task: Task, drawn: Federation) -> np.ndarray:
    """All rows in one table: a linear model or trees, whichever is better on my rows held out."""
    partners = [one.columns for one in drawn.partners]
    tried = [(_loss(task, drawn, partners, *one), one) for one in candidates(task)]
    fit, fill = min(tried, key=lambda one: one[0])[1]
    return _trained(task, drawn, drawn.own, partners, fit, fill)(drawn.test)


def add_one(task: Task, drawn: Federation) -> np.ndarray:
    """Partners that lower the held-out loss of a linear model when their rows are added, with an intercept each."""
    before = _loss(task, drawn, [])
    helpers = [one.columns for one in drawn.partners if _loss(task, drawn, [one.columns]) < before]
    return _trained(task, drawn, drawn.own, helpers)(drawn.test)


def _loss(task: Task, drawn: Federation, partners: list[Columns], fit: Fit | None = None, fill: bool = True) -> float:
    """On my rows held out."""
    y, loss = task.targets(drawn.own), 0.0
    for seen, out in folds(task, y, 1):
        model = _trained(task, drawn, take(drawn.own, seen), partners, fit, fill)
        loss += float(task.losses(model(take(drawn.own, out)), y[out]).sum())
    return loss


def _trained(
    task: Task, drawn: Federation, own: Columns, partners: list[Columns], fit: Fit | None = None, fill: bool = True
) -> Callable[[Columns], np.ndarray]:
    """A model of some own rows and all of some partners; by default linear, with an intercept for each partner."""
    rows = joined([own, *partners])
    encode = Encoder(rows, drawn.table.features, fill=fill)
    x, shifts = encode(rows), 0 if fit else len(partners)
    if shifts:
        site = np.repeat(np.arange(1 + shifts), [len(one[task.label]) for one in (own, *partners)])
        x = np.concatenate([x, INTERCEPT * np.eye(1 + shifts)[site, 1:]], 1)
    model = (fit or linear)(task, x, task.targets(rows))
    return lambda more: model(np.pad(encode(more), ((0, 0), (0, shifts))))
