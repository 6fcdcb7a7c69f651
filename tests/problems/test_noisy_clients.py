"""noisy-clients: who holds what, what is refused, and that weight learners tell noise from data."""

import pytest
import torch

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.problems import Context
from coterie.problems.catalogue.noisy_clients import CLEAN, noisy_clients


def labels_of(problem, k):
    return problem.train.client(k).all().labels


def test_clean_clients_split_the_classes_and_the_others_have_random_labels():
    problem = noisy_clients(Context(0))
    assert (problem.clients, problem.friends) == (10, 3)
    for k, classes in enumerate(CLEAN):
        assert set(labels_of(problem, k).tolist()) == set(classes)
    for k in range(3, 10):
        labels = labels_of(problem, k)
        assert len(labels) == 120
        assert int(torch.bincount(labels, minlength=10).min()) > 0
    everything = torch.cat([labels_of(problem, k) for k in range(3, 10)])
    assert float(torch.bincount(everything).double().std() / 84) < 0.25


def test_labels_of_noisy_clients_have_nothing_to_do_with_the_images():
    problem = noisy_clients(Context(0), noisy_rows=500)
    clean = torch.cat([problem.train.client(k).all().inputs for k in range(3)]).flatten(1)
    truth = torch.cat([labels_of(problem, k) for k in range(3)])
    rows = problem.train.client(5).all()
    nearest = truth[torch.cdist(rows.inputs.flatten(1), clean).argmin(1)]
    assert float((nearest == rows.labels).double().mean()) == pytest.approx(0.1, abs=0.04)


def test_validation_is_balanced_and_kept_from_clients_and_test():
    problem = noisy_clients(Context(0))
    valid = problem.target.valid.all()
    assert torch.bincount(valid.labels).tolist() == [20] * 10
    assert len(problem.test.all().labels) == 400
    theirs = torch.cat([problem.train.client(k).all().inputs for k in range(10)])
    for held_out in (valid.inputs, problem.test.all().inputs):
        distances = torch.cdist(held_out.flatten(1).double(), theirs.flatten(1).double())
        assert float(distances.min()) > 0


def test_the_best_weights_are_the_shares_of_the_classes():
    problem = noisy_clients(Context(0), clients=5)
    assert problem.best_weights.tolist() == pytest.approx([0.5, 0.3, 0.2, 0.0, 0.0])
    assert problem.offers >= {"optimal-weights", "friends", "target", "hvp"}


def test_the_seed_decides():
    a, b, c = (noisy_clients(Context(s)) for s in (0, 0, 1))
    assert torch.equal(labels_of(a, 7), labels_of(b, 7))
    assert not torch.equal(labels_of(a, 7), labels_of(c, 7))
    assert not torch.equal(labels_of(a, 7), labels_of(a, 8))


def test_bad_sizes_are_refused():
    with pytest.raises(UsageError, match=r"problem\.clients"):
        load(sets={"problem.clients": 2}, flags={"run.problem": "noisy-clients"})
    with pytest.raises(UsageError, match=r"problem\.per_class = 1000"):
        noisy_clients(Context(0), per_class=1000)
    with pytest.raises(UsageError, match=r"problem\.test = 2000"):
        noisy_clients(Context(0), test=2000)


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        ("primal-dual", 160),
        pytest.param("sustain", 100, marks=pytest.mark.slow),
        pytest.param("rfho", 100, marks=pytest.mark.slow),
    ],
)
def test_weight_learners_find_the_clean_clients_though_half_are_absent(method, rounds):
    flags = {"run.method": method, "run.problem": "noisy-clients", "run.rounds": rounds, "run.record": rounds}
    result = run_rounds(assemble(load(sets={"problem.active": 0.5, "run.baselines": []}, flags=flags)), None)
    assert result.summary["outcome"] == "finished"
    assert sum(result.summary["weights"][:3]) > 0.5  # they start at 0.3


def test_agnostic_learning_prefers_the_noise():
    flags = {"run.method": "afl", "run.problem": "noisy-clients", "run.rounds": 100, "run.record": 100}
    result = run_rounds(assemble(load(sets={"run.baselines": []}, flags=flags)), None)
    assert sum(result.summary["weights"][:3]) < 0.15


@pytest.mark.data
@pytest.mark.parametrize("data", ["mnist", "fashion-mnist"])
def test_the_papers_sizes(data):
    try:
        problem = noisy_clients(Context(0), data=data)
    except UsageError as error:
        pytest.skip(str(error))
    sizes = problem.train.counts.tolist()
    assert sum(sizes[:3]) == 60_000 - 200
    assert sizes[3:] == [5000] * 7
    assert len(problem.test.all().labels) == 10_000
    assert len(problem.start) == 61_706


def test_class_lists_may_overlap_as_in_the_iid_case():
    everything = [*range(10)]
    problem = noisy_clients(Context(0), clients=4, classes=[everything, everything], clean_rows=150, noisy_rows=150)
    assert problem.train.counts.tolist() == [150] * 4
    assert problem.friends == 2
    assert problem.best_weights.tolist() == [0.5, 0.5, 0.0, 0.0]
    first, second = (problem.train.client(k).columns for k in range(2))
    assert first[1].bincount(minlength=10).min() >= 8
    rows = {tuple(x.flatten().tolist()) for x in first[0]}
    assert not rows & {tuple(x.flatten().tolist()) for x in second[0]}
    shared = noisy_clients(Context(0), clients=3, classes=[[0, 1], [1]])
    assert shared.best_weights.tolist() == [0.75, 0.25, 0.0]
    assert shared.train.client(1).columns[1].unique().tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 3, "classes": [[0], [1], [2], [3]]}, "lists for 4 clean clients, but there are 3"),
        ({"classes": [[0, 10]]}, "class 10, but the data has classes 0 … 9"),
        ({"classes": [[1, 1]]}, "twice for client 0"),
    ],
)
def test_bad_class_lists_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        noisy_clients(Context(0), **options)
