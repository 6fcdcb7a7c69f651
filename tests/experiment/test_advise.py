"""The parts of `advise`: splits, models trained to the end, agreement, verdicts, strategies, contributions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression, Ridge

from coterie.advise import agreement, strategies
from coterie.advise.advise import Effort, _bound_terms, _rows_needed, advise, worth_it
from coterie.advise.agreement import Agreement, Slope, compared, placebo_test
from coterie.advise.contributions import contributions, most_trainings
from coterie.advise.mixtures import Arms, Mixtures
from coterie.advise.sentences import headline
from coterie.advise.splits import Splits
from coterie.advise.verdicts import Interval, Paired, judged, paired
from coterie.experiment.config import resolve
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.files import PreparedFiles, load_files
from coterie.problems.files.example import write_example

Example = tuple[PreparedFiles, set[str]]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    folder: Path = tmp_path_factory.mktemp("example")
    done = write_example(folder, seed=1, friends=2, strangers=2, own=60)
    where = {"clients": f"{folder}/sites/*.csv", "target": f"{folder}/mine.csv", "label": done.label}
    return load_files(Context(0, torch.float64), **where, orders=2), set(done.friends)


def write(path: Path, x: np.ndarray, y: Any) -> None:
    lines = [",".join(map(repr, [*row, value])).replace("'", "") for row, value in zip(x.tolist(), y, strict=True)]
    path.write_text("\n".join([",".join([*"abcdefgh"[: x.shape[1]], "y"]), *lines]))


def federation(
    folder: Path, rows: int, kinds: dict[str, int], *, number: bool = False, own: int = 120
) -> PreparedFiles:
    """A target of the logistic (or linear) model, and partners of known kinds."""
    random = np.random.default_rng(5)
    theta = np.array([2.0, -1.5, 1.0, 0.0])

    def sample(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = random.normal(size=(n, 4)).round(5)
        if number:
            return x, (x @ theta + random.normal(size=n)).round(5)
        return x, (x @ theta + random.logistic(size=n) > 0).astype(int)

    x, y = sample(own)
    write(folder / "mine.csv", x, y.tolist() if number else [f"c{v}" for v in y])
    for i, (kind, seed) in enumerate(kinds.items()):
        x, y = sample(rows)
        if kind == "flipped":
            y = 2 * y.mean() - y if number else 1 - y
        elif kind == "shuffled":
            y = random.permutation(y)
        elif kind == "noisy":
            wrong = random.random(rows) < 0.3
            y = y + 2.0 * y.std() * random.normal(size=rows) if number else np.where(wrong, 1 - y, y)
        elif kind == "one":
            y = np.ones(rows, int)
        write(folder / f"site{i}-{kind}-{seed}.csv", x, y.round(5).tolist() if number else [f"c{v}" for v in y])
    dtype = torch.float64
    return load_files(
        Context(0, dtype), clients=f"{folder}/site*.csv", target=f"{folder}/mine.csv", label="y", orders=2
    )


def mixtures(data: PreparedFiles, folds: int = 5) -> tuple[Mixtures, Splits]:
    splits = Splits.of(data.orders, data.target_rows, folds, data.context.dtype)
    return Mixtures(data, splits.masks, Draw.of(0)), splits


def test_models_see_the_rows_that_their_mask_says(example: Example) -> None:
    data, _ = example
    splits = Splits.of(data.orders, 60, 5, torch.float64)
    assert splits.masks.shape == (2 * 15 + 1, 60)
    for r in range(2):
        assert torch.bincount(splits.folds[r]).tolist() == [12] * 5
        for f in range(5):
            assert torch.equal(splits.masks[splits.without(r, f)] == 0, splits.folds[r] == f)
            for g in range(5):
                unseen = (splits.folds[r] == f) | (splits.folds[r] == g)
                assert torch.equal(splits.masks[splits.without(r, f, g)] == 0, unseen)
    assert splits.masks[splits.whole].all()
    assert not torch.equal(splits.folds[0], splits.folds[1])
    part = Splits.of(data.orders, 30, 5, torch.float64)
    assert torch.equal(part.folds, splits.folds[:, :30]), "fewer rows keep their folds"


def test_models_are_those_of_scikit_learn(example: Example) -> None:
    """Own rows of a mask and one partner's, every row counting the same: the pooled logistic regression."""
    data, _ = example
    mix, splits = mixtures(data)
    mask, l2 = splits.without(1, 2), 0.03
    n, m = int(splits.masks[mask].sum()), int(mix.sizes[1])
    weights = torch.zeros(1, 5, dtype=torch.float64)
    weights[0, 1], weights[0, -1] = m / (n + m), n / (n + m)
    arms = Arms(weights, torch.tensor([mask]), torch.tensor([l2], dtype=torch.float64))
    found = mix.predictions(mix.train(arms, exactly=True))[0, :, 1]
    own = mix.own
    partner = data.stack.client(1).all()
    keep = splits.masks[mask].bool()
    x = torch.cat([own.inputs[keep], partner.inputs[: int(mix.sizes[1])]]).numpy()
    y = torch.cat([own.labels[keep], partner.labels[: int(mix.sizes[1])]]).numpy()
    # softmax with both classes penalised is the logistic with twice the strength
    wanted = LogisticRegression(C=2.0 / (l2 * (n + m)), tol=1e-8, max_iter=2000).fit(x, y)
    np.testing.assert_allclose(found.numpy(), wanted.predict_proba(own.inputs.numpy())[:, 1], atol=2e-3)
    pairs = torch.zeros(4, 5, dtype=torch.float64)
    pairs[torch.arange(4), torch.arange(4)], pairs[:, -1] = weights[0, 1], weights[0, -1]
    every = mix.train_pairs(Arms(pairs, torch.full((4,), mask), torch.full((4,), l2, dtype=torch.float64)))
    np.testing.assert_allclose(mix.predictions(every[1:2])[0, :, 1].numpy(), found.numpy(), atol=5e-3)


