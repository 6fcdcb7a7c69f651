"""The statistics of `advise`: tests with known answers, placebos, Holm's procedure, contributions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from coterie.advise.advise import _bound_terms, _headline, _rows_needed, _worth
from coterie.advise.contributions import contributions, most_trainings
from coterie.advise.screening import (
    Interval,
    Paired,
    Partner,
    Screened,
    ScreeningPlan,
    Verdict,
    holm,
    judged,
    paired,
    placebo_test,
    screen,
)
from coterie.federation.ledger import Ledger
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.files import PreparedFiles, load_files
from coterie.problems.files.example import write_example

QUICK = ScreeningPlan(folds=3, placebos=8, steps=25, step=0.1)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedFiles, set[str]]:
    folder: Path = tmp_path_factory.mktemp("example")
    done = write_example(folder, seed=1, friends=2, strangers=2, own=60)
    data = load_files(Context(0), clients=f"{folder}/sites/*.csv", target=f"{folder}/mine.csv", label=done.label)
    return data, set(done.friends)


def test_friends_help_and_shuffled_labels_do_not(example: tuple[PreparedFiles, set[str]]) -> None:
    data, friends = example
    screened = screen(data, QUICK, Draw.of(0))
    assert {p.name for p in screened.partners if p.verdict == "helps"} == friends
    assert all(p.gain.low <= p.gain.value <= p.gain.high for p in screened.partners)
    moved = screened.ledger.by_cause["advise/arm-gradients"]
    models = 4 * QUICK.folds * (1 + QUICK.placebos)
    assert moved.rounds == QUICK.steps
    assert moved.floats_up == moved.floats_down == QUICK.steps * models * data.model.size


def test_a_number_to_predict_and_a_partner_of_one_class(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def table(name: str, rows: int, answer: str) -> None:
        x = random.normal(size=(rows, 3)).round(4)
        y = x @ [3.0, -2.0, 1.0] + 0.5 * random.normal(size=rows)
        y = {"true": y, "shuffled": random.permutation(y), "sign": y > 0, "one": np.ones(rows, bool)}[answer]
        lines = [",".join(map(repr, [*row, float(value)])) for row, value in zip(x.tolist(), y.tolist(), strict=True)]
        (tmp_path / name).write_text("\n".join(["a,b,c,y", *lines]))

    def verdicts(*answers: str) -> list[str]:
        for path in tmp_path.glob("*.csv"):
            path.unlink()
        table("mine.csv", 30, answers[-1])
        for k, answer in enumerate(answers[:-1]):
            table(f"site{k}.csv", 60, answer)
        data = load_files(Context(0), clients=f"{tmp_path}/site*.csv", target=f"{tmp_path}/mine.csv", label="y")
        return [f"{p.verdict} {p.reason}" for p in screen(data, QUICK, Draw.of(0)).partners]

    friend, stranger = verdicts("true", "shuffled", "true")
    assert friend.startswith("helps")
    assert not stranger.startswith("helps")
    friend, single = verdicts("sign", "one", "sign")
    assert friend.startswith("helps")
    assert not single.startswith("helps")


def test_the_same_seed_gives_the_same_verdicts(example: tuple[PreparedFiles, set[str]]) -> None:
    data, _ = example
    few = QUICK._replace(steps=3)
    assert screen(data, few, Draw.of(5)).partners == screen(data, few, Draw.of(5)).partners


def test_holm_by_hand() -> None:
    assert holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])
    assert holm(np.array([0.5, 0.9])) == pytest.approx([1.0, 1.0])


def test_worthless_labels_are_called_useful_as_rarely_as_is_promised() -> None:
    """A placebo more, drawn like the others: the test rejects at its level, at the tails that Holm needs too."""
    random = np.random.default_rng(0)
    draws = random.normal(size=(4000, 21))
    p = np.array([placebo_test(row[0], row[1:]) for row in draws])
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert (p < 0.0025).mean() < 0.006
    assert placebo_test(1.0, np.full(20, 0.3)) == 1.0  # one class only: shuffling changes nothing


def test_the_paired_test_is_students_with_a_wider_error() -> None:
    d = np.random.default_rng(0).normal(0.2, 1.0, 50)
    found, plain = paired(d, folds=5), stats.ttest_1samp(d, 0.0)
    assert found.t == pytest.approx(plain.statistic / np.sqrt(1 + 5 / 4))
    assert found.p_upper + found.p_lower == pytest.approx(1.0)
    assert found.interval.value == pytest.approx(d.mean())
    assert paired(np.zeros(9), 5).p_upper == 1.0


def errors(*partners: tuple[float, float], noise: float = 0.01, rows: int = 200) -> torch.Tensor:
    """Alone at 0.2; for each partner its own mean error and that of its placebos."""
    random = np.random.default_rng(0)
    lines = [np.full(rows, 0.2) + 0.1 * random.normal(size=rows)]
    for true, placebo in partners:
        for mean in (true, *(placebo + noise * random.normal() for _ in range(20))):
            lines.append(lines[0] - 0.2 + mean + 0.02 * random.normal(size=rows))
    return torch.tensor(np.stack(lines))


def test_verdicts() -> None:
    names = [("better", 9), ("worse", 9), ("useless", 9), ("same", 9), ("mixed", 9)]
    table = errors((0.15, 0.3), (0.3, 0.4), (0.2001, 0.2), (0.2, 0.3), (0.205, 0.3))
    found = {p.name: p for p in judged(names, table, ScreeningPlan())}
    assert found["better"].verdict == "helps"
    assert "better than alone" in found["better"].reason
    assert found["worse"].verdict == "harms"
    assert found["useless"].verdict == "neutral"
    assert "shuffled" in found["useless"].reason
    assert found["mixed"].verdict != "helps", "useful labels are not enough where the mixture looks worse than alone"
    quiet = errors((0.2, 0.3))
    quiet[1] = quiet[0] + 1e-5 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    (same,) = judged([("same", 9)], quiet, ScreeningPlan())
    assert same.verdict == "neutral"
    assert "less than 1%" in same.reason


def test_worth_and_the_rows_it_would_take() -> None:
    sure, vague, worse = (paired(np.random.default_rng(1).normal(m, 1.0, 100), 5) for m in (1.0, 0.1, -1.0))
    assert [_worth(one, 1.0) for one in (sure, vague, worse)] == ["yes", "not shown", "no"]
    t = Paired(vague.interval, 1.0, 0.2, 0.8, 0.1)
    assert _rows_needed(t, 100) == int(np.ceil(100 * (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) ** 2))
    assert _rows_needed(worse, 100) is None


@pytest.mark.parametrize(
    ("worth", "verdicts", "gain", "sentences"),
    [
        ("yes", ("helps", "helps"), 0.02, ("Yes, train together: ", "a gain of 0.0200 (", "a and b help.")),
        ("not shown", ("helps", "harms"), 0.01, ("Undecided: ", "about 700 rows", "a is worth trying. b harms if")),
        ("yes", ("neutral", "neutral"), 0.02, ("Undecided: ", "None of the 2 partners helps on its own, so this gain")),
        ("no", ("neutral", "harms"), -0.03, ("Stay alone: ", "a loss of 0.0300 (", "None of the 2 partners helps")),
    ],
)
def test_the_answer_comes_first_with_its_number_and_interval(
    worth: str, verdicts: tuple[Verdict, Verdict], gain: float, sentences: tuple[str, ...]
) -> None:
    change = Interval(gain, gain - 0.01, gain + 0.01)
    partners = tuple(Partner(n, 9, v, "", change, 1, 1, 1, 0) for n, v in zip("ab", verdicts, strict=True))
    one = Paired(change, 1.0, 0.1, 0.9, 0.1)
    text = _headline(worth, Screened(partners, 0.1, 9, Ledger()), 0.1, 0.1 + gain, one, 700)
    assert text.startswith(sentences[0])
    assert all(sentence in text for sentence in sentences)
    assert f"(95 % interval of the gain: {gain - 0.01:+.4f} to {gain + 0.01:+.4f})" in text.partition(". ")[0] + "."


def test_bound_terms_are_theorem_1(example: tuple[PreparedFiles, set[str]]) -> None:
    data, _ = example
    first, second, *_ = _bound_terms(data)
    d, tail = data.model.size, np.log(20)
    assert first["validation_term"] == pytest.approx(np.sqrt((d + tail) / 60))
    assert second["validation_term"] == pytest.approx(first["validation_term"] / np.sqrt(2))
    rows = min(holder.rows for holder in data.holders[:-1])
    assert first["training_term"] == pytest.approx(((d + 4 + tail) * 4 / rows) ** 0.25)


def test_shapley_values_share_out_the_whole_gain(example: tuple[PreparedFiles, set[str]]) -> None:
    """Efficiency holds for every order, cut short or not at tolerance 0; friends come before strangers."""
    data, friends = example
    found = contributions(data, "shapley", QUICK, Draw.of(0), orders=3, tolerance=0.0)
    assert sum(found.values) == pytest.approx(found.whole - found.empty, abs=1e-6)
    assert found.trainings <= most_trainings("shapley", 4, 3) == 14
    order = sorted(range(4), key=lambda k: -found.values[k])
    assert {data.partners[k] for k in order[:2]} == friends


def test_leaving_one_out(example: tuple[PreparedFiles, set[str]]) -> None:
    data, friends = example
    said: list[str] = []
    found = contributions(data, "loo", QUICK, Draw.of(0), say=said.append)
    assert found.trainings == most_trainings("loo", 4) == 6
    assert "at most 6 trainings" in said[0]
    best = max(range(4), key=lambda k: found.values[k])
    assert data.partners[best] in friends
    assert found.as_dict([0.4, 0.3, 0.2, 0.1])["agreement_with_weights"] is not None
