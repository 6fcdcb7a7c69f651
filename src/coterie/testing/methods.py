"""What every method must keep. Each check is one function of a trial, a method on a problem; `check_method` runs all.

The repository's own tests call the same functions for every registered method.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from coterie.errors import UsageError
from coterie.experiment import checkpoint
from coterie.experiment.build import (
    ONLY_SIMULATED,
    Parts,
    assemble_locally,
    check_needs,
    federate,
    federate_remotely,
    run_name,
)
from coterie.experiment.config import OWN_DATA, Config, FederationTable, RunTable, checked_table
from coterie.experiment.loop import Result, run_rounds
from coterie.federation.remote import PERMISSIVE, Address, InProcess, Names, Node, node_for
from coterie.federation.shards import Stack
from coterie.federation.tree import tree_flatten
from coterie.methods.base import Method
from coterie.numerics import Draw
from coterie.plugins import modules_of
from coterie.problems.base import Context, Problem
from coterie.problems.catalogue.registry import problem_entry
from coterie.settings import checked
from coterie.testing.comparing import (
    Check,
    ConformanceError,
    assert_near,
    assert_on_simplex,
    assert_same,
    near,
    passed,
    recorded,
    require,
    values,
)
from coterie.testing.updates import watch_rounds

Dtype = Literal["float32", "float64"]
BOTH: tuple[Dtype, ...] = ("float32", "float64")

SMALL: dict[str, dict[str, Any]] = {
    "quadratic": {"clients": 5, "friends": 2, "dimension": 4, "rows": 12},
    "friends": {"model": "logistic", "clients": 5, "friends": 2, "validation": 30, "test": 1600, "everyone": True},
    "nested-quadratic": {"clients": 5},
    "minimax-quadratic": {"clients": 5},
    "submodels": {"clients": 5, "rows": 10, "test": 50, "public": 40, "capacities": [1.0, 0.5, 0.25], "width": 4},
}
"""Problems on which methods are tried, at a small size."""


class Trial(Protocol):
    """A method on a problem."""

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """The types of numbers in which the problem can be made."""

    def parts(self, *, rounds: int = 3, dtype: Dtype = "float64", full: bool = False, **federation: Any) -> Parts:
        """The live objects of a run.

        Args:
            rounds: how many rounds it has.
            dtype: the type of its numbers, one of `dtypes`.
            full: whether every batch has all rows.
            federation: settings of [federation].
        """


def settings_are_checked_and_kept(make: Callable[..., Method]) -> None:
    """A factory checks its settings, keeps them in the method, and refuses names that it does not know."""
    method = make()
    require(isinstance(method, Method), f"the factory returned a {type(method).__name__}, no Method")
    require(dict(method.settings) == checked(make, "method", {}), "Method.settings are not the factory's settings")
    try:
        make(stepp=0.1)
    except UsageError as error:
        require("stepp" in str(error), f"a setting that does not exist is refused without its name: {error}")
    else:
        raise ConformanceError("a setting that does not exist, stepp, is accepted")


def a_round_keeps_structure_shapes_and_type(trial: Trial, dtype: Dtype) -> None:
    """The state is a named tuple that a round leaves as it was, but for the numbers."""
    parts = trial.parts(dtype=dtype)
    wanted = getattr(torch, dtype)
    state = parts.method.init(parts.problem, parts.fed.n)
    require(isinstance(state, tuple) and hasattr(state, "_fields"), f"the state is a {type(state).__name__}")
    a = _copied(state)
    draw = Draw.of(0).round(0)
    after = parts.method.round(parts.fed.begin(1, draw), state, draw)
    require(type(after) is type(state), f"a round made a {type(after).__name__} of a {type(state).__name__}")
    require(tree_flatten(after)[1] == tree_flatten(state)[1], "a round changed the structure of the state")
    b = dict(values(after))
    require(a.keys() == b.keys(), f"the state has the values {sorted(a)}, and after a round {sorted(b)}")
    for name in a:
        require(type(a[name]) is type(b[name]), f"{name} was a {type(a[name]).__name__}, and is a {type(b[name])}")
        if isinstance(a[name], torch.Tensor):
            require(a[name].shape == b[name].shape, f"{name} had shape {tuple(a[name].shape)}, has {b[name].shape}")
            require(a[name].dtype == b[name].dtype, f"{name} was of {a[name].dtype}, and is of {b[name].dtype}")
            fits = not a[name].is_floating_point() or a[name].dtype == wanted
            require(fits, f"{name} is of {a[name].dtype} in a run of {dtype}")
    model = parts.method.view(after).model
    require(model.dtype == wanted, f"the model is of {model.dtype} in a run of {dtype}")
    moved = any(not torch.equal(a[n], b[n]) for n in a if isinstance(a[n], torch.Tensor))
    require(moved, "a round left everything as it was")


def a_round_is_pure(trial: Trial, active: float = 0.8) -> None:
    """A round changes nothing but what it returns: not its state in place, and no generator of random numbers."""
    parts = trial.parts(dtype=trial.dtypes[-1], active=active)
    first = parts.method.init(parts.problem, parts.fed.n)
    _changes_nothing(parts, first)
    state = run_rounds(parts, None).state
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    one, two = _changes_nothing(parts, state)
    try:
        assert_same(one, two)
    except ConformanceError as error:
        raise ConformanceError(f"the same round twice gives two results: {error}") from None
    untouched = (
        torch.equal(torch.get_rng_state(), generators[0])
        and random.getstate() == generators[1]
        and np.random.get_state()[1].tolist() == generators[2]  # type: ignore[index]
    )
    require(untouched, "a round used a random generator of the process")


def _changes_nothing(parts: Parts, state: Any) -> tuple[Any, Any]:
    before = _copied(state)
    draw = Draw.of(7).round(3)
    one, two = (parts.method.round(parts.fed.begin(4, draw), state, draw) for _ in range(2))
    for name, value in values(state):
        same = torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name]
        require(same, f"a round wrote into {name} of the state that it was given")
    return one, two


def _copied(state: Any) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values(state)}


def a_checkpoint_gives_the_state_back(trial: Trial, folder: Path) -> None:
    """Everything that the method remembers is in its state, and can be stored."""
    parts = trial.parts(dtype=trial.dtypes[-1], active=0.7)
    state = run_rounds(parts, None).state
    progress = checkpoint.Progress(3, 0.5, parts.fed.ledger.as_dict(), {"metrics.jsonl": 7})
    checkpoint.save(folder, state, progress, parts.config.settings())
    template = parts.method.init(parts.problem, parts.fed.n)
    loaded = checkpoint.load(folder, template, parts.config.settings())
    require(loaded is not None, "no checkpoint was found")
    assert loaded is not None
    found, read, complaints = loaded
    require(complaints == [], f"the checkpoint cannot be used: {complaints}")
    require(read == progress, "the progress that was stored is not the one that is read")
    require(type(found) is type(state), f"a {type(state).__name__} came back as a {type(found).__name__}")
    assert_same(found, state)


def an_interrupted_run_goes_on_bit_by_bit(trial: Trial, folder: Path) -> None:
    """Three rounds, an interruption and three more are six rounds, in every value, record and file."""
    whole, broken = folder / "whole", folder / "broken"
    whole.mkdir()
    broken.mkdir()
    settings: dict[str, Any] = {"active": 0.7, "dtype": trial.dtypes[0]}
    one = run_rounds(trial.parts(rounds=4, **settings), whole)
    run_rounds(trial.parts(rounds=2, **settings), broken)
    two = run_rounds(trial.parts(rounds=4, **settings), broken, resume=True)
    assert_same(one.state, two.state)
    for name in ("weights.csv", "model.safetensors", "ledger.json"):
        require((whole / name).read_bytes() == (broken / name).read_bytes(), f"{name} of the resumed run differs")
    require(one.ledger.as_dict() == two.ledger.as_dict(), "the ledger of the resumed run differs")
    require([line["round"] for line in recorded(whole)] == list(range(5)), "not every round was recorded")
    require(recorded(whole) == recorded(broken), "metrics.jsonl of the resumed run differs")
    require([{**line, "seconds": 0} for line in two.history] == recorded(whole), "the history differs")


def modes_agree_in_values_and_ledger(trial: Trial, dtype: Dtype = "float32") -> None:
    """vmap over clients gives what one client after the other gives."""
    one, two = (run_rounds(trial.parts(dtype=dtype, mode=mode, active=0.8), None) for mode in ("vmap", "sequential"))
    assert_near(one.state, two.state, 1e-5)
    require(one.ledger.as_dict() == two.ledger.as_dict(), "the two modes are billed differently")


def chunks_do_not_change_a_bit(trial: Trial, mode: str) -> None:
    """How many clients run at once does not matter, not in the last bit."""
    settings: dict[str, Any] = {"rounds": 2 if mode == "vmap" else 1, "dtype": trial.dtypes[0], "mode": mode}
    whole = run_rounds(trial.parts(**settings, chunk=1000), None)
    for chunk in (1, 3) if mode == "vmap" else (2,):
        part = run_rounds(trial.parts(**settings, chunk=chunk), None)
        assert_same(whole.state, part.state)
        require(whole.ledger.as_dict() == part.ledger.as_dict(), "chunks are billed differently")


def permuted(stack: Stack | None, order: list[int]) -> Stack | None:
    """The same shards, packed anew in another order."""
    if stack is None:
        return None
    rows = [stack.client(k) for k in order]
    counts = torch.stack([r.count for r in rows])
    columns = tuple(torch.cat([r.columns[j] for r in rows]) for j in range(len(stack.columns)))
    return Stack(columns, counts.cumsum(0) - counts, counts)


def permuting_clients_permutes_their_weights(trial: Trial) -> str | None:
    """Clients have no rank; the result is why this cannot be seen, where it cannot."""
    parts = trial.parts(full=True, dtype=trial.dtypes[-1])
    if "friends" in parts.method.needs:
        return "knows the friends by their numbers"
    result = run_rounds(parts, None)
    other = run_rounds(parts._replace(config=parts.config.with_run(seed=1)), None)
    if not torch.equal(result.view.model, other.view.model):
        return "draws by client number even with full batches"
    order = Draw.of(5).permutation(parts.fed.n).tolist()
    require(order != sorted(order), "the permutation is none")
    levels = getattr(parts.problem, "levels", None)  # capacities go with the clients
    train = permuted(parts.problem.train, order)
    assert train is not None
    problem = replace(
        parts.problem,
        train=train,
        valid=permuted(parts.problem.valid, order),
        **({} if levels is None else {"levels": levels[order]}),
    )
    fed, _ = federate(problem, parts.config.federation)
    swapped = run_rounds(Parts(parts.config, problem, parts.method, fed), None)
    model, weights = result.view.model, result.view.weights
    model = model if model.dim() == 1 else model[order]  # one model per client
    tolerance = 1e-9 if trial.dtypes[-1] == "float64" else 1e-4
    near(swapped.view.model, model, tolerance, "the model of permuted clients")
    require(swapped.ledger.as_dict() == result.ledger.as_dict(), "permuted clients are billed differently")
    if weights is not None:
        weights = weights[order] if weights.dim() == 1 else weights[order][:, order]
        assert swapped.view.weights is not None
        near(swapped.view.weights, weights, tolerance, "the weights of permuted clients")
    return None


def some_clients_are_enough(trial: Trial, participation: Mapping[str, Any]) -> None:
    """Rounds in which only some clients participate are rounds, and cost less."""
    dtype = trial.dtypes[-1]
    full, some = (run_rounds(trial.parts(dtype=dtype, **more), None) for more in ({}, participation))
    require(some.summary["outcome"] == "finished", f"the run {some.summary['outcome']}: {some.summary['message']}")
    require(some.summary["rounds"] == 3, f"{some.summary['rounds']} of 3 rounds were done")
    up = full.ledger.total.floats_up  # not down: who missed a round may be sent more
    require(some.ledger.total.floats_up < up or up == 0, "fewer clients uploaded as much as all of them")
    if some.view.weights is not None:
        assert_on_simplex(some.view.weights, 1e-9 if dtype == "float64" else 1e-5)


def weights_stay_on_the_simplex(trial: Trial, dtype: Dtype) -> Result:
    """Client weights, where the method has some, are probabilities in every round."""
    result = run_rounds(trial.parts(rounds=4, dtype=dtype), None)
    require(result.summary["outcome"] == "finished", f"{result.summary['outcome']}: {result.summary['message']}")
    if result.view.weights is not None:
        require([round for round, _ in result.weights] == list(range(5)), "not every round has weights")
        for _, weights in result.weights:
            require(weights.dtype == getattr(torch, dtype), f"the weights are of {weights.dtype} in a run of {dtype}")
            assert_on_simplex(weights, 1e-5 if dtype == "float32" else 1e-12)
    return result


def updates_are_what_works_declare(trial: Trial) -> None:
    """Where every loss is constantly 0, every update is 0; an iterate that is declared as a result is not."""
    watch = watch_rounds(trial.parts(dtype=trial.dtypes[-1]))
    require(watch.asked, "two rounds asked no client for anything")
    moved = ", ".join(dict.fromkeys(watch.moved))
    require(not watch.moved, f"where all losses are 0, the update of {moved} is not 0")


def nodes_give_the_local_result(trial: Trial, modules: tuple[str, ...] = ()) -> str | None:
    """At nodes of their own, which get orders as bytes, clients compute what they compute in this process.

    Args:
        trial: a method on a problem.
        modules: modules with works and named tuples, beside coterie's own.
    """
    parts = trial.parts(dtype=trial.dtypes[-1], mode="sequential", active=0.8, rounds=2)
    method, problem, config = parts.method, parts.problem, parts.config
    if method.needs & ONLY_SIMULATED:
        return "knows what only a simulation can know"
    local = run_rounds(parts, None)
    names = Names().with_modules(*modules)
    options: dict[str, Any] = {"names": names, "shares_memory": True, "policy": PERMISSIVE}
    nodes: dict[Address, Node] = {f"node{k}": node_for(problem, (k,), **options) for k in range(problem.clients)}
    fed, _ = federate_remotely(problem, config.federation, InProcess(nodes), run_name(config), modules)
    remote = run_rounds(Parts(config, problem, method, fed), None)
    outcome = remote.summary["outcome"]
    require(outcome == "finished", f"the run on nodes {outcome}: {remote.summary['message']} {remote.events[:1]}")
    require(remote.events == local.events, f"on nodes: {remote.events[:1]}")
    require(remote.ledger.by_cause == local.ledger.by_cause, "nodes are billed differently")
    assert_near(dict(values(local.state)), dict(values(remote.state, getattr(fed.engine, "recall", None))), 1e-6)
    return None


def full_batches(make: Callable[..., Method]) -> dict[str, str]:
    """batch = "all" wherever a method has such a setting and takes that."""
    settings = {}
    for name in signature(make).parameters:
        if name.endswith("batch") or name == "anchor":
            with suppress(UsageError):
                checked(make, "method", {name: "all"})
                settings[name] = "all"
    return settings


@dataclass(frozen=True)
class GivenTrial:
    """A factory of a method on a problem, or on the factory of one, which is called with a `Context`."""

    factory: Callable[..., Method]
    problem: Callable[[Context], Problem] | Problem
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Both types of numbers, or that of the problem that was given."""
        if not isinstance(self.problem, Problem):
            return BOTH
        return ("float32",) if self.problem.start.dtype == torch.float32 else ("float64",)

    def parts(self, *, rounds: int = 3, dtype: Dtype = "float64", full: bool = False, **federation: Any) -> Parts:
        """The live objects of a run."""
        given = self.problem
        problem = given if isinstance(given, Problem) else given(Context(0, getattr(torch, dtype)))
        method = self.factory(**self.settings, **(full_batches(self.factory) if full else {}))
        check_needs(method, problem, OWN_DATA)
        run = {"method": method.name, "problem": OWN_DATA, "rounds": rounds, "dtype": dtype, "threads": 1}
        table = checked_table(FederationTable, "federation", {"mode": "vmap", **federation})
        tables = (
            checked_table(RunTable, "run", {**run, "baselines": []}),
            dict(method.settings),
            dict[str, Any](),
            table,
        )
        return assemble_locally(Config(*tables), problem, method)