def test_numbers_are_ridge_regression(tmp_path: Path) -> None:
    data = federation(tmp_path, 50, {"friend": 0}, number=True)
    mix, splits = mixtures(data)
    weights = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    arms = Arms(weights, torch.tensor([splits.whole]), torch.tensor([0.1], dtype=torch.float64))
    found = mix.predictions(mix.train(arms, exactly=True))[0, :, 0].numpy()
    x, y = mix.own.inputs.numpy(), mix.own.labels.numpy()
    np.testing.assert_allclose(found, Ridge(alpha=0.1 * len(x)).fit(x, y).predict(x), atol=1e-3)


@pytest.mark.parametrize("number", [False, True])
def test_agreement_tells_friends_from_others(tmp_path: Path, number: bool) -> None:
    kinds = {"friend": 0, "other-friend": 0, "noisy": 0, "shuffled": 0, "flipped": 0}
    data = federation(tmp_path, 400, kinds, number=number)
    mix, splits = mixtures(data)
    found = strategies.trial(mix, splits, 0.01, lambda r, f: None, 99, Draw.of(1))
    by = dict(zip(data.partners, found.agreement.value, strict=True))
    friend, other, noisy, shuffled, flipped = (value for _, value in sorted(by.items()))
    assert friend == pytest.approx(1.0, abs=0.2)
    assert other == pytest.approx(1.0, abs=0.2)
    assert noisy < 0.65
    assert shuffled == pytest.approx(0.0, abs=0.25)
    assert flipped == pytest.approx(-1.0, abs=0.3)
    assert found.agreement.agrees.tolist() == [True, True, False, False, False]
    assert found.final.name in ("helpers", "wider")
    assert (found.final.weights[:2] > 0).all()
    assert not found.final.weights[3:-1].any()
    predicted, losses = strategies.with_each(mix, splits, found.alone_l2)
    gains = [paired(found.row_losses["alone"] - losses[k], 5) for k in range(5)]
    partners = judged([(n, 400) for n in data.partners], found.agreement, gains, gains, found.losses["alone"])
    assert [p.verdict for p in partners[:2]] == ["helps", "helps"]
    assert partners[2].verdict in ("may help", "harms")
    assert partners[3].verdict in ("no use", "harms")
    assert partners[4].verdict == "harms"
    assert predicted.shape[:3] == (5, 2, 120)
    assert min(p.probability for p in partners[:2]) > 0.5 > max(p.probability for p in partners[3:])


