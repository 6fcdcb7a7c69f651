"""Times to an event: the baseline hazard, a loss by rows, its kinship with Cox's, and what is wrong with files."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.advise.advise import advise, mine_of
from coterie.advise.page import write
from coterie.advise.scores import TIMES, area, chosen, comparable, concordance, few_events
from coterie.errors import UsageError
from coterie.experiment import config as configuration
from coterie.experiment.predict import predict
from coterie.federation import Batch
from coterie.problems import Context
from coterie.problems.files import load_files
from coterie.problems.files.problem import checked_tables
from coterie.problems.models import FlatModel
from coterie.problems.tasks.supervised import LOSSES, Supervised
from coterie.problems.tasks.survival import STEEPEST, Baseline, hazard, surprise

TIMES_AT = np.array([2.0, 5.0, 5.0, 1.0, 7.0, 3.0, 6.0, 9.0])
EVENTS = np.array([True, True, True, False, False, True, False, True])
X = np.array([0.5, -1.0, 0.3, 1.2, -0.7, 0.9, 0.1, -1.5])


def sample(n: int, seed: int, slope: float = 1.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, Weibull times with hazards exp(slope · x), and who was not censored."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 3))
    times = (random.exponential(size=n) / np.exp(slope * x[:, 0])) ** 0.7 * 10.0
    censoring = random.uniform(0.0, 30.0, n)
    return x, np.minimum(times, censoring), times <= censoring


def brute(risks: np.ndarray, times: np.ndarray, events: np.ndarray) -> tuple[float, int]:
    """Harrell's C by its definition, pair by pair."""
    right, pairs = 0.0, 0
    for i in range(len(risks)):
        for j in range(len(risks)):
            if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
                pairs += 1
                right += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return right / pairs, pairs


def test_the_c_index_counts_pairs() -> None:
    random = np.random.default_rng(1)
    times, events = random.integers(0, 8, 40).astype(float), random.random(40) < 0.6
    risks = random.integers(0, 6, 40).astype(float)  # many ties in both
    value, influences = concordance(risks, times, events)
    assert value == pytest.approx(brute(risks, times, events)[0], abs=1e-12)
    assert influences.mean() == pytest.approx(value, abs=1e-12)
    assert concordance(-risks, times, events)[0] == pytest.approx(1.0 - value, abs=1e-12)


def test_influences_are_what_rows_change() -> None:
    """Doubling the weight of a row moves C by its influence over n, to first order: compared with the jackknife."""
    x, times, events = sample(60, 2)
    value, influences = concordance(x[:, 0], times, events)
    left = [concordance(*(np.delete(a, i) for a in (x[:, 0], times, events)))[0] for i in range(60)]
    jackknife = 60 * value - 59 * np.array(left)
    assert np.corrcoef(jackknife, influences)[0, 1] > 0.999
    assert jackknife.std() == pytest.approx(influences.std(), rel=0.05)


def test_without_times_the_c_index_is_the_area_under_the_curve() -> None:
    random = np.random.default_rng(3)
    sick, scores = random.random(50) < 0.4, random.normal(size=50).round(1)
    value, influences = concordance(scores, np.where(sick, 1.0, 2.0), sick)
    other, theirs = area(scores, sick)
    assert value == pytest.approx(other)
    np.testing.assert_allclose(influences, theirs)


def test_labels_order_rows_as_times_do() -> None:
    x, times, events = sample(200, 4)
    labels = Baseline.of(times, events).labels(np.where(events, times, -times))
    assert ((labels > 0) == events).all()
    assert (np.abs(labels).argsort() == times.argsort()).all()
    risks = x[:, :1]
    assert TIMES[0].value(risks, labels) == pytest.approx(concordance(risks[:, 0], times, events)[0])
    assert np.abs(labels).sum() == pytest.approx(events.sum(), rel=1e-5)  # expected events are those that happened


def test_an_event_at_time_zero_is_no_censored_row() -> None:
    labels = Baseline((0.0,), (1.0,)).labels(np.array([0.0, -0.0]))
    assert labels[0] > 0 > labels[1]
    assert surprise(torch.from_numpy(labels)).tolist() == pytest.approx([1.0, 0.0], abs=1e-5)


