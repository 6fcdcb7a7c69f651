"""The two models that everybody fits on own rows: a linear one and boosted trees, both as plain arrays.

Inputs are columns as they stand in the file, NaN where missing; a model fills in the medians of the rows that it was
fitted on. scikit-learn fits (by its public interface), a few lines evaluate: a model that came from elsewhere is data.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from coterie.ensemble.goal import Goal

PENALTIES = (0.02, 0.2, 2.0)  # scikit-learn's C
USUAL = 0.2
TUNED = 4096  # rows up to which the penalty matters
TREES, LEAVES, LEAST_LEAF = 80, 15, 20
FEWEST_ROUNDS, PACE = 20, 6.4  # of boosting where classes are many; rounds times the learning rate
TREE_COLUMNS = 0.3  # share of the columns that a split looks at: better on few rows, and faster
TREE_ROWS = 2048  # rows that one tree sees
NODES = 2 * LEAVES - 1
COX_STEPS, RISKIEST = 12, 20.0  # of Newton's method, and the largest logarithm of a risk
TINY = 1e-9
BLOCK = 4096  # rows that trees are evaluated on at a time


class Linear(NamedTuple):
    """Scores are inputs · weights + bias.

    Args:
        weights: [r, p], r = 1 or the number of classes.
        bias: [q].
        fill: what stands for a missing value, [p].
    """

    weights: np.ndarray
    bias: np.ndarray
    fill: np.ndarray

    def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
        """Of rows [n, p]: [n, q]."""
        return filled(inputs, self.fill) @ self.weights.T + self.bias


class Trees(NamedTuple):
    """Boosted trees, [T, N] nodes: a row goes left where its feature is at most the threshold.

    Args:
        feature: of each node; −1 in a leaf.
        threshold: of each node.
        left: the next node, always a later one.
        right: the same.
        value: what a leaf adds to the score, the learning rate included.
        base: where scores begin, [r].
        fill: what stands for a missing value, [p]; it says on which side of a threshold such a row goes.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    base: np.ndarray
    fill: np.ndarray

    def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
        """Of rows [n, p]: [n, q]."""
        raw = self._sums(filled(inputs, self.fill).astype(np.float32))
        return np.hstack([np.zeros_like(raw), raw]) if goal.classes == 2 else raw

    def _sums(self, x: np.ndarray) -> np.ndarray:
        T, N = self.feature.shape
        begin = (np.arange(T) * N)[:, None]
        feature, threshold = self.feature.ravel(), self.threshold.ravel()
        children = np.stack([self.left.ravel(), self.right.ravel()]).astype(np.int64)
        parts = []
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK]
            rows = np.arange(len(block))
            node = np.broadcast_to(begin, (T, len(block)))
            for _ in range(N):
                column = feature[node]
                inner = column >= 0
                if not inner.any():
                    break
                right = block[rows, np.where(inner, column, 0)] > threshold[node]
                node = np.where(inner, begin + children[right.astype(int), node], node)
            values = self.value.ravel()[node].reshape(-1, len(self.base), len(block))
            parts.append(self.base + values.sum(0).T)
        return np.concatenate(parts) if parts else np.zeros((0, len(self.base)))


class Model(Protocol):
    """A fitted model."""

    def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
        """Of rows [n, p]: [n, q].

        Args:
            inputs: columns as they stand, NaN where missing.
            goal: the kind of the label.
        """


