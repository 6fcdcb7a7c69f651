"""What stages see of a reply: the update that its work declares, for every registered method."""

from dataclasses import replace
from typing import Any

import pytest
from test_conformance import FIRST, Case, assert_same, built, first, some

from coterie.errors import RunError, UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import PrivacyTable, resolve
from coterie.experiment.loop import run_rounds
from coterie.federation import RESULT, Federation
from coterie.federation.stages.base import staged
from coterie.federation.stages.privacy import Mechanism, Privacy
from coterie.federation.work import info_of
from coterie.methods import Method
from coterie.methods.nested import works as nested_works
from coterie.numerics import Draw
from coterie.testing.updates import Watched, away, watch_rounds, watching

NO_MOVE = {
    "ds-fl/learn-and-predict",  # sends class probabilities: an opinion, which is not 0 where nothing moved
    "fedcollab/discriminator-steps",  # its loss is not the task's, so that it is not 0 where all losses are
    "feddst/dynamic-steps",  # a weight that is dropped and grown again begins at 0, whatever the gradient
}
SENDS_WHOLE_NUMBERS = {"top-k", "zerofl", "feddst", "fedsep-submodel", "ifca"}  # which noise cannot hide


def watched(case: Case, rounds: int = 2, **settings: Any) -> Watched:
    """Two rounds where nothing moves, so that works of the second round are seen too."""
    config = case.config()
    config = replace(config, method={**config.method, **settings})
    parts = assemble(config, None, built(case.problem, config.run.dtype))
    if case.method != "exact-gd":
        return watch_rounds(parts, rounds)
    watch = watching(parts)  # the Hessian is 0 here, and exact-gd inverts it
    state, draw = away(parts.method.init(parts.problem, parts.fed.n)), Draw.of(0).round(0)
    with pytest.raises(RunError, match="singular Hessian"):
        parts.method.round(replace(parts.fed, engine=watch).begin(0, draw), state, draw)
    return watch


@first
def test_where_nothing_moved_stages_see_an_update_of_zero(case: Case) -> None:
    watch = watched(case)
    assert watch.asked
    assert set(watch.moved) <= NO_MOVE


OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "ditto/both-models": (Case("ditto", "friends"), {"everyone": True}),
    "ditto/personal-model": (Case("ditto", "quadratic"), {}),
    "pfedme/both-models": (Case("pfedme", "friends"), {"everyone": True}),
    "pfedme/personal-model": (Case("pfedme", "quadratic"), {}),
    "local-train/own-steps": (Case("local-train", "friends"), {"everyone": True}),
    "local-svrg/steps-alone": (Case("local-train", "quadratic"), {"refresh": 0.5}),
    "local-svrg/output-average": (Case("local-svrg", "quadratic"), {"average": True}),
    "collaborate/validation-gradient": (Case("collaborate", "friends"), {"mirror": "trial"}),
    "primal-dual/gradient-alone": (Case("primal-dual", "quadratic"), {"ask": "weighted", "scalar": "client"}),
    "fednest/inner-svrg-steps": (Case("fednest", "nested-quadratic"), {}),
    "two-layer/client-round": (Case("fedsep", "quadratic"), {"size": 2, "penalty": 0.1}),
}
"""Works that a method asks for with other settings or on other problems than the first."""


@pytest.mark.parametrize("work", OPTIONS)
def test_works_of_other_settings_too(work: str) -> None:
    case, settings = OPTIONS[work]
    watch = watched(case, **settings)
    assert work in watch.asked
    assert watch.moved == []


NESTED = next(case for case in FIRST if case.method == "fednest-sgd")


def test_an_iterate_that_is_declared_as_a_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all works of FedNest were: stages acted on y instead of the steps from y."""
    steps = nested_works.inner_sgd_steps
    monkeypatch.setattr(steps, "__coterie__", replace(info_of(steps), update=RESULT))
    assert "fednest/inner-sgd-steps" in watched(NESTED).moved


LOOSE: dict[str, dict[str, Any]] = {
    "federation": {"compress": "random-k", "ratio": 1.0, "norm": 1e30, "clip": 1e30},
    "privacy": {"clip": 1e30, "noise": 0.0},
}
"""Stages that change nothing."""


@some
def test_stages_that_change_nothing_change_no_bit(case: Case) -> None:
    config = case.config(rounds=2, dtype="float32")
    problem = built(case.problem, config.run.dtype)
    plain = run_rounds(assemble(config, None, problem), None).state
    tables = {"run": config.run.model_dump(), "method": config.method, "problem": config.problem}
    tables["federation"] = {**config.federation.model_dump(), **LOOSE["federation"]}
    tables["privacy"] = {} if case.method in SENDS_WHOLE_NUMBERS else LOOSE["privacy"]
    state = run_rounds(assemble(resolve(tables), None, problem), None).state
    while hasattr(state, "inner"):
        state = state.inner
    assert_same(plain, state)


def three_rounds(method: Method, fed: Federation, state: Any) -> Any:
    """Some methods send whole numbers in some rounds only."""
    for t in range(3):
        state = method.round(fed, state, Draw.of(0).round(t))
    return state


@first
def test_methods_that_send_whole_numbers_say_so(case: Case) -> None:
    """They are refused before a round; the stage itself would refuse the same work when it is first asked."""
    parts = case.parts()
    assert bool(parts.method.whole_numbers) == (case.method in SENDS_WHOLE_NUMBERS)
    if not parts.method.whole_numbers:
        return
    (work,) = parts.method.whole_numbers
    hidden = replace(parts.fed, engine=staged(parts.fed.engine, Privacy(Mechanism(1.0))))
    state = parts.method.init(parts.problem, parts.fed.n)
    with pytest.raises(UsageError, match=f"{work} sends whole numbers"):
        three_rounds(parts.method, hidden, state)
    with pytest.raises(UsageError, match=f"{work} sends whole numbers"):
        assemble(replace(case.config(), privacy=PrivacyTable(clip=1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_compressed_fednest_learns_as_well_as_uncompressed(partition: str) -> None:
    """Hyper-representation, digits. When the iterate y itself was cut to half, these ended at 78 % and 69 %."""
    accuracies = []
    for settings in ({}, {"compress": "random-k", "ratio": 0.5}):
        run = {"problem": "hyper-representation", "method": "fednest-sgd", "rounds": 40, "record": 40, "baselines": []}
        tables = {"run": run, "problem": {"partition": partition}, "federation": settings}
        accuracies.append(run_rounds(assemble(resolve(tables)), None).summary["final"]["test_accuracy"])
    assert accuracies[1] > 0.9
    assert abs(accuracies[1] - accuracies[0]) <= 0.01