def test_the_loss_is_never_negative_and_its_gradient_is_right() -> None:
    labels = torch.tensor([0.3, -0.3, 2.0, -1.5, 0.01], dtype=torch.float64)
    eta = torch.tensor([[0.2], [-1.0], [STEEPEST + 1.0], [STEEPEST + 0.5], [4.6]], dtype=torch.float64)
    assert bool((hazard(eta, labels) >= 0).all())
    best = (1.0 / labels.abs()).log()[:, None]
    assert hazard(best, labels)[[0, 2, 4]].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    assert torch.autograd.gradcheck(lambda e: hazard(e, labels), eta.requires_grad_(), fast_mode=True)
    steep = torch.tensor([[STEEPEST], [STEEPEST + 2.0]], dtype=torch.float64)
    slope = torch.func.grad(lambda e: hazard(e, -torch.ones(2, dtype=torch.float64)).sum())(steep)
    assert slope[:, 0].tolist() == pytest.approx([np.exp(STEEPEST)] * 2)  # a straight line from there on
    assert LOSSES["hazard"] is hazard


def partial_likelihood(beta: float) -> float:
    """Cox's, with Breslow's ties, written down by hand: minus its logarithm."""
    total = 0.0
    for i in range(len(X)):
        if EVENTS[i]:
            at_risk = sum(np.exp(beta * X[j]) for j in range(len(X)) if TIMES_AT[j] >= TIMES_AT[i])
            total -= beta * X[i] - np.log(at_risk)
    return total


@pytest.mark.parametrize("beta", [-0.7, 0.0, 1.3])
def test_with_breslows_baseline_the_gradient_is_that_of_the_partial_likelihood(beta: float) -> None:
    relative = np.exp(beta * X)
    jumps = {t: (EVENTS & (t == TIMES_AT)).sum() / relative[t <= TIMES_AT].sum() for t in TIMES_AT[EVENTS]}
    exposure = np.array([sum(h for t, h in jumps.items() if t <= time) for time in TIMES_AT])
    labels = torch.from_numpy(np.where(EVENTS, 1.0, -1.0) * np.maximum(exposure, 1e-300))
    b = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(hazard(b * torch.from_numpy(X)[:, None], labels).sum(), b)
    step = 1e-6
    wanted = (partial_likelihood(beta + step) - partial_likelihood(beta - step)) / (2 * step)
    assert float(slope) == pytest.approx(wanted, abs=1e-7)


def test_the_slope_is_found_again() -> None:
    """With Λ of the truth's shape, maximum likelihood finds the slope that the times were drawn with."""
    x, times, events = sample(4000, 5, slope=0.5)
    labels = torch.from_numpy(Baseline.of(times, events).labels(np.where(events, times, -times))).double()
    inputs = torch.from_numpy(np.c_[x, np.ones(len(x))])
    loss = Supervised.of(FlatModel(torch.nn.Linear(4, 1, bias=False)), "hazard")
    batch = Batch((inputs, labels))

    theta = torch.zeros(4, dtype=torch.float64)
    for _ in range(300):
        theta = theta - loss.loss_and_gradient(theta, batch)[1]
    assert theta[:3].tolist() == pytest.approx([0.5, 0.0, 0.0], abs=0.08)


def save(path: Path, n: int, seed: int, slope: float = 1.5, **changed: Any) -> None:
    x, times, events = sample(n, seed, slope)
    path.parent.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {f"x{j}": x[:, j].round(4) for j in range(3)}
    table |= {"months": times.round(4), "died": ["yes" if e else "no" for e in events], **changed}
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])


def files(folder: Path) -> dict[str, Any]:
    return {"clients": f"{folder}/sites/*.csv", "target": f"{folder}/mine.csv", "label": "months", "event": "died"}