def rounds_of(goal: Goal) -> int:
    """How often trees are added: one tree, or one for each of more than two classes.

    Example:
        >>> rounds_of(Goal(2)), rounds_of(Goal(4)), rounds_of(Goal(10))
        (80, 40, 20)
    """
    return TREES if goal.classes <= 2 else max(FEWEST_ROUNDS, 2 * TREES // goal.classes)


def trees_of(goal: Goal) -> int:
    """How many trees a model has."""
    return rounds_of(goal) * (goal.classes if goal.classes > 2 else 1)


def filled(inputs: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """Inputs with something in the place of missing values."""
    return np.where(np.isnan(inputs), fill, inputs)


def medians(inputs: np.ndarray) -> np.ndarray:
    """By column; 0 where nothing is known."""
    known = ~np.isnan(inputs).all(0)
    found = np.zeros(inputs.shape[1])
    found[known] = np.nanmedian(inputs[:, known], axis=0)
    return found


def fit_linear(inputs: np.ndarray, labels: np.ndarray, goal: Goal, penalty: float = USUAL) -> Linear:
    """Logistic, ridge or Cox regression on scaled columns.

    Args:
        inputs: [n, p], NaN where missing.
        labels: [n].
        goal: the kind of the label.
        penalty: the larger, the weaker (scikit-learn's C).
    """
    fill = medians(inputs)
    x = filled(inputs, fill)
    mean, deviation = x.mean(0), x.std(0)
    known = deviation > TINY * (1.0 + np.abs(mean))
    scale = np.where(known, deviation, 1.0)
    z = np.where(known, (x - mean) / scale, 0.0)
    if goal.classes:
        weights, bias = _logistic(z, labels.astype(int), goal.classes, penalty)
    elif goal.edges:
        weights, bias = _cox(z, labels, goal, penalty)
    else:
        centre = labels.mean()
        solved = np.linalg.solve(z.T @ z + np.eye(z.shape[1]) / penalty, z.T @ (labels - centre))
        weights, bias = solved[None], np.array([centre])
    weights = np.where(known, weights / scale, 0.0)
    return Linear(weights, bias - weights @ mean, fill)


def _logistic(z: np.ndarray, labels: np.ndarray, classes: int, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights and biases of all classes, absent ones with a small probability."""
    from sklearn.linear_model import LogisticRegression

    weights, bias = np.zeros((classes, z.shape[1])), np.full(classes, -np.log(2.0 * len(z)))
    present = np.unique(labels)
    bias[present] = 0.0
    if len(present) > 1:
        found = LogisticRegression(C=penalty, max_iter=500).fit(z, labels)
        rows = present[1:] if len(present) == 2 else present
        weights[rows], bias[rows] = found.coef_, found.intercept_
    return weights, bias


def _cox(z: np.ndarray, labels: np.ndarray, goal: Goal, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Proportional hazards by partial likelihood (Cox 1972), ties as Breslow has them: one vector of weights, and the
    logarithm of the baseline's hazard in each interval."""
    order = np.argsort(-np.abs(labels), kind="stable")  # the longest times first: who is at risk comes before
    x, times, happened = z[order], np.abs(labels)[order], labels[order] > 0
    last = np.searchsorted(-times, -times, side="right") - 1  # of everybody at risk when a row's time comes
    beta = np.zeros(z.shape[1])
    for _ in range(COX_STEPS):
        risk = np.exp(np.clip(x @ beta, -RISKIEST, RISKIEST))
        at_risk = np.cumsum(risk)[last][happened]
        mean = np.cumsum(risk[:, None] * x, axis=0)[last][happened] / at_risk[:, None]
        shared = np.zeros(len(x))
        np.add.at(shared, last[happened], 1.0 / at_risk)
        weight = risk * np.cumsum(shared[::-1])[::-1]  # of each row in the sums of second moments
        gradient = (x[happened] - mean).sum(0) - beta / penalty
        second = (x * weight[:, None]).T @ x - mean.T @ mean + np.eye(len(beta)) / penalty
        step = np.linalg.solve(second, gradient)
        beta = beta + step * min(1.0, RISKIEST / 4.0 / max(TINY, float(np.abs(x @ step).max())))
    risk = np.exp(np.clip(x @ beta, -RISKIEST, RISKIEST))
    increments = 1.0 / np.cumsum(risk)[last][happened]
    place = np.minimum(np.searchsorted(goal.edges, times[happened]), len(goal.edges) - 1)
    hazard = np.bincount(place, increments, minlength=len(goal.edges))
    return beta[None], np.log(np.maximum(hazard, 0.5 * len(goal.edges) / max(1.0, len(x)) / len(x)))


def fit_trees(inputs: np.ndarray, labels: np.ndarray, goal: Goal, seed: int = 0, leaf: int = LEAST_LEAF) -> Trees:
    """Gradient boosting by scikit-learn, as arrays; of times none: boosted hazards are worse than no column at all.

    Args:
        inputs: [n, p], NaN where missing.
        labels: [n].
        goal: the kind of the label.
        seed: of the columns that each split looks at.
        leaf: fewest rows of a leaf.
    """
    from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

    fill = medians(inputs)
    x, y = filled(inputs, fill).astype(np.float32), labels
    outputs, classes = goal.classes if goal.classes > 2 else 1, goal.classes
    y = y.astype(int) if classes else y
    present = np.unique(y) if classes else np.zeros(1, dtype=int)
    trees = _no_trees(_start(y, classes), fill, trees_of(goal))
    if len(x) < 2 * leaf or (classes and len(present) < 2) or goal.edges:
        return trees
    Booster: Any = GradientBoostingClassifier if classes else GradientBoostingRegressor
    booster = Booster(
        n_estimators=rounds_of(goal),
        learning_rate=PACE / rounds_of(goal),
        max_depth=None,
        max_leaf_nodes=LEAVES,
        min_samples_leaf=leaf,
        max_features=TREE_COLUMNS,
        subsample=min(1.0, TREE_ROWS / len(x)),
        random_state=seed,
    ).fit(x, y)
    # scikit-learn grows one tree for two classes, which adds to the second one
    places = [0] if outputs == 1 else present[1:] if len(present) == 2 else present
    if outputs > 1 and len(present) == 2:
        trees.base[present[0]] = 0.0
        trees.base[present[1]] = np.log((y == present[1]).sum() / (y == present[0]).sum())
    for i, row in enumerate(booster.estimators_):
        for j, fitted in zip(places, row, strict=True):
            _copy(fitted.tree_, trees, i * outputs + int(j), PACE / rounds_of(goal))
    return trees


def _start(labels: np.ndarray, classes: int) -> np.ndarray:
    """Where scores begin: the mean, or logarithms of the classes' frequencies, absent ones counted as half a row."""
    if not classes:
        return np.array([labels.mean()])
    counts = np.maximum(np.bincount(labels, minlength=classes), 0.5)
    return np.log(counts / len(labels)) if classes > 2 else np.log(counts[1:] / counts[0])


def _no_trees(base: np.ndarray, fill: np.ndarray, count: int) -> Trees:
    """So many leaves of value 0."""
    index, number = np.zeros((count, NODES), dtype=np.int16), np.zeros((count, NODES), dtype=np.float32)
    return Trees(index - 1, number, index.copy(), index.copy(), number.copy(), base.astype(float), fill)


def _copy(tree: Any, trees: Trees, t: int, rate: float) -> None:
    """One tree of scikit-learn's into the arrays: its nodes come in an order in which children follow parents."""
    n = tree.node_count
    leaf = tree.children_left < 0
    trees.feature[t, :n] = np.where(leaf, -1, tree.feature)
    trees.threshold[t, :n] = np.where(leaf, 0.0, _rounded_down(tree.threshold))
    trees.left[t, :n], trees.right[t, :n] = (
        np.where(leaf, 0, tree.children_left),
        np.where(leaf, 0, tree.children_right),
    )
    trees.value[t, :n] = np.where(leaf, rate * tree.value[:, 0, 0], 0.0)


def _rounded_down(values: np.ndarray) -> np.ndarray:
    """As float32, never upwards: a threshold stays below the next value of a column, however near that is."""
    found = values.astype(np.float32)
    return np.where(found > values, np.nextafter(found, np.float32(-np.inf)), found)


def chosen_penalty(inputs: np.ndarray, labels: np.ndarray, goal: Goal, folds: np.ndarray) -> float:
    """The penalty with the least held-out loss; the usual one where rows are so many that it matters little.

    Args:
        inputs: [n, p].
        labels: [n].
        goal: the kind of the label.
        folds: the fold of each row, [n].
    """
    if len(labels) > TUNED or len(np.unique(folds)) < 2:
        return USUAL
    losses = [held_out(inputs, labels, goal, folds, lambda x, y, c=c: fit_linear(x, y, goal, c)) for c in PENALTIES]
    return PENALTIES[int(np.argmin([goal.losses(goal.distribution(s), labels).mean() for s in losses]))]


def held_out(inputs: np.ndarray, labels: np.ndarray, goal: Goal, folds: np.ndarray, fit: Any) -> np.ndarray:
    """Scores [n, q] of each row by a model that was fitted without its fold."""
    scores = np.zeros((len(labels), goal.outputs))
    for f in np.unique(folds):
        out = folds == f
        scores[out] = fit(inputs[~out], labels[~out]).scores(inputs[out], goal)
    return scores