def test_with_useless_partners_the_model_is_that_of_training_alone(tmp_path: Path) -> None:
    data = federation(tmp_path, 80, {"shuffled": 0, "flipped": 0, "shuffled2": 1})
    for path in tmp_path.glob("site*-shuffled2*"):
        path.unlink()
    data = load_files(
        Context(0, torch.float64), clients=f"{tmp_path}/site*.csv", target=f"{tmp_path}/mine.csv", label="y", orders=2
    )
    mix, splits = mixtures(data)
    found = strategies.trial(mix, splits, 0.01, lambda r, f: torch.tensor([0.5, 0.2, 0.3]), 99, Draw.of(1))
    assert found.final.name == "alone"
    assert found.final.weights.tolist() == [0.0, 0.0, 1.0]
    gain = paired(found.row_losses["alone"] - found.row_losses["delivered"], 5)
    assert gain == Paired(Interval(0.0, 0.0, 0.0), 0.0, 0.0, 0.5)
    assert worth_it("alone", gain) == "no"


def test_the_choice_for_a_fold_does_not_see_it(tmp_path: Path) -> None:
    """Other labels in the fold change what is lost there, and neither choice nor model."""
    data = federation(tmp_path, 60, {"friend": 0, "shuffled": 0}, own=60)

    def without_first_fold(change: bool) -> tuple[float, np.ndarray]:
        mix, splits = mixtures(data)
        fold = splits.folds[0] == 0
        if change:
            labels = mix.own.labels.clone()
            labels[fold] = 1 - labels[fold]
            mix.own = mix.own._replace(columns=(mix.own.inputs, labels))
        one = splits._replace(folds=splits.folds[:1], masks=torch.cat([splits.masks[:15], splits.masks[-1:]]))
        mix.masks = one.masks
        found = strategies.trial(mix, one, 0.01, lambda r, f: None, 99, Draw.of(1))
        return found.losses["delivered"], found.predictions["delivered"][0][fold.numpy()]

    (loss, predicted), (other_loss, other_predicted) = without_first_fold(False), without_first_fold(True)
    np.testing.assert_allclose(
        predicted, other_predicted, atol=1e-3
    )  # the end of a search depends a little on its start
    assert abs(loss - other_loss) > 0.05


def test_a_partner_of_one_label_cannot_be_judged(tmp_path: Path) -> None:
    data = federation(tmp_path, 60, {"friend": 0, "one": 0})
    mix, splits = mixtures(data)
    found = strategies.trial(mix, splits, 0.01, lambda r, f: None, 99, Draw.of(1)).agreement
    assert found.one_class.tolist() == [False, True]
    assert found.p[1] == 1.0
    nothing = paired(np.zeros((2, 9)) + np.linspace(-1, 1, 9), 5)
    friend, single = judged([("a", 9), ("b", 9)], found, [nothing] * 2, [nothing] * 2, 1.0)
    assert friend.verdict == "helps"
    assert single.verdict == "cannot tell"
    assert "one label" in single.reason