def test_a_friend_takes_part_and_the_opposite_is_left_out(tmp_path: Path) -> None:
    save(tmp_path / "mine.csv", 40, 1)
    save(tmp_path / "sites" / "friend.csv", 300, 2)
    save(tmp_path / "sites" / "other.csv", 300, 4)
    save(tmp_path / "sites" / "opposite.csv", 300, 3, slope=-1.5)
    sets = {"run.problem": "files", **{f"problem.{key}": value for key, value in files(tmp_path).items()}}
    advice = advise(configuration.load(None, {}, sets), tmp_path / "advice").advice
    assert advice["data"]["kind"] == "survival"
    assert advice["measure"]["name"] == "c_index"
    by_name = {partner["name"]: partner for partner in advice["partners"]}
    assert by_name["friend.csv"]["z"] < -3 < 2 < by_name["opposite.csv"]["z"]
    assert by_name["opposite.csv"]["verdict"] in ("left out", "differs")
    assert advice["delivered"]["values"]["c_index"] > 0.7
    assert "C-index" in write(tmp_path / "advice").read_text(encoding="utf-8")
    _, times, events = sample(200, 9)
    save(tmp_path / "new.csv", 200, 9)
    table = predict(tmp_path / "advice" / "model", tmp_path / "new.csv")
    assert table.header[0] == "row"
    assert all(name.startswith("p(months>") for name in table.header[1:])
    later = np.array([[float(p) for p in row[1:]] for row in table.rows])
    assert ((later >= 0) & (later <= 1)).all()
    assert (np.diff(later, axis=1) <= 0).all()
    assert concordance(-later.sum(1), times, events)[0] > 0.7


def test_an_advice_counts_an_event_at_time_zero(tmp_path: Path) -> None:
    months = [0.0] * 12 + list(range(1, 29))
    save(tmp_path / "mine.csv", 40, 1, months=months, died=["yes"] * 12 + ["no"] * 28)
    save(tmp_path / "sites" / "a.csv", 60, 2)
    mine = mine_of(checked_tables(**files(tmp_path), partial=True)[0])
    assert (mine.labels > 0).sum() == 12


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"months": [-1.0] * 30}, r"time 'months' is -1 in row 1; times are 0 or more"),
        ({"died": ["perhaps"] * 30}, r"event 'died' holds 'perhaps' in row 1.*Write 1 or yes"),
        ({"died": [""] * 30}, r"event 'died' holds nothing in row 1"),
        ({"died": [0] * 30}, r"event 'died' never happens"),
    ],
)
def test_bad_times_and_events(changed: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    save(tmp_path / "mine.csv", 30, 1, **changed)
    save(tmp_path / "sites" / "a.csv", 30, 2)
    with pytest.raises(UsageError, match=f"(?s){complaint}"):
        load_files(Context(0), **files(tmp_path))


def test_settings_that_do_not_fit_times(tmp_path: Path) -> None:
    save(tmp_path / "mine.csv", 30, 1)
    save(tmp_path / "sites" / "a.csv", 30, 2)
    where = files(tmp_path)
    with pytest.raises(UsageError, match=r"(?s)no column 'gone' beside the label.*Set problem\.event"):
        load_files(Context(0), **{**where, "event": "gone"})
    with pytest.raises(UsageError, match=r"leave out problem\.balance, or problem\.event"):
        load_files(Context(0), **where, balance=True)
    with pytest.raises(UsageError, match=r"measure auc is no measure of times"):
        chosen("auc", np.array([1.0, -2.0]), None, times=True)


def test_rows_that_cannot_be_compared() -> None:
    assert not comparable(np.array([1.0, 2.0, 5.0]), np.array([False, False, True]))
    assert comparable(np.array([1.0, 5.0, 5.0]), np.array([False, False, True]))
    with pytest.raises(UsageError, match="no two of your rows can be compared"):
        chosen("auto", np.array([-1.0, -2.0, 5.0]), None, times=True)
    assert chosen("auto", np.array([1.0, -2.0, 5.0]), None, times=True).name == "c_index"
    assert "only 2 of your 3" in few_events(np.array([1.0, -2.0, 5.0]), "died")[0]
    assert "all of your 2" in few_events(np.array([1.0, 5.0]), "died")[1]
