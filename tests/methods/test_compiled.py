"""A recorded round is the round as it is written: numbers, counters and ledger; what cannot be recorded says why."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from test_conformance import FEW, FIRST, Case, sampled, size
from torch import Tensor

from coterie.experiment.build import Parts, assemble
from coterie.experiment.config import resolve
from coterie.methods.base import Method, View
from coterie.methods.shared.compiled import CompiledRounds, Form, RecordedRound
from coterie.numerics import Draw
from coterie.numerics.programs import Graph, namespace
from coterie.numerics.tracing import Counter, Untraceable
from coterie.testing.comparing import assert_near, assert_same


class Interpreted:
    """A program that runs the text of a graph operation by operation, in place of a compiled one."""

    def __init__(self, graph: Graph) -> None:
        names = namespace()
        exec(graph.text, names)
        self._forward, self._constants = names["forward"], graph.constants

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return list(self._forward(None, *inputs, *self._constants))


def parts_of(method: str, problem: str, federation: dict[str, Any] | None = None, **settings: Any) -> Parts:
    run = {"method": method, "problem": problem, "dtype": "float64", "threads": 1, "baselines": []}
    table = {"mode": "vmap", **(federation or {})}
    return assemble(resolve({"run": run, "method": settings, "problem": size(problem), "federation": table}))


CASES = [
    ("fedavg", "friends", {}, FEW),
    ("fedavg", "friends", {"count": 4}, FEW),
    pytest.param("fedadam", "friends", {}, FEW, marks=pytest.mark.slow),
    ("meritfed", "friends", {"screen_copies": True}, {}),
    pytest.param("meritfed", "mean-estimation", {}, {"mirror_step": 3.5}, marks=pytest.mark.slow),
    ("soba", "nested-quadratic", {}, {"step": 0.1, "outer_step": 0.1}),
    ("fednest", "nested-quadratic", {}, {"step": 0.1, "outer_step": 0.1, "lipschitz": 10.0, "terms": 2, **FEW}),
    ("scaffold", "friends", {}, FEW),
]


@pytest.mark.parametrize(("method", "problem", "federation", "settings"), CASES)
def test_a_recorded_round_is_the_round(
    method: str, problem: str, federation: dict[str, Any], settings: dict[str, Any]
) -> None:
    parts = parts_of(method, problem, federation, **settings)
    root = Draw.of(3)
    state = parts.method.init(parts.problem, parts.fed.n)

    def plain_round() -> Any:
        return parts.method.round(parts.fed.begin(1, root.round(0)), state, root.round(0))

    untouched = plain_round()
    first = RecordedRound(parts.method, parts.fed.begin(1, root.round(0)), state, root.round(0))
    assert_same(plain_round(), untouched)
    program: Any = Interpreted(first.graph)
    for t in range(3):  # one recording serves all rounds
        draw = root.round(t)
        fed = parts.fed.begin(t + 1, draw)
        leaves = first.leaves(fed, state)
        assert leaves is not None
        before = parts.fed.ledger.as_dict()
        fast = first.run(program, fed, leaves, draw)
        moved = _difference(parts.fed.ledger.as_dict(), before)
        before = parts.fed.ledger.as_dict()
        plain = parts.method.round(fed, state, draw)
        assert moved == _difference(parts.fed.ledger.as_dict(), before)
        assert parts.fed.ledger.seen.as_dict() == before.get("seen", {})
        assert_near(fast, plain, 1e-9)
        state = plain


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {
        cause: {k: v - before["by_cause"].get(cause, {}).get(k, 0) for k, v in entry.items()}
        for cause, entry in after["by_cause"].items()
    }


@pytest.mark.parametrize(
    ("method", "problem", "federation", "settings", "reason"),
    [
        (
            "local-svrg",
            "friends",
            {},
            {"steps": 4, "batch": 5, "refresh": 0.5, "local_steps": 2},
            "some clients do more",
        ),
        ("fedavg", "friends", {"chunk": 4}, {}, "4 at a time"),
        ("fedavg", "friends", {"compress": "top-k"}, {}, "stages"),
        ("fedavg", "friends", {"norm": 5.0}, {}, "screened by length"),
        ("fedavg", "friends", {"mode": "sequential"}, {}, "one after the other"),
        ("meritfed", "friends", {}, {"cut": 5}, "depends on its number"),
        ("meritfed", "friends", {}, {"server": "adam"}, "depends on its number"),
        ("meritfed", "friends", {}, {"data": "fresh", "mirror_batch": 10}, "depends on its number"),
    ],
)
def test_what_cannot_be_recorded_says_why(
    method: str, problem: str, federation: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    parts = parts_of(method, problem, federation, **settings)
    draw = Draw.of(0).round(0)
    state = parts.method.init(parts.problem, parts.fed.n)
    with pytest.raises(Untraceable, match=reason):
        RecordedRound(parts.method, parts.fed.begin(1, draw), state, draw)


def test_a_round_whose_assumptions_fail_is_run_as_it_is_written() -> None:
    parts = parts_of("fedavg", "friends")
    draw = Draw.of(0).round(0)
    state = parts.method.init(parts.problem, parts.fed.n)
    fed = parts.fed.begin(1, draw)
    recorded = RecordedRound(parts.method, fed, state, draw)
    program: Any = Interpreted(recorded.graph)
    spoilt = state._replace(x=state.x * torch.nan)
    before = parts.fed.ledger.as_dict()
    assert recorded.run(program, fed, Form.of(spoilt)[1], draw) is None
    assert parts.fed.ledger.as_dict() == before, "and nothing is billed twice"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_program_that_returns_its_input_is_not_used_however_short_the_steps(dtype, monkeypatch) -> None:
    class Idle(Interpreted):
        error = 0.0
        busy = False

        def __init__(self, graph: Graph, *more: Any) -> None:
            super().__init__(graph)

        def program(self) -> Any:
            return lambda inputs: (
                [inputs[0].clone() if self.error else value for value in self(inputs)[:1]]
                + [torch.ones((), dtype=torch.bool)]
            )

    monkeypatch.setattr("coterie.methods.shared.compiled.Builder", Idle)
    run = {"method": "fedavg", "problem": "friends", "dtype": dtype, "threads": 1, "baselines": []}
    table = {"run": run, "method": {"step": 1e-4}, "problem": size("friends"), "federation": {"mode": "vmap"}}
    parts = assemble(resolve(table))
    draw = Draw.of(0).round(0)
    state = parts.method.init(parts.problem, parts.fed.n)
    fed = parts.fed.begin(1, draw)
    for Idle.error in (0.0, 1.0):
        rounds = CompiledRounds(parts.method, 1)
        rounds.begin(fed, state, draw)
        with nullcontext() if not Idle.error else pytest.raises(Untraceable, match="gives other numbers"):
            rounds.finish(fed, state, draw)


def test_nothing_of_a_recording_is_remembered() -> None:
    """A round after a recording uses no tensor of it: they have no numbers."""
    parts = parts_of("fedavg", "friends")
    draw = Draw.of(0).round(0)
    state = parts.method.init(parts.problem, parts.fed.n)
    RecordedRound(parts.method, parts.fed.begin(1, draw), state, draw)
    after = parts.method.round(parts.fed.begin(1, draw), state, draw)
    assert type(after.x) is Tensor
    assert bool(torch.isfinite(after.x).all())


def test_another_number_of_clients_is_run_as_it_is_written() -> None:
    parts = parts_of("fedavg", "friends", {"count": 4})
    draw = Draw.of(0).round(0)
    state = parts.method.init(parts.problem, parts.fed.n)
    rounds = CompiledRounds(parts.method, 1)
    rounds._round = RecordedRound(parts.method, parts.fed.begin(1, draw), state, draw)
    rounds._program = Interpreted(rounds._round.graph)  # type: ignore[assignment]
    fed = parts.fed.begin(1, draw)
    fewer = fed.__class__(fed.engine, fed.ids[:2], fed.book)
    assert_near(rounds.round(fewer, state, draw), parts.method.round(fewer, state, draw), 0.0)


class TwoCounters(NamedTuple):
    x: Tensor
    rounds: int
    left: int


def counting(swap: bool) -> Method:
    """FedAvg with two counters, which change places if `swap`."""
    inner = parts_of("fedavg", "friends").method

    def round(fed: Any, s: TwoCounters, draw: Draw) -> TwoCounters:
        x = inner.round(fed, inner.init(PROBLEM, fed.n)._replace(x=s.x), draw).x
        return TwoCounters(x, s.left - 1, s.rounds + 1) if swap else TwoCounters(x, s.rounds + 1, s.left - 2)

    return Method("counting", lambda problem, n: TwoCounters(problem.start, 0, 9), round, lambda s: View(s.x))


PROBLEM = parts_of("fedavg", "friends").problem


def test_every_counter_counts_by_itself() -> None:
    parts, draw = parts_of("fedavg", "friends"), Draw.of(0).round(0)
    method = counting(swap=False)
    state = method.init(parts.problem, parts.fed.n)
    recorded = RecordedRound(method, parts.fed.begin(1, draw), state, draw)
    program: Any = Interpreted(recorded.graph)
    for _ in range(3):
        state = recorded.run(program, parts.fed.begin(1, draw), Form.of(state)[1], draw)
    assert state[1:] == (3, 3)
    swapped, first = counting(swap=True), method.init(parts.problem, 1)
    with pytest.raises(Untraceable, match="changes its form"):
        RecordedRound(swapped, parts.fed.begin(1, draw), first, draw)


def test_a_counter_counts_and_shows_nothing() -> None:
    assert (2 * (Counter() + 1) - 3).at(10) == 19
    for look in (bool, int, float, hash, lambda c: c > 3, lambda c: c == 3, lambda c: c % 2, lambda c: 0.9**c):
        with pytest.raises(Untraceable):
            look(Counter())


def attempt(case: Case) -> bool:
    """Record a method's round; whether that was possible. Rounds before and after must have the same bits."""
    parts = case.parts()
    draw = Draw.of(1).round(0)
    state = parts.method.init(parts.problem, parts.fed.n)

    def plain() -> Any:
        return parts.method.round(parts.fed.begin(1, draw), state, draw)

    before = plain()
    try:
        recorded = RecordedRound(parts.method, parts.fed.begin(1, draw), state, draw)
    except Untraceable:
        assert_same(plain(), before)
        return False
    assert_same(plain(), before)
    program: Any = Interpreted(recorded.graph)
    fast = recorded.run(program, parts.fed.begin(1, draw), Form.of(state)[1], draw)
    if fast is not None:  # else its assumptions do not hold here
        assert_near(fast, before, 1e-6)
    return True


WANTED = ("fedavg", "fedprox", "scaffold", "ditto", "local-train", "fedlaw", "fednest", "krum")
"""Methods that can be recorded."""
RECORDED = ("fedavg", "scaffold", "fednest", "meritfed")
"""Those that the first test records, with the same questions."""
LONG = ("fednest-weights", "fedsep", "collaborate")
"""Others whose rounds are long to record, and of a kind that is there already."""


@pytest.mark.parametrize(
    "case",
    [
        case if case.method in WANTED else pytest.param(case, marks=pytest.mark.slow) if case.method in LONG else choice
        for case, choice in zip(FIRST, sampled(FIRST), strict=True)
        if case.method not in RECORDED
    ],
    ids=lambda case: case.method,
)
def test_a_recording_leaves_everything_as_it_was(case: Case) -> None:
    assert attempt(case) or case.method not in WANTED


def test_the_methods_that_can_be_recorded_are_known() -> None:
    assert {case.method for case in FIRST}.issuperset(WANTED)
    assert {case[0] for case in CASES if isinstance(case, tuple) and isinstance(case[0], str)}.issuperset(RECORDED)