def test_slopes_and_their_ratio_by_hand() -> None:
    p = torch.tensor([[[0.0], [1.0], [2.0], [3.0]]], dtype=torch.float64)
    y = torch.tensor([[1.0], [2.0], [5.0], [4.0]], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    sums = agreement.sums(agreement.centred(p, ones), agreement.centred(y, ones), ones)
    slope = agreement.slopes(sums.numpy())
    fit = stats.linregress([0, 1, 2, 3], [1, 2, 5, 4])
    assert slope.value == pytest.approx(fit.slope)
    own = Slope(np.float64(1.0), np.float64(0.1), np.float64(1.0))
    theirs = Slope(np.array([1.0, 0.4, -1.0]), np.full(3, 0.1), np.array([1.0, 1.0, 2.0]))
    shared = compared(own, theirs, None, number=False)
    assert shared.value == pytest.approx([1.0, 0.4, -1.0])
    assert shared.error[0] == pytest.approx(np.hypot(0.1, 0.1 / np.sqrt(2)))
    assert compared(own, theirs, None, number=True).value == pytest.approx([1.0, 0.4, -0.5])


def test_worthless_labels_are_called_useful_as_rarely_as_is_promised() -> None:
    """A placebo more, drawn like the others: the test rejects at its level, in the far tail too."""
    random = np.random.default_rng(0)
    draws = random.normal(size=(4000, 21))
    p = np.array([placebo_test(row[0], row[1:]) for row in draws])
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert (p < 0.0025).mean() < 0.006
    assert placebo_test(1.0, np.full(20, 0.3)) == 1.0  # one class only: shuffling changes nothing


def test_the_paired_test_is_students_with_a_wider_error() -> None:
    d = np.random.default_rng(0).normal(0.2, 1.0, 50)
    found, plain = paired(d[None], folds=5), stats.ttest_1samp(d, 0.0)
    assert found.t == pytest.approx(plain.statistic / np.sqrt(1 + 2 / 4))
    assert found.interval.value == pytest.approx(d.mean())
    assert paired(np.stack([d, d + 0.5]), 5).error > found.error, "orders that differ widen the interval"
    assert paired(d[None], 5, less=0.1).interval.value == pytest.approx(d.mean() - 0.1)
    assert paired(np.zeros((1, 9)), 5).probability == 0.5


def agreed(value: float, error: float = 0.05, p: float = 1e-6) -> Agreement:
    return Agreement(np.array([value]), np.array([error]), np.array([p]), np.array([False]))


@pytest.mark.parametrize(
    ("found", "gain", "verdict"),
    [
        (agreed(1.0), 0.02, "helps"),
        (agreed(1.0), 0.0005, "helps"),
        (agreed(0.5), 0.02, "may help"),
        (agreed(0.85), 0.02, "may help"),
        (agreed(0.85, 0.1), 0.02, "helps"),
        (agreed(0.1, p=0.4), 0.0005, "no use"),
        (agreed(0.3, 0.4, p=0.4), 0.0005, "cannot tell"),
        (agreed(-0.9, p=1.0), 0.0, "harms"),
        (agreed(0.1, p=0.4), -0.2, "harms"),
    ],
)
def test_verdicts(found: Agreement, gain: float, verdict: str) -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.1, 200)
    loss = paired((noise - noise.mean() + gain)[None], 5)
    (partner,) = judged([("a", 9)], found, [loss], [loss], 0.3)
    assert partner.verdict == verdict, partner.reason
    assert partner.agreement.low < partner.agreement.value < partner.agreement.high


def test_what_changes_nothing_is_of_no_use() -> None:
    loss = paired(1e-5 * np.random.default_rng(0).normal(size=(1, 200)), 5)
    (partner,) = judged([("a", 9)], agreed(1.0), [loss], [loss], 0.3)
    assert partner.verdict == "no use"
    assert "your own rows are enough" in partner.reason


def test_worth_and_the_rows_it_would_take() -> None:
    def gained(probability: float, t: float, high: float = 1.0) -> Paired:
        return Paired(Interval(t, -1.0, high), 1.0, t, probability)

    found = [worth_it("helpers", gained(p, 1.0)) for p in (0.99, 0.9, 0.6)]
    assert found == ["yes", "probably", "not shown"]
    assert worth_it("helpers", gained(0.01, -2.0, -0.1)) == "no"
    assert _rows_needed(gained(0.8, 1.0), 100) == int(np.ceil(100 * (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) ** 2))
    assert _rows_needed(gained(0.3, -1.0), 100) is None