def _each(check: Callable[..., object], *cases: Any) -> Callable[[GivenTrial, Path], object]:
    return lambda trial, folder: [check(trial, case) for case in cases]


def _of_every_type(check: Callable[..., object]) -> Callable[[GivenTrial, Path], object]:
    return lambda trial, folder: [check(trial, dtype) for dtype in trial.dtypes]


def _alone(check: Callable[..., object]) -> Callable[[GivenTrial, Path], object]:
    return lambda trial, folder: check(trial)


CHECKS: tuple[Check, ...] = (
    Check(
        "settings are checked and kept",
        lambda trial, folder: settings_are_checked_and_kept(trial.factory),
        "Mark the factory with @validated, and let all its settings have types and defaults.",
    ),
    Check(
        "a round keeps structure, shapes and type",
        _of_every_type(a_round_keeps_structure_shapes_and_type),
        "Let the state be a NamedTuple of tensors, Memory and plain numbers, and make tensors with the dtype of "
        "problem.start.",
    ),
    Check(
        "a round is pure",
        lambda trial, folder: a_round_is_pure(trial, active=1.0),
        "Write x = x - step * g instead of x -= step * g, and draw from `draw` alone.",
    ),
    Check(
        "client weights stay on the simplex",
        _of_every_type(weights_stay_on_the_simplex),
        "Project the weights in View.weights onto the simplex (coterie.numerics.project_simplex).",
    ),
    Check(
        "some clients are enough",
        _each(some_clients_are_enough, {"active": 0.5}, {"count": 2}),
        "fed.gather returns the ids of the clients that replied; change the values of those alone.",
    ),
    Check(
        "a checkpoint gives the state back",
        a_checkpoint_gives_the_state_back,
        "Keep everything in the state: no attribute, global or closure that a round changes.",
    ),
    Check(
        "an interrupted run is resumed bit by bit",
        an_interrupted_run_goes_on_bit_by_bit,
        "Keep everything in the state, and draw from `draw`, which knows the round, alone.",
    ),
    Check(
        "both modes of the local engine agree",
        lambda trial, folder: modes_agree_in_values_and_ledger(trial, trial.dtypes[-1]),
        "Write works for one client with operations of torch: no Python branch on a tensor, no .item().",
    ),
    Check(
        "chunks do not change a bit",
        _each(chunks_do_not_change_a_bit, "vmap", "sequential"),
        "Let the result of a client depend on its own rows alone, and reduce by fed.mean or in the order of the ids.",
    ),
    Check(
        "permuting clients permutes their weights",
        _alone(permuting_clients_permutes_their_weights),
        "Use a client's number only to index what belongs to it.",
    ),
    Check(
        "updates are what works declare",
        _alone(updates_are_what_works_declare),
        "Declare update=moved_from(…) for an iterate, update=RESULT for a direction, None for a report.",
    ),
    Check(
        "nodes give the local result",
        lambda trial, folder: nodes_give_the_local_result(trial, modules_of(trial.factory.__module__)),
        "Works must be functions of a module, marked @work; send settings as keywords, tensors as shared values.",
    ),
)


