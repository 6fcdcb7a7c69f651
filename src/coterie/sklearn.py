"""scikit-learn estimators that learn whom to learn from: linear models on your rows and those of your partners.

1. The weights of the partners and of your own rows are learned by one of coterie's methods: part of your rows judges
   them, the others are one client among the partners. They are the mean over several random splits.
2. The model minimises the weighted mean of everybody's losses, with all of your rows, to the solver's precision.

Without partners the second step alone is left: logistic regression, or ridge regression, on your own rows.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from math import isfinite
from typing import Any, NamedTuple
from warnings import warn

import numpy as np
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

__all__ = ["FederatedClassifier", "FederatedRegressor"]

MINE = "mine"
NEWTON = 100  # steps at most
NEAR, REACHED = 1e-12, 1e-20  # of the Newton decrement: a full step is safe; the optimum is exact to rounding
FEWEST = 4  # own rows, to learn weights by
DEFAULTS = {"meritfed": {"mirror_step": 1.0, "mirror_steps": 3}}


class _Rows(NamedTuple):
    """The rows of one holder: inputs [n, p], labels [n] (class numbers or values), and how much each row counts."""

    x: np.ndarray
    y: np.ndarray
    counts: np.ndarray

    def of(self, index: np.ndarray) -> "_Rows":
        """Some of them."""
        return _Rows(self.x[index], self.y[index], self.counts[index])


class _Federated(BaseEstimator):
    """What classifier and regressor share. Parameters are those of scikit-learn: set here, checked in `fit`."""

    def __init__(
        self,
        partners: Mapping[str, tuple[Any, Any]] | None = None,
        *,
        method: Any = "meritfed",
        rounds: int = 20,
        l2: float = 0.01,
        validation: float = 0.5,
        splits: int = 5,
        random_state: Any = None,
    ) -> None:
        self.partners = partners
        self.method = method
        self.rounds = rounds
        self.l2 = l2
        self.validation = validation
        self.splits = splits
        self.random_state = random_state

    def _fit(self, own: _Rows, partners: dict[str, _Rows], outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """The coefficients [outputs, p] and intercepts [outputs] in the units of the inputs; and the weights."""
        self._check()
        own = own.of(own.counts > 0.0)
        everybody = [*partners.values(), own]
        x, counts = (np.concatenate(parts) for parts in ([r.x for r in everybody], [r.counts for r in everybody]))
        mean = np.average(x, axis=0, weights=counts)
        scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=counts))
        scale[scale <= 1e-12 * np.abs(mean)] = 1.0
        scale[scale == 0.0] = 1.0
        scaled = [rows._replace(x=(rows.x - mean) / scale) for rows in everybody]
        random = check_random_state(self.random_state)
        learned = [self._weights(scaled, outputs, random) for _ in range(self.splits if partners else 0)]
        weights = np.mean(learned, axis=0) if partners else np.ones(1)
        share = [w * rows.counts / rows.counts.sum() for w, rows in zip(weights, scaled, strict=True)]
        pooled = _Rows(*map(np.concatenate, zip(*scaled, strict=True)))._replace(counts=np.concatenate(share))
        theta, self.n_iter_ = _minimised(pooled, outputs, float(self.l2))
        self.weights_ = dict(zip([*partners, MINE], map(float, weights), strict=True))
        coefficients = theta[:, :-1] / scale
        return coefficients, theta[:, -1] - coefficients @ mean

    def _check(self) -> None:
        """The parameters that are numbers."""
        if not isinstance(self.l2, int | float | np.number) or not 0.0 <= self.l2 < np.inf:
            raise ValueError(f"l2 is {self.l2!r}; it must be a number of at least 0.")
        if not isinstance(self.validation, float | np.floating) or not 0.0 < self.validation < 1.0:
            raise ValueError(f"validation is {self.validation!r}; it must be a share between 0 and 1.")
        for name in ("rounds", "splits"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")

    def _given(self) -> dict[str, tuple[Any, Any]]:
        """The partners' rows as they were given."""
        if self.partners is None:
            return {}
        if not isinstance(self.partners, Mapping):
            raise ValueError(f"partners is a {type(self.partners).__name__}; give a dict of pairs (X, y) by name.")
        if MINE in self.partners:
            raise ValueError(f"a partner is called {MINE!r}, which stands for your own rows; give it another name.")
        odd = [name for name, pair in self.partners.items() if not isinstance(pair, tuple | list) or len(pair) != 2]
        if odd:
            raise ValueError(f"partner {odd[0]!r} is no pair (X, y).")
        return {str(name): (pair[0], pair[1]) for name, pair in self.partners.items()}

    def _partner_rows(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The partners' rows, checked against the columns of your own."""
        checked = {}
        for name, (x, y) in self._given().items():
            try:
                checked[name] = validate_data(self, x, y, reset=False, dtype=np.float64, y_numeric=self._numeric())
            except ValueError as error:
                raise ValueError(f"partner {name!r}: {error}") from None
        return checked

    def _numeric(self) -> bool:
        return isinstance(self, RegressorMixin)

    def _weights(self, everybody: list[_Rows], outputs: int, random: np.random.RandomState) -> np.ndarray:
        """The weights of the partners and of your own rows, which are the last, learned on one split of your rows."""
        import torch

        from coterie.facade import fit
        from coterie.methods.registry import method_entry
        from coterie.problems.weighting import Weighting

        *partners, own = everybody
        if len(own.y) < FEWEST:
            raise ValueError(f"there are {len(own.y)} rows of your own; at least {FEWEST} are needed to learn weights.")
        judging, training = self._split(own, random)
        clients = [*partners, training]
        method = self.method
        if isinstance(method, str):
            factory = method_entry(method).make
            settings = {"step": 1.0 / _curvature(clients, outputs, float(self.l2)), **DEFAULTS.get(method, {})}
            method = factory(**{key: value for key, value in settings.items() if key in signature(factory).parameters})
        model = torch.nn.Linear(own.x.shape[1], outputs)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        problem = Weighting.on(
            list(map(_shard, clients)),
            _shard(judging),
            model=model,
            loss=_loss(outputs),
            l2=float(self.l2),
            dtype="float64",
        )
        seed = int(random.randint(2**31 - 1))
        fitted = fit(problem, method, int(self.rounds), seed=seed, threads=1, mode="vmap")
        weights = fitted.weights
        if weights is None or weights.dim() != 1:
            name = fitted.summary["method"]
            raise ValueError(f"{name} learns no weights for one target; take a method that does, such as 'meritfed'.")
        if not isfinite(float(weights.sum())):
            raise ValueError(f"{fitted.summary['method']} diverged; take a smaller step, or more rows.")
        return weights.double().numpy()

    def _split(self, own: _Rows, random: np.random.RandomState) -> tuple[_Rows, _Rows]:
        """Your rows that judge the weights, and those that train with the partners; class by class where possible."""
        numbers = np.arange(len(own.y))
        judged = round(float(self.validation) * len(numbers))
        judged = min(max(judged, 1), len(numbers) - 1)
        classes, sizes = np.unique(own.y, return_counts=True)
        by_class = not self._numeric() and sizes.min() > 1 and len(classes) <= min(judged, len(numbers) - judged)
        training, judging = train_test_split(
            numbers, test_size=judged, random_state=random, stratify=own.y if by_class else None
        )
        return own.of(judging), own.of(training)


class FederatedClassifier(ClassifierMixin, _Federated):
    """Logistic regression on your rows and your partners', weighted by how much each helps to predict yours.

    The inputs are standardised over everybody's rows; `coef_` and `intercept_` are in the units of the inputs.

    Args:
        partners: by name, a pair (X, y) each, with the columns of your own rows. None trains on your rows alone.
        method: what learns the weights: a name of `coterie list methods`, with a step by the curvature, or a method
            such as `coterie.methods.meritfed(step=0.1)`.
        rounds: of the method, for each split; more rounds fit the weights closer to the rows that judge them.
        l2: strength of the penalty ½ l2 ‖coefficients of standardised inputs‖², which leaves the intercept out.
        validation: share of your rows that judges the weights; the final model is trained on all of them.
        splits: random splits of your rows; the weights are the mean over them.
        random_state: fixes the splits of your rows and the draws of the method.

    Attributes are `weights_` (by partner; your own rows are "mine"), `classes_`, `coef_`, `intercept_`, `n_iter_`,
    `n_features_in_` and, if columns have names, `feature_names_in_`.

    Example:
        >>> import numpy as np
        >>> from coterie.sklearn import FederatedClassifier
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 3))
        >>> y = (X.sum(1) > 0).astype(int)
        >>> partners = {"friend": (X[40:120], y[40:120]), "stranger": (X[120:], 1 - y[120:])}
        >>> model = FederatedClassifier(partners, random_state=0).fit(X[:40], y[:40])
        >>> model.weights_["friend"] > 0.3 > 0.05 > model.weights_["stranger"]
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "FederatedClassifier":
        """Learn the weights, and train.

        Args:
            X: your rows, [n, columns].
            y: their classes, [n].
            sample_weight: how much each of your rows counts, [n].
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        counts = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        present = np.unique(y[counts > 0.0])
        if len(present) < 2:
            raise ValueError(f"{type(self).__name__} needs rows of at least two classes; yours have one class only.")
        partners = self._partner_rows()
        for name, (_, labels) in partners.items():
            check_classification_targets(labels)
            if (labels.dtype.kind in "OUST") != (y.dtype.kind in "OUST"):
                raise ValueError(f"partner {name!r} has labels of type {labels.dtype}, your rows {y.dtype}.")
        self.classes_ = np.unique(np.concatenate([y, *(labels for _, labels in partners.values())]))
        own = _Rows(X, np.searchsorted(self.classes_, y), counts)
        theirs = {
            name: _Rows(x, np.searchsorted(self.classes_, k), np.ones(len(k))) for name, (x, k) in partners.items()
        }
        coefficients, intercepts = self._fit(own, theirs, len(self.classes_))
        if len(self.classes_) == 2:
            coefficients, intercepts = np.diff(coefficients, axis=0), np.diff(intercepts)
        self.coef_, self.intercept_ = coefficients, intercepts
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """The logits: [n] of the second of two classes against the first, else [n, classes].

        Args:
            X: rows, [n, columns].
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        found = X @ self.coef_.T + self.intercept_
        return found[:, 0] if len(self.classes_) == 2 else found

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the classes, [n, classes].

        Args:
            X: rows, [n, columns].
        """
        found = self.decision_function(X)
        return softmax(np.stack([np.zeros(len(found)), found], axis=1) if found.ndim == 1 else found, axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable classes, [n].

        Args:
            X: rows, [n, columns].
        """
        found = self.decision_function(X)
        return self.classes_[(found > 0.0).astype(int) if found.ndim == 1 else found.argmax(axis=1)]


class FederatedRegressor(RegressorMixin, _Federated):
    """Ridge regression on your rows and your partners', weighted by how much each helps to predict yours.

    Inputs and labels are standardised over everybody's rows; `coef_` and `intercept_` are in their own units.

    Args:
        partners: by name, a pair (X, y) each, with the columns of your own rows. None trains on your rows alone.
        method: what learns the weights: a name of `coterie list methods`, with a step by the curvature, or a method
            such as `coterie.methods.meritfed(step=0.1)`.
        rounds: of the method, for each split; more rounds fit the weights closer to the rows that judge them.
        l2: strength of the penalty ½ l2 ‖coefficients of standardised inputs‖², which leaves the intercept out.
        validation: share of your rows that judges the weights; the final model is trained on all of them.
        splits: random splits of your rows; the weights are the mean over them.
        random_state: fixes the splits of your rows and the draws of the method.

    Attributes are `weights_` (by partner; your own rows are "mine"), `coef_`, `intercept_`, `n_iter_`,
    `n_features_in_` and, if columns have names, `feature_names_in_`.

    Example:
        >>> import numpy as np
        >>> from coterie.sklearn import FederatedRegressor
        >>> X = np.random.default_rng(0).normal(size=(150, 3))
        >>> y = X @ [1.0, 2.0, 3.0] + 5.0
        >>> model = FederatedRegressor({"friend": (X[40:], y[40:])}, l2=0.0, random_state=0).fit(X[:40], y[:40])
        >>> model.coef_.round(3).tolist()
        [1.0, 2.0, 3.0]
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "FederatedRegressor":
        """Learn the weights, and train.

        Args:
            X: your rows, [n, columns].
            y: the numbers to predict, [n].
            sample_weight: how much each of your rows counts, [n].
        """
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        counts = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        own = _Rows(X, y.astype(np.float64), counts)
        theirs = {n: _Rows(x, v.astype(np.float64), np.ones(len(v))) for n, (x, v) in self._partner_rows().items()}
        everybody = [own, *theirs.values()]
        values, rows = (np.concatenate(parts) for parts in ([r.y for r in everybody], [r.counts for r in everybody]))
        mean = np.average(values, weights=rows)
        deviation = np.sqrt(np.average((values - mean) ** 2, weights=rows)) or 1.0
        own, theirs = _standard(own, mean, deviation), {n: _standard(r, mean, deviation) for n, r in theirs.items()}
        coefficients, intercepts = self._fit(own, theirs, 1)
        self.coef_, self.intercept_ = coefficients[0] * deviation, float(intercepts[0] * deviation + mean)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The predicted numbers, [n].

        Args:
            X: rows, [n, columns].
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return X @ self.coef_ + self.intercept_


def _standard(rows: _Rows, mean: float, deviation: float) -> _Rows:
    return rows._replace(y=(rows.y - mean) / deviation)


def _shard(rows: _Rows) -> tuple[Any, Any]:
    """A holder's rows for coterie: labels beside how much they count."""
    import torch

    counts = rows.counts / max(rows.counts.mean(), np.finfo(float).tiny)
    return torch.from_numpy(rows.x), torch.from_numpy(np.stack([rows.y.astype(np.float64), counts], axis=1))


def _loss(outputs: int) -> Callable[[Any, Any], Any]:
    """The loss by row for labels that stand beside how much they count."""
    from torch.nn.functional import cross_entropy

    if outputs == 1:
        return lambda found, labels: 0.5 * labels[:, 1] * (found[:, 0] - labels[:, 0]).square()
    return lambda found, labels: labels[:, 1] * cross_entropy(found, labels[:, 0].long(), reduction="none")


def _curvature(clients: list[_Rows], outputs: int, l2: float) -> float:
    """A bound of the largest second derivative of any client's loss, whose inverse is a step that cannot diverge."""
    largest = 0.0
    for rows in clients:
        wide = np.hstack([rows.x, np.ones((len(rows.x), 1))]) * np.sqrt(rows.counts / rows.counts.sum())[:, None]
        largest = max(largest, float(np.linalg.norm(wide, 2) ** 2))
    return (largest if outputs == 1 else 0.5 * largest) + l2


def _minimised(rows: _Rows, outputs: int, l2: float) -> tuple[np.ndarray, int]:
    """The minimiser [outputs, p + 1] of Σ counts · loss + ½ l2 ‖coefficients‖², and the number of Newton steps."""
    x = np.hstack([rows.x, np.ones((len(rows.x), 1))])
    shape, c = (outputs, x.shape[1]), rows.counts[:, None]
    penalty = np.full(shape, l2)
    penalty[:, -1] = 0.0
    shift = float(outputs > 1)  # a common shift of all intercepts changes nothing: it is held at 0
    targets = rows.y[:, None] if outputs == 1 else np.eye(outputs)[rows.y]

    def value(theta: np.ndarray) -> float:
        z = x @ theta.T
        by_row = 0.5 * (z - targets) ** 2 if outputs == 1 else -log_softmax(z, axis=1) * targets
        return float((c * by_row).sum() + 0.5 * (penalty * theta**2).sum())

    theta = np.zeros(shape)
    for step in range(1, NEWTON + 1):
        z = x @ theta.T
        p = z if outputs == 1 else softmax(z, axis=1)
        gradient = (c * (p - targets)).T @ x + penalty * theta

        def product(v: np.ndarray, p: np.ndarray = p) -> np.ndarray:
            v = v.reshape(shape)
            u = x @ v.T
            u = u if outputs == 1 else p * (u - (p * u).sum(axis=1, keepdims=True))
            curved = (c * u).T @ x + penalty * v
            curved[:, -1] += shift * v[:, -1].mean()
            return curved.ravel()

        size = gradient.size
        operator = LinearOperator((size, size), matvec=product)
        found, _ = cg(operator, -gradient.ravel(), rtol=1e-10, maxiter=2 * size + 20)
        direction = found.reshape(shape)
        decrement = -float((gradient * direction).sum())
        if not decrement > 0.0:
            return theta, step
        now, length = value(theta), 1.0
        while decrement > NEAR and value(theta + length * direction) > now - 1e-4 * length * decrement:
            length *= 0.5
            if length < 1e-12:
                break
        theta = theta + length * direction
        if decrement <= REACHED:
            return theta, step
    warn(f"{NEWTON} Newton steps did not reach the optimum; raise l2.", ConvergenceWarning, stacklevel=4)
    return theta, NEWTON