def said(worth: str, strategy: str, partners: dict[str, str], delivered: list[str]) -> str:
    measure = {"name": "auc", "label": "AUC", "better": "higher", "scale": "number", "rows": "", "unit": ""}
    return headline(
        {
            "measure": measure,
            "worth_it": worth,
            "partners": [{"name": name, "verdict": verdict} for name, verdict in partners.items()],
            "strategies": {"alone": {"values": {"auc": 0.79}}},
            "delivered": {
                "strategy": strategy,
                "partners": delivered,
                "values": {"auc": 0.83},
                "gain": {"value": 0.04, "low": 0.01, "high": 0.07},
                "probability": 0.963,
            },
            "certainty": {"rows_needed": 700},
        }
    )


def test_the_answer_comes_first_with_its_number_and_interval() -> None:
    both = {"north": "helps", "east": "helps", "west": "harms"}
    text = said("yes", "helpers", both, ["north", "east"])
    assert text == (
        "Train with north and east: AUC 0.830 against 0.790 alone (gain +0.040, 95 % interval +0.010 to +0.070); 96 % "
        "sure that it is better. west harms."
    )
    assert said("probably", "learned", both, ["north"]).startswith("Probably train with north by learned weights: AUC")
    assert "About 700 rows" in said("not shown", "all", both, [*both])
    assert said("not shown", "all", both, [*both]).startswith("Undecided. Training with all 3 partners: ")
    alone = said("no", "alone", {"north": "no use", "west": "no use"}, [])
    assert alone == "Stay alone (AUC 0.790): no combination of partners did better."


def test_bound_terms_are_theorem_1(example: Example) -> None:
    data, _ = example
    first, second, *_ = _bound_terms(data)
    d, tail = data.model.size, np.log(20)
    assert first["validation_term"] == pytest.approx(np.sqrt((d + tail) / 60))
    assert second["validation_term"] == pytest.approx(first["validation_term"] / np.sqrt(2))
    rows = min(holder.rows for holder in data.holders[:-1])
    assert first["training_term"] == pytest.approx(((d + 4 + tail) * 4 / rows) ** 0.25)


def test_shapley_values_share_out_the_whole_gain(example: Example) -> None:
    """Efficiency holds for every order, cut short or not at tolerance 0; friends come before strangers."""
    data, friends = example
    found = contributions(data, "shapley", Draw.of(0), orders=3, tolerance=0.0, l2=0.03)
    assert sum(found.values) == pytest.approx(found.whole - found.empty, abs=1e-6)
    assert found.trainings <= most_trainings("shapley", 4, 3) == 14
    order = sorted(range(4), key=lambda k: -found.values[k])
    assert {data.partners[k] for k in order[:2]} == friends


def test_leaving_one_out(example: Example) -> None:
    data, friends = example
    said: list[str] = []
    found = contributions(data, "loo", Draw.of(0), l2=0.03, say=said.append)
    assert found.trainings == most_trainings("loo", 4) == 6
    assert "at most 6 trainings" in said[0]
    best = max(range(4), key=lambda k: found.values[k])
    assert data.partners[best] in friends
    assert found.as_dict([0.4, 0.3, 0.2, 0.1])["agreement_with_weights"] is not None


def test_an_advice_uses_one_thread_and_gives_the_others_back(tmp_path: Path) -> None:
    """Its operations are small; several threads would mostly wait for each other, and change the last bits."""
    done = write_example(tmp_path / "example", seed=1, friends=1, strangers=1, own=30)
    where = {"clients": f"{tmp_path}/example/sites/*.csv", "target": f"{tmp_path}/example/mine.csv"}
    tables = {"run": {"problem": "files", "rounds": 2}, "problem": {**where, "label": done.label}}
    seen = set()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        advise(resolve(tables), None, Effort(1, 99, 0), say=lambda text: seen.add(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
