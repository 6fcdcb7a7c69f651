"""What every registered method must keep, on small problems that it fits. Registering a method puts it in here."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.errors import UsageError
from coterie.experiment import checkpoint
from coterie.experiment.build import Parts, assemble, federate
from coterie.experiment.config import Config, resolve
from coterie.experiment.loop import Result, run_rounds
from coterie.federation.shards import Stack
from coterie.federation.tree import named_leaves, tree_flatten
from coterie.federation.work import Memory
from coterie.methods.registry import METHODS, MethodEntry, method_entry
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.registry import PROBLEMS, problem_entry
from coterie.settings import checked

SMALL: dict[str, dict[str, Any]] = {
    "quadratic": {"clients": 5, "friends": 2, "dimension": 4, "rows": 12},
    "friends": {"model": "logistic", "clients": 5, "friends": 2, "validation": 30, "test": 1600, "everyone": True},
}

TINY: dict[str, dict[str, Any]] = {
    "submodels": {"clients": 5, "rows": 10, "test": 50, "public": 40, "capacities": [1.0, 0.5, 0.25], "width": 4},
}
"""Problems for methods that fit none of the above."""

FEW = {"local_steps": 2}
DISTILLERS = ("feddf", "ds-fl", "fed-et")
DISTIL = {**FEW, "distil_steps": 2, "distil_rows": 8}
QUICK: dict[str, dict[str, Any]] = {
    "pfedme": {"local_steps": 2, "inner_steps": 3},
    **dict.fromkeys(("heterofl", "federated-dropout", "fedrolex", "homogeneous", "zerofl", "flash"), FEW),
    **dict.fromkeys(DISTILLERS, DISTIL),
    "fedsep-submodel": {**FEW, "decode_steps": 2},
    "feddst": {**FEW, "readjust": 2},
}
"""Settings that only save time."""

MISFITS = {("exact-gd", "friends"): "the Hessian of logistic regression without a penalty is singular"}


def size(problem: str) -> dict[str, Any]:
    """Settings that make a problem small: those above, or else few clients."""
    few = {"clients": 5} if "clients" in signature(problem_entry(problem).make).parameters else {}
    return SMALL.get(problem) or TINY.get(problem, few)


WEIGHTS = frozenset({"gradient", "hvp", "target"})
OFFERS: dict[str, frozenset[str]] = {
    "quadratic": WEIGHTS | {"friends", "optimal-weights"},
    "friends": WEIGHTS | {"friends", "groups", "everyone"},
    "nested-quadratic": frozenset({"nested"}),
    "minimax-quadratic": frozenset({"nested", "minimax"}),
    "submodels": frozenset({"gradient", "hvp", "submodels", "public"}),
}
"""What the problems above offer, written down so that collecting tests builds none of them; a test compares."""


def offers(problem: str) -> frozenset[str]:
    """What a problem offers at its small size."""
    return OFFERS.get(problem, frozenset())


@pytest.mark.parametrize("problem", OFFERS)
def test_the_table_of_offers_is_that_of_the_problems(problem: str) -> None:
    assert problem_entry(problem).make(Context(), **size(problem)).offers == OFFERS[problem]


def problems_for(entry: MethodEntry) -> list[str]:
    """The small problems that a method fits, or else the first registered one."""
    method = entry.make()
    small = [name for name in SMALL if method.fits(offers(name)) and (entry.name, name) not in MISFITS]
    return small or [p.name for p in PROBLEMS if p.name not in SMALL and method.fits(offers(p.name))][:1]


@dataclass(frozen=True)
class Case:
    """A method on a problem."""

    method: str
    problem: str

    def config(self, *, rounds: int = 3, dtype: str = "float64", full: bool = False, **federation: Any) -> Config:
        return resolve(
            {
                "run": {
                    "method": self.method,
                    "problem": self.problem,
                    "rounds": rounds,
                    "dtype": dtype,
                    "threads": 1,
                    "baselines": [],
                },
                "method": {**QUICK.get(self.method, {}), **(full_batches(self.method) if full else {})},
                "problem": size(self.problem),
                "federation": {"mode": "vmap", **federation},
            }
        )

    def run(self, **settings: Any) -> Result:
        return run_rounds(assemble(self.config(**settings)), None)


def full_batches(method: str) -> dict[str, str]:
    """batch = "all" wherever a method has such a setting and takes that."""
    make, settings = method_entry(method).make, {}
    for name in signature(make).parameters:
        if name.endswith("batch") or name == "anchor":
            with suppress(UsageError):
                checked(make, "method", {name: "all"})
                settings[name] = "all"
    return settings


CASES = [Case(entry.name, problem) for entry in METHODS for problem in problems_for(entry)]
FIRST = [Case(entry.name, problem) for entry in METHODS for problem in problems_for(entry)[:1]]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}-{case.problem}")
first = pytest.mark.parametrize("case", FIRST, ids=lambda case: case.method)


def values(state: Any) -> Iterator[tuple[str, Any]]:
    """Everything in a state, what clients remember too."""
    for name, leaf in named_leaves(state):
        if isinstance(leaf, Memory):
            for inner, tensor in named_leaves(leaf.payload):
                yield f"{name}@{inner}", tensor
        else:
            yield name, leaf


def assert_same(one: Any, two: Any) -> None:
    """Equal to the last bit."""
    a, b = dict(values(one)), dict(values(two))
    assert a.keys() == b.keys()
    for name in a:
        if isinstance(a[name], torch.Tensor):
            assert a[name].dtype == b[name].dtype, name
            assert torch.equal(a[name], b[name]), name
        else:
            assert a[name] == b[name], name


def assert_near(one: Any, two: Any, tolerance: float) -> None:
    a, b = dict(values(one)), dict(values(two))
    assert a.keys() == b.keys()
    for name in a:
        if isinstance(a[name], torch.Tensor):
            torch.testing.assert_close(
                a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_on_simplex(weights: torch.Tensor, tolerance: float) -> None:
    assert bool((weights >= 0.0).all())
    assert float((weights.double().sum(-1) - 1.0).abs().max()) < tolerance


def test_every_method_is_named_as_registered_and_has_a_problem() -> None:
    names = [entry.name for entry in METHODS]
    assert len(set(names)) == len(names)
    assert [entry.make().name for entry in METHODS] == names
    assert [entry.name for entry in METHODS if not problems_for(entry)] == []


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_settings_are_checked_and_kept(entry: MethodEntry) -> None:
    assert dict(entry.make().settings) == checked(entry.make, "method", {})
    with pytest.raises(UsageError, match="stepp"):
        entry.make(stepp=0.1)


@every
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_round_keeps_structure_shapes_and_type(case: Case, dtype: str) -> None:
    parts = assemble(case.config(dtype=dtype))
    state = parts.method.init(parts.problem, parts.fed.n)
    assert isinstance(state, tuple)
    assert hasattr(state, "_fields")
    draw = Draw.of(0).round(0)
    after = parts.method.round(parts.fed.begin(1, draw), state, draw)
    assert type(after) is type(state)
    assert tree_flatten(after)[1] == tree_flatten(state)[1]
    a, b = dict(values(state)), dict(values(after))
    assert a.keys() == b.keys()
    for name in a:
        assert type(a[name]) is type(b[name]), name
        if isinstance(a[name], torch.Tensor):
            assert a[name].shape == b[name].shape, name
            assert a[name].dtype == b[name].dtype, name
            assert not a[name].is_floating_point() or a[name].dtype == getattr(torch, dtype), name
    assert parts.method.view(after).model.dtype == getattr(torch, dtype)
    moved = any(not torch.equal(a[n], b[n]) for n in a if isinstance(a[n], torch.Tensor))
    assert moved, "a round left everything as it was"


@first
def test_a_checkpoint_gives_the_state_back_bit_by_bit(case: Case, tmp_path: Path) -> None:
    parts = assemble(case.config(active=0.7))
    state = run_rounds(parts, None).state
    progress = checkpoint.Progress(3, 0.5, parts.fed.ledger.as_dict(), {"metrics.jsonl": 7})
    checkpoint.save(tmp_path, state, progress, parts.config.settings())
    template = parts.method.init(parts.problem, parts.fed.n)
    found, read, complaints = checkpoint.load(tmp_path, template, parts.config.settings())
    assert complaints == []
    assert read == progress
    assert type(found) is type(state)
    assert_same(found, state)


def recorded(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


@every
def test_an_interrupted_run_goes_on_bit_by_bit(case: Case, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    config = case.config(rounds=6, active=0.7, dtype="float32")
    one = run_rounds(assemble(config), whole)
    run_rounds(assemble(config.with_run(rounds=3)), broken)
    two = run_rounds(assemble(config), broken, resume=True)
    assert_same(one.state, two.state)
    for name in ("weights.csv", "model.safetensors", "ledger.json"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name
    assert one.ledger.as_dict() == two.ledger.as_dict()
    assert [line["round"] for line in recorded(whole)] == list(range(7))
    assert recorded(whole) == recorded(broken)
    assert [{**line, "seconds": 0} for line in two.history] == recorded(whole)


@every
def test_engines_agree_in_values_and_ledger(case: Case) -> None:
    # Adam divides by the size of a gradient: where that is nearly 0, single precision would compare rounding errors
    dtype = "float64" if case.method in DISTILLERS else "float32"
    one, two = (case.run(dtype=dtype, mode=mode, active=0.8) for mode in ("vmap", "sequential"))
    assert_near(one.state, two.state, 1e-5)
    assert one.ledger.as_dict() == two.ledger.as_dict()


@pytest.mark.chunk_free
@first
@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_chunks_do_not_change_a_bit(case: Case, mode: str) -> None:
    settings = {"rounds": 2 if mode == "vmap" else 1, "dtype": "float32", "mode": mode}
    whole = case.run(**settings, chunk=1000)
    for chunk in (1, 2, 3) if mode == "vmap" else (2,):
        part = case.run(**settings, chunk=chunk)
        assert_same(whole.state, part.state)
        assert whole.ledger.as_dict() == part.ledger.as_dict()


def permuted(stack: Stack | None, order: list[int]) -> Stack | None:
    """The same shards, packed anew in another order."""
    if stack is None:
        return None
    rows = [stack.client(k) for k in order]
    counts = torch.stack([r.count for r in rows])
    columns = tuple(torch.cat([r.columns[j] for r in rows]) for j in range(len(stack.columns)))
    return Stack(columns, counts.cumsum(0) - counts, counts)


@first
def test_permuting_clients_permutes_their_weights(case: Case) -> None:
    parts = assemble(case.config(full=True))
    if "friends" in parts.method.needs:
        pytest.skip("knows the friends by their numbers")
    result = run_rounds(parts, None)
    other = run_rounds(parts._replace(config=parts.config.with_run(seed=1)), None)
    if not torch.equal(result.view.model, other.view.model):
        pytest.skip("draws by client number even with full batches")
    order = Draw.of(5).permutation(parts.fed.n).tolist()
    assert order != sorted(order)
    levels = getattr(parts.problem, "levels", None)  # capacities go with the clients
    problem = replace(
        parts.problem,
        train=permuted(parts.problem.train, order),
        valid=permuted(parts.problem.valid, order),
        **({} if levels is None else {"levels": levels[order]}),
    )
    fed, _ = federate(problem, parts.config.federation)
    swapped = run_rounds(Parts(parts.config, problem, parts.method, fed), None)
    model, weights = result.view.model, result.view.weights
    model = model if model.dim() == 1 else model[order]  # a model a client
    torch.testing.assert_close(swapped.view.model, model, rtol=1e-9, atol=1e-9)
    assert swapped.ledger.as_dict() == result.ledger.as_dict()
    if weights is not None:
        weights = weights[order] if weights.dim() == 1 else weights[order][:, order]
        torch.testing.assert_close(swapped.view.weights, weights, rtol=1e-9, atol=1e-9)


def test_full_batches_leave_no_draw_to_the_first_methods() -> None:
    """So that the permutation test above cannot come to skip everything."""
    for method in ("fedavg", "local-train", "meritfed"):
        parts = assemble(Case(method, "quadratic").config(full=True))
        one, two = (run_rounds(parts._replace(config=parts.config.with_run(seed=s)), None) for s in (0, 1))
        assert_same(one.state, two.state)


@first
@pytest.mark.parametrize("participation", [{"active": 0.5}, {"count": 2}], ids=["half", "two"])
def test_some_clients_are_enough(case: Case, participation: dict[str, Any]) -> None:
    full, some = case.run(), case.run(**participation)
    assert some.summary["outcome"] == "finished"
    assert some.summary["rounds"] == 3
    up = full.ledger.total.floats_up  # not down: who missed a round may be sent more
    assert some.ledger.total.floats_up < up or up == 0
    if some.view.weights is not None:
        assert_on_simplex(some.view.weights, 1e-9)


@first
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_stay_on_the_simplex(case: Case, dtype: str) -> None:
    result = case.run(rounds=6, dtype=dtype)
    assert result.summary["outcome"] == "finished"
    if result.view.weights is None:
        assert not method_entry(case.method).learns_weights or "nested" in offers(case.problem)
        return
    assert [round for round, _ in result.weights] == list(range(7))
    for _, weights in result.weights:
        assert weights.dtype == getattr(torch, dtype)
        assert_on_simplex(weights, 1e-5 if dtype == "float32" else 1e-12)


@first
def test_a_round_is_pure(case: Case) -> None:
    parts = assemble(case.config(active=0.8))
    state = run_rounds(parts, None).state
    before = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values(state)}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    draw = Draw.of(7).round(3)
    one, two = (parts.method.round(parts.fed.begin(4, draw), state, draw) for _ in range(2))
    assert_same(one, two)
    for name, value in values(state):
        assert torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name], name
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