def check_method(
    factory: Callable[..., Method],
    problem: Callable[[Context], Problem] | Problem | str | None = None,
    **settings: Any,
) -> list[str]:
    """Check that a method keeps what every method must keep; the names of the checks that it passed.

    A check that fails raises `ConformanceError`, an AssertionError that names the check, what was found and the
    remedy.

    Args:
        factory: the factory of the method.
        problem: a small problem that it fits: a function of a `Context`, which makes it in both types of numbers, a
            problem, or the name of one of coterie's. By default the first of coterie's small problems that it fits.
        settings: settings of the method that save time, such as local_steps=2.

    Example:
        >>> from coterie.methods import fedavg
        >>> from coterie.testing import check_method
        >>> len(check_method(fedavg, local_steps=1))
        12
    """
    made = factory(**settings)
    require(isinstance(made, Method), f"the factory returned a {type(made).__name__}; let it return a Method")
    return passed(made.name, CHECKS, GivenTrial(factory, _problem_for(made, problem), settings))


def _problem_for(method: Method, given: Any) -> Any:
    """The problem that was given, or the first small one that a method fits."""
    if given is not None and not isinstance(given, str):
        return given
    for name in SMALL if given is None else (given,):
        make = partial(_small, name)
        if given is not None or method.fits(make(Context()).offers):
            return make
    raise ConformanceError(
        f"{method.name} needs {', '.join(sorted(method.needs))}, and none of the small problems {', '.join(SMALL)} "
        "offers that; give check_method a problem"
    )


def _small(name: str, context: Context) -> Problem:
    return problem_entry(name).make(context, **SMALL.get(name, {}))
