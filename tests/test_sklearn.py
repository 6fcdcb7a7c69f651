"""coterie's scikit-learn estimators: scikit-learn's own checks, the optimum, and weights that find friends."""

from doctest import DocTestFinder, DocTestRunner
from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import coterie
from coterie.sklearn import FederatedClassifier, FederatedRegressor


@parametrize_with_checks([FederatedClassifier(), FederatedRegressor()])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def rows(n: int, seed: int, *, flipped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5)) * [1.0, 10.0, 0.1, 1.0, 1.0] + [0.0, 50.0, 0.0, 0.0, 3.0]
    logits = x @ [1.0, 0.1, 5.0, 0.0, 0.0] - 5.0
    return x, (rng.random(n) < 1 / (1 + np.exp(2 * logits))) ^ (not flipped)


@pytest.fixture(scope="module")
def partners() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    made = {"north": rows(120, 1), "east": rows(120, 2), "west": rows(120, 3, flipped=True)}
    rng = np.random.default_rng(4)
    x, y = rows(120, 5)
    return {**made, "noise": (x, rng.permutation(y))}


def test_alone_it_is_scikit_learns_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = rows(80, 0)
    n, l2 = len(y), 0.02
    # two outputs whose difference is the logit: their penalty is half of one output's
    theirs = make_pipeline(StandardScaler(), LogisticRegression(C=2.0 / (n * l2), tol=1e-10, max_iter=10_000)).fit(x, y)
    ours = FederatedClassifier(l2=l2).fit(x, y)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-6)
    assert ours.weights_ == {"mine": 1.0}


def test_alone_it_is_scikit_learns_ridge() -> None:
    from sklearn.linear_model import Ridge

    x = np.random.default_rng(0).normal(size=(60, 4))
    y = 3.0 * (x @ [1.0, -2.0, 0.5, 0.0]) + 7.0
    scaled = (x - x.mean(0)) / x.std(0)
    theirs = Ridge(alpha=60 * 0.1).fit(scaled, y)
    ours = FederatedRegressor(l2=0.1).fit(x, y)
    np.testing.assert_allclose(ours.predict(x), theirs.predict(scaled), rtol=1e-9)


def test_weights_go_to_friends_and_the_model_gains(partners: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    own, test = rows(30, 0), rows(2000, 99)
    together = FederatedClassifier(partners, splits=2, random_state=0).fit(*own)
    assert list(together.weights_) == [*partners, "mine"]
    assert sum(together.weights_.values()) == pytest.approx(1.0)
    assert together.weights_["north"] + together.weights_["east"] > 0.3
    assert together.weights_["west"] + together.weights_["noise"] < 0.1
    assert together.score(*test) > FederatedClassifier().fit(*own).score(*test) + 0.01
    again = FederatedClassifier(partners, splits=2, random_state=0).fit(*own)
    assert np.array_equal(again.coef_, together.coef_)


def test_the_model_is_the_optimum_of_the_weighted_losses(partners: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Closed form: weighted least squares of everybody's rows."""
    own = rows(40, 0)
    as_numbers = {name: (x, x[:, 1] + y) for name, (x, y) in partners.items()}
    model = FederatedRegressor(as_numbers, l2=0.0, rounds=10, splits=1, random_state=1).fit(
        own[0], own[0][:, 1] + own[1]
    )
    everybody = [*as_numbers.values(), (own[0], own[0][:, 1] + own[1])]
    weighed = zip(model.weights_.values(), everybody, strict=True)
    share = np.concatenate([np.full(len(y), w / len(y)) for w, (_, y) in weighed])
    x = np.concatenate([np.hstack([x, np.ones((len(x), 1))]) for x, _ in everybody])
    y = np.concatenate([y for _, y in everybody])
    exact = np.linalg.lstsq(x * np.sqrt(share)[:, None], y * np.sqrt(share), rcond=None)[0]
    np.testing.assert_allclose([*model.coef_, model.intercept_], exact, rtol=1e-7, atol=1e-9)


def test_weights_of_rows_are_repeated_rows(partners: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    x, y = rows(40, 0)
    counts = np.ones(40)
    counts[:5] = 0.0
    method = coterie.methods.meritfed(step=0.2, mirror_step=1.0)
    model = FederatedClassifier(partners, method=method, rounds=5, splits=1, random_state=0)
    ignored = model.fit(x, y, sample_weight=counts).predict_proba(x)
    y[:5] = ~y[:5]
    np.testing.assert_allclose(model.fit(x, y, sample_weight=counts).predict_proba(x), ignored)


def test_it_works_inside_scikit_learn(partners: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV

    x, y = rows(40, 0)
    search = GridSearchCV(FederatedClassifier(partners, rounds=3, splits=1), {"l2": [0.01, 1.0]}, cv=2).fit(x, y)
    assert search.best_estimator_.weights_.keys() == {*partners, "mine"}
    assert clone(search.best_estimator_).get_params()["l2"] == search.best_params_["l2"]


def test_more_than_two_classes_and_classes_of_partners() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3))
    y = np.array(["a", "b", "c"])[x.argmax(1)]
    two = y[:30] != "c"
    model = FederatedClassifier({"p": (x[30:], y[30:])}, rounds=5, splits=1, random_state=0).fit(
        x[:30][two], y[:30][two]
    )
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert model.decision_function(x).shape == model.predict_proba(x).shape == (90, 3)
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1.0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"partners": [(1, 2)]}, "partners is a list; give a dict of pairs"),
        ({"partners": {"mine": (1, 2)}}, "stands for your own rows"),
        ({"partners": {"p": 3}}, r"partner 'p' is no pair \(X, y\)"),
        ({"partners": {"p": (np.zeros((3, 2)), [0, 1, 0])}}, "partner 'p': X has 2 features, but FederatedClassifier"),
        (
            {"partners": {"p": (np.zeros((3, 5)), ["a", "b", "a"])}},
            "partner 'p' has labels of type <U1, your rows bool",
        ),
        ({"l2": -1.0}, "l2 is -1.0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"splits": 2.5}, "splits is 2.5"),
        ({"validation": 1.0}, "validation is 1.0"),
        ({"partners": {"p": rows(30, 1)}, "method": "fedavg", "rounds": 1}, "fedavg learns no weights"),
    ],
)
def test_wrong_parameters_are_explained(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FederatedClassifier(**settings).fit(*rows(30, 0))


def test_names_of_columns_must_agree() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    x, y = rows(30, 0)
    own = pandas.DataFrame(x, columns=list("abcde"))
    model = FederatedClassifier({"p": (own.rename(columns={"e": "z"}), y)})
    with pytest.raises(ValueError, match="partner 'p': The feature names should match"):
        model.fit(own, y)
    assert FederatedClassifier().fit(own, y).feature_names_in_.tolist() == list("abcde")


@pytest.mark.parametrize("documented", [FederatedClassifier, FederatedRegressor], ids=lambda kind: kind.__name__)
def test_examples_of_docstrings_run(documented: Any) -> None:
    (found,) = DocTestFinder(recurse=False).find(documented, documented.__name__)
    assert found.examples
    assert DocTestRunner().run(found).failed == 0
