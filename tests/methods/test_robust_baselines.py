"""Robust baselines: reductions to gradient descent, what they bear and refuse; attacked problems end to end."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from learners import WIDE, a_quadratic, federation, gradients, play

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import Result, run_rounds
from coterie.federation.stages.base import Staged
from coterie.methods import coordinate_median, fedavg, geometric_median, krum, multi_krum, trimmed_mean
from coterie.numerics import robust
from coterie.problems.catalogue.friends import friends
from coterie.problems.catalogue.groups import groups
from coterie.problems.catalogue.mean_estimation import mean_estimation
from coterie.problems.catalogue.mixture import mixture

FACTORIES = (krum, multi_krum, coordinate_median, trimmed_mean, geometric_median)
every = pytest.mark.parametrize("make", FACTORIES, ids=lambda make: make.__name__)
TINY = {"model": "logistic", "clients": 10, "friends": 10, "validation": 60, "test": 400}


def told(make: Any, **settings: Any) -> dict[str, Any]:
    """The same, and a full step; attackers only where the method asks."""
    known = make().settings
    return {key: value for key, value in {"local_steps": 1, "batch": "all", **settings}.items() if key in known}


@pytest.mark.parametrize(
    ("make", "aggregate"),
    [
        (krum, lambda G: robust.multi_krum(G, 1, 1)),
        (multi_krum, lambda G: robust.multi_krum(G, 1, 4)),
        (coordinate_median, robust.coordinate_median),
        (trimmed_mean, lambda G: robust.trimmed_mean(G, 1)),
        (geometric_median, robust.geometric_median),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_local_step_is_a_step_along_the_robust_mean_of_gradients(make, aggregate):
    problem = a_quadratic()
    x = problem.start
    G, _ = gradients(problem, x)
    found = play(make(step=0.1, **told(make, attackers=1)), problem, 1).x
    torch.testing.assert_close(found, x - 0.1 * aggregate(G), rtol=1e-6, atol=1e-6)


def test_without_attackers_to_cut_it_is_fedavg():
    problem = a_quadratic()
    walk = {"step": 0.05, "local_steps": 3, "batch": 4}
    plain = play(fedavg(weights="uniform", **walk), problem, 5).x
    for method in (trimmed_mean(attackers=0.05, **walk), multi_krum(attackers=0.05, **walk)):
        torch.testing.assert_close(play(method, problem, 5).x, plain, rtol=1e-10, atol=1e-10)


@cache
def attacked(attack: str) -> Any:
    return friends(WIDE, **TINY, attack=attack, attackers=3)


@every
@pytest.mark.parametrize("attack", ["sign-flip", "noise", "scaled", "ipm", "silent"])
def test_among_like_clients_it_learns_in_spite_of_attackers(make, attack):
    """10 friends of which 3 attack. Plain averaging is carried off by some such attacks (test below)."""
    problem = attacked(attack)
    s = play(make(step=1.0, **told(make, attackers=3)), problem, 20)
    assert problem.measure(make().view(s))["test_accuracy"] > 0.8


@pytest.mark.parametrize("attack", ["sign-flip", "ipm"])
def test_and_plain_averaging_does_not(attack):
    problem = friends(WIDE, **TINY, attack=attack, attackers=3, strength=4.0)
    method = fedavg(step=0.5, local_steps=1, batch="all", weights="uniform")
    assert problem.measure(method.view(play(method, problem, 40)))["test_accuracy"] < 0.7


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            krum(attackers=2),
            r"krum tolerates 2 attackers \(method.attackers = 2\) only among 7 clients or more, and there are 5",
        ),
        (multi_krum(attackers=0.4), r"multi-krum tolerates 2 attackers .* lower method.attackers to at most 1"),
        (trimmed_mean(attackers=3), r"trimmed-mean tolerates 3 attackers .* among 7 .* at most 2"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_more_attackers_than_it_bears_are_refused(method, text):
    with pytest.raises(UsageError, match=text):
        method.init(a_quadratic(), 5)


def test_krum_with_too_few_clients_is_refused_before_the_first_round():
    sets = {"run.method": "krum", "run.problem": "friends", "problem.clients": 2, "problem.friends": 1}
    with pytest.raises(UsageError, match=r"krum tolerates 0 attackers .* among 3 clients or more, .* are 2; use"):
        assemble(load(sets=sets))
    with pytest.raises(UsageError, match=r"attackers"):
        krum(attackers=1.5)
    with pytest.raises(UsageError, match=r"attackers"):
        trimmed_mean(attackers=0)


@every
def test_fewer_answers_than_clients_are_enough(make):
    problem = a_quadratic()
    fed = federation(problem, count=2)
    s = play(make(step=0.1, **told(make)), problem, 3, fed=fed)
    assert bool(torch.isfinite(s.x).all())
    assert fed.ledger.total.floats_up == 3 * 2 * len(problem.start)


# the attack option of problems


def small(name: str, **settings: Any) -> Any:
    make = {"friends": friends, "groups": groups, "mixture": mixture, "mean-estimation": mean_estimation}[name]
    size = {"near": 3, "far": 2, "friends": 5} if name == "mean-estimation" else {"clients": 10}
    return make(WIDE, **size, **settings)


@pytest.mark.parametrize("name", ["friends", "groups", "mixture", "mean-estimation"])
def test_the_last_clients_attack(name):
    plain, problem = small(name), small(name, attack="ipm", attackers=0.6)
    assert plain.attack is None
    assert problem.attack.honest == 4
    assert problem.friends == min(4, plain.friends)
    assert problem.best_weights is None
    assert torch.equal(problem.train.columns[-1], plain.train.columns[-1])
    fed = federation(problem)
    assert isinstance(fed.engine, Staged)
    assert fed.engine.stages == (problem.attack,)
    assert not isinstance(federation(plain).engine, Staged)


@pytest.mark.parametrize("name", ["friends", "groups", "mixture"])
def test_label_flip_reverses_the_attackers_labels_and_nothing_else(name):
    plain, problem = small(name), small(name, attack="label-flip", attackers=3)
    classes = problem.task.classes
    for k in range(10):
        before, after = (p.train.client(k).columns for p in (plain, problem))
        assert torch.equal(before[0], after[0])
        assert torch.equal(after[1], before[1] if k < 7 else classes - 1 - before[1])
    assert torch.equal(problem.test.columns[-1], plain.test.columns[-1])
    assert not isinstance(federation(problem).engine, Staged)


def test_an_attack_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match=r"label-flip needs classes"):
        small("mean-estimation", attack="label-flip")
    with pytest.raises(UsageError, match=r"problem.attackers = 20 leaves none of the 10 clients honest"):
        small("friends", attack="scaled", attackers=20)
    with pytest.raises(UsageError, match=r"problem.attackers = 0.99 leaves none"):
        small("friends", attack="scaled", attackers=0.99)
    for bad in (0, 1.5, -0.2, "many"):
        with pytest.raises(UsageError, match=r"problem\.attackers"):
            load(sets={"problem.attackers": bad})
    with pytest.raises(UsageError, match=r"problem\.attack = 'bribe'"):
        load(sets={"problem.attack": "bribe"})
    with pytest.raises(UsageError, match=r"problem\.strength"):
        load(sets={"problem.strength": -1.0})
    with pytest.raises(UsageError, match=r"federation\.clip"):
        load(sets={"federation.clip": 0.0})


def learned(attack: str, **federation_table: Any) -> Result:
    """primal-dual, 10 clients of which 5 are friends and the last 4 attack."""
    sizes = {"model": "logistic", "clients": 10, "friends": 5, "validation": 200, "attack": attack}
    steps = {"step": 0.5, "dual_step": 0.2, "outer_step": 0.02, "batch": "all"}
    tables = {"problem": sizes, "method": steps, "federation": {"mode": "vmap", **federation_table}}
    sets = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
    run = {"run.method": "primal-dual", "run.rounds": 60, "run.record": 60, "run.baselines": [], "run.threads": 1}
    return run_rounds(assemble(load(sets=sets, flags=run)), None)


def test_learned_weights_survive_a_scaling_attack_with_clipping():
    free, clipped = learned("none"), learned("scaled", clip=3.0)
    assert float(clipped.view.weights[6:].sum()) < 0.1  # of 0.4 at first
    assert clipped.summary["final"]["test_accuracy"] > free.summary["final"]["test_accuracy"] - 0.02
    assert {event["client"] for event in clipped.events} == {6, 7, 8, 9}
    assert {event["event"] for event in clipped.events} == {"clipped"}
    assert json.dumps(clipped.events[0])


def test_and_not_without():
    free, plain = learned("none"), learned("scaled")
    assert plain.summary["outcome"] != "finished" or (
        plain.summary["final"]["test_accuracy"] < free.summary["final"]["test_accuracy"] - 0.02
    )


def test_clipping_changes_nothing_where_nobody_attacks():
    assert torch.equal(learned("none").view.model, learned("none", clip=3.0).view.model)


def test_an_attacked_run_goes_on_bit_by_bit(tmp_path):
    sets = {"problem.attack": "noise", "problem.model": "logistic", "run.baselines": [], "federation.mode": "vmap"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    one = run_rounds(assemble(load(sets=sets, flags={"run.rounds": 4})), whole)
    run_rounds(assemble(load(sets=sets, flags={"run.rounds": 2})), broken)
    two = run_rounds(assemble(load(sets=sets, flags={"run.rounds": 4})), broken, resume=True)
    assert torch.equal(one.view.model, two.view.model)
    assert one.ledger.as_dict() == two.ledger.as_dict()
