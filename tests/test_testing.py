"""The shipped checks: what keeps the rules passes, and every kind of mistake is found by its check, with a remedy."""

from typing import Any, NamedTuple

import pytest
import torch

from coterie.federation import RESULT, moved_from, work
from coterie.methods import Method, View, fedavg
from coterie.methods.base import validated
from coterie.problems import Context, weighting
from coterie.problems.catalogue.nested_quadratic import nested_quadratic
from coterie.problems.catalogue.quadratic import quadratic
from coterie.problems.models import FlatModel
from coterie.settings import Count, Positive
from coterie.testing import ConformanceError, check_method, check_problem
from coterie.testing.methods import CHECKS, SMALL


class State(NamedTuple):
    """A model, and something to get wrong."""

    x: torch.Tensor
    w: torch.Tensor


@work("mistaken/gradient", update=RESULT)
def gradient(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return shard.task.full_gradient(shared, shard.train)


@work("mistaken/step", update=RESULT)
def step_as_result(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return shared - 0.1 * shard.task.full_gradient(shared, shard.train)


@work("mistaken/good-step", update=moved_from())
def good_step(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return shared - 0.1 * shard.task.full_gradient(shared, shard.train)


CALLS = [0]


def after(mistake: str, fed: Any, s: State, draw: Any) -> State:
    """One round of gradient descent, with a mistake."""
    d = fed.mean(gradient, s.x, draw=draw.phase("gradient"))
    if mistake == "in place":
        return State(s.x.sub_(0.1 * d), s.w)
    if mistake == "type":
        return State((s.x - 0.1 * d).float(), s.w)
    if mistake == "random":
        return State(s.x - 0.1 * d * torch.rand(()), s.w)
    if mistake == "remembers":
        CALLS[0] += 1
        return State(s.x - 0.1 * d / CALLS[0], s.w)
    if mistake == "weights":
        return State(s.x - 0.1 * d, s.w * 1.1)
    if mistake == "update":
        return State(fed.mean(step_as_result, s.x, draw=draw.phase("gradient")), s.w)
    if mistake == "nothing":
        return s
    if mistake == "everybody":
        gathered, _ = fed.gather(gradient, s.x, draw=draw.phase("gradient"))
        return State(s.x - 0.1 * s.w @ gathered, s.w)
    return State(fed.mean(good_step, s.x, draw=draw.phase("gradient")), s.w)


def mistaken(mistake: str) -> Any:
    @validated
    def factory(*, step: Positive = 0.1) -> Method:
        def init(problem: Any, n: int) -> State:
            return State(problem.start, problem.start.new_full((n,), 1 / n))

        def round(fed: Any, s: State, draw: Any) -> State:
            return after(mistake, fed, s, draw)

        return Method("mistaken", init, round, lambda s: View(s.x, s.w))

    return factory


@pytest.mark.parametrize(
    ("mistake", "check", "word"),
    [
        ("in place", "a round is pure", "wrote into x of the state"),
        ("random", "a round is pure", "gives two results"),
        ("remembers", "a round is pure", "gives two results"),
        ("type", "a round keeps structure, shapes and type", "float"),
        ("nothing", "a round keeps structure, shapes and type", "left everything as it was"),
        ("weights", "client weights stay on the simplex", "add up to 1"),
        ("update", "updates are what works declare", "mistaken/step"),
        ("everybody", "some clients are enough", "RuntimeError: mat1 and mat2"),
    ],
)
def test_a_mistake_is_found_by_its_check(mistake: str, check: str, word: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_method(mistaken(mistake), "quadratic")
    assert word in str(error.value)
    assert f"mistaken fails “{check}”" in str(error.value)
    assert next(known.remedy for known in CHECKS if known.name == check) in str(error.value)


def test_sound_methods_pass_on_problems_of_all_forms() -> None:
    names = [check.name for check in CHECKS]
    assert check_method(mistaken("none"), quadratic(Context(), clients=4, friends=1, dimension=3, rows=6)) == names


def test_what_is_no_method_or_fits_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SMALL, "submodels")
    monkeypatch.delitem(SMALL, "friends")
    with pytest.raises(ConformanceError, match="returned a int"):
        check_method(lambda: 5)  # type: ignore[arg-type, return-value]

    def odd() -> Method:
        return Method("odd", lambda p, n: p, lambda f, s, d: s, lambda s: s, needs=frozenset({"moonlight"}))

    with pytest.raises(ConformanceError, match=r"moonlight.*give check_method a problem"):
        check_method(odd)
    with pytest.raises(ConformanceError, match=r"checked and kept.*@validated"):
        check_method(lambda: fedavg())


def lines(context: Context, *, clients: Count = 3, mistake: str = "none") -> Any:
    """Regression, with a mistake by choice."""
    make = torch.Generator().manual_seed(context.seed)

    def rows(n: int) -> Any:
        x = torch.randn(n, 2, generator=None if mistake == "seed" else make)
        return x, x.sum(1)

    def absolute(outputs: Any, labels: Any) -> Any:
        gap = outputs.squeeze(-1) - labels
        return gap.square() + (gap.detach().square() if mistake == "detached" else 0)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        model = FlatModel(torch.nn.Linear(2, 1))
    dtype = torch.float32 if mistake == "type" else context.dtype
    return weighting([rows(4 + k) for k in range(clients)], rows(5), model, absolute, dtype=dtype)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [("seed", "the seed makes it"), ("type", "numbers have the type"), ("detached", "derivatives are those")],
)
def test_a_mistaken_problem_is_found(mistake: str, check: str) -> None:
    with pytest.raises(ConformanceError, match=check):
        check_problem(lines, mistake=mistake)


def test_sound_problems_pass() -> None:
    assert len(check_problem(lines)) == 7
    assert len(check_problem(nested_quadratic, clients=3)) == 7
    with pytest.raises(ConformanceError, match="returned a int, no Problem"):
        check_problem(lambda context: 5)  # type: ignore[arg-type, return-value]
