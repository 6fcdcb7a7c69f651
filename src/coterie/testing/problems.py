"""What every problem must keep: the same rows from the same seed, derivatives of its losses, and measures."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.federation import Batch, Call, LocalEngine, Stack, Static
from coterie.federation.local import Mode
from coterie.methods.shared.works import gradient
from coterie.numerics import Draw
from coterie.problems.base import Context, Problem, View
from coterie.problems.nested import NestedTask
from coterie.settings import checked
from coterie.testing.comparing import Check, near, passed, require
from coterie.testing.methods import BOTH

SEED = 3
STEP = 1e-4
TOLERANCE = 1e-5  # of central differences in double precision
Scalar = Callable[[Tensor], Tensor]


def check_problem(factory: Callable[..., Problem], **settings: Any) -> list[str]:
    """Check that a problem keeps what methods and engines rely on; the names of the checks that it passed.

    A check that fails raises `ConformanceError`, an AssertionError that names the check, what was found and the
    remedy.

    Args:
        factory: a function of a `Context` and of keyword-only settings, as `run.problem` takes it.
        settings: settings that make it small.

    Example:
        >>> from coterie.problems.catalogue.quadratic import quadratic
        >>> from coterie.testing import check_problem
        >>> check_problem(quadratic, clients=3, friends=1)[0]
        'settings have types'
    """
    return passed(getattr(factory, "__name__", "the problem"), CHECKS, partial(factory, **settings))


Make = partial[Problem]


def settings_have_types(make: Make, folder: Path) -> None:
    """The settings of a factory are keyword-only and have types and defaults."""
    checked(make.func, "problem", {})


def it_is_a_problem(make: Make, folder: Path) -> None:
    """Clients with rows, a finite start, and offers."""
    problem = make(Context(SEED))
    require(isinstance(problem, Problem), f"the factory returned a {type(problem).__name__}, no Problem")
    require(problem.clients >= 1, "there are no clients")
    require(bool((problem.train.counts > 0).all()), "a client has no training rows")
    require(problem.start.dim() == 1, f"start has shape {tuple(problem.start.shape)}, not [d]")
    require(bool(torch.isfinite(problem.start).all()), "start is not finite")
    require(bool(problem.offers), "it offers nothing")
    friends = problem.friends
    require(friends is None or 0 <= friends <= problem.clients, f"{friends} friends of {problem.clients} clients")


def numbers_have_the_type_of_the_run(make: Make, folder: Path) -> None:
    """Rows and start are made in the type that the context asks for."""
    for dtype in BOTH:
        wanted = getattr(torch, dtype)
        problem = make(Context(SEED, wanted))
        require(problem.start.dtype == wanted, f"start is of {problem.start.dtype} in a run of {dtype}")
        for column in problem.train.columns:
            fits = not column.is_floating_point() or column.dtype == wanted
            require(fits, f"a column of training rows is of {column.dtype} in a run of {dtype}")


def the_seed_makes_it(make: Make, folder: Path) -> None:
    """The same seed gives the same problem, whatever the state of PyTorch's own generator is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        one = make(Context(SEED))
        torch.manual_seed(2)
        two = make(Context(SEED))
    require(torch.equal(one.start, two.start), "start differs though the seed is the same")
    for a, b in ((one.train, two.train), (one.valid, two.valid)):
        require(_same_rows(a, b), "rows differ though the seed is the same")


def _same_rows(one: Stack | None, two: Stack | None) -> bool:
    if one is None or two is None:
        return one is two
    return torch.equal(one.counts, two.counts) and all(map(torch.equal, one.columns, two.columns))


def derivatives_are_those_of_the_losses(make: Make, folder: Path) -> None:
    """Every derivative that the task offers agrees with central differences, on all rows of the first client."""
    problem = make(Context(SEED, torch.float64))
    batch = problem.train.client(0).all()
    goal = (problem.valid or problem.train).client(0).all()
    at = _moved(problem.start, "start")
    if isinstance(problem.task, NestedTask):
        _nested(problem.task, at, _moved(problem.task.y.start, "inner"), batch, goal)
    else:
        _weighting(problem.task, problem.offers, at, batch)


def _weighting(task: Any, offers: frozenset[str], theta: Tensor, batch: Batch) -> None:
    if hasattr(task, "loss"):
        _compare(lambda p: task.loss(p, batch), theta, task.gradient(theta, batch), "gradient of loss")
    if "hvp" in offers:
        v = _direction(theta, "hvp")
        slope = (task.gradient(theta + STEP * v, batch) - task.gradient(theta - STEP * v, batch)) / (2 * STEP)
        _near(task.hvp(theta, v, batch), slope, "hvp")


def _nested(task: NestedTask, x: Tensor, y: Tensor, batch: Batch, goal: Batch) -> None:
    _compare(lambda p: task.f(p, y, goal), x, task.direct_gradient(x, y, goal), "direct_gradient, ∇_x f")
    if task.kind == "single-level":
        return
    _compare(lambda p: task.f(x, p, goal), y, task.outer_gradient(x, y, goal), "outer_gradient, ∇_y f")
    _compare(lambda p: task.g(x, p, batch), y, task.inner_gradient(x, y, batch), "inner_gradient, ∇_y g")
    _compare(lambda p: task.g(p, y, batch), x, task.inner_direct_gradient(x, y, batch), "inner_direct_gradient, ∇_x g")
    v = _direction(y, "hvp")
    ends = [task.inner_gradient(x, y + sign * STEP * v, batch) for sign in (1, -1)]
    _near(task.inner_hvp(x, y, v, batch), (ends[0] - ends[1]) / (2 * STEP), "inner_hvp, ∇²_yy g v")
    _compare(lambda p: task.inner_gradient(p, y, batch) @ v, x, task.cross(x, y, v, batch), "cross, ∇²_xy g v")


def _compare(loss: Scalar, at: Tensor, gradient: Tensor, name: str) -> None:
    """A gradient along one random direction, by central differences."""
    require(gradient.shape == at.shape, f"{name} has shape {tuple(gradient.shape)}, not {tuple(at.shape)}")
    u = _direction(at, name)
    _near(gradient @ u, (loss(at + STEP * u) - loss(at - STEP * u)) / (2 * STEP), name)


def _near(derivative: Tensor, difference: Tensor, name: str) -> None:
    scale = max(1.0, float(difference.norm()))
    near(derivative / scale, difference.detach() / scale, TOLERANCE, f"{name} and central differences")


def _moved(start: Tensor, phase: str) -> Tensor:
    return start + 0.1 * Draw.of(SEED).phase(phase).normal(len(start)).to(start)


def _direction(like: Tensor, phase: str) -> Tensor:
    v = Draw.of(SEED).phase(phase).normal(len(like)).to(like)
    return v / v.norm() if len(like) else v


def clients_run_at_once(make: Make, folder: Path) -> None:
    """All clients at once give the gradients that each of them gives alone, whatever rows are padded."""
    problem = make(Context(SEED, torch.float64))
    ids = torch.arange(min(3, problem.clients))

    def gradients(mode: Mode) -> Tensor:
        engine = LocalEngine(problem.task, problem.train, problem.valid, problem.target, mode)
        call = Call(gradient, problem.start, None, Static(batch="all"), Draw.of(SEED))
        return torch.cat([replies.values for replies in engine.execute(call, ids)])

    near(gradients("vmap"), gradients("sequential"), 1e-8, "gradients of several clients at once and alone")


def measures_are_numbers(make: Make, folder: Path) -> None:
    """`measure` gives finite numbers by name, the same each time; `named` gives every trained tensor."""
    problem = make(Context(SEED))
    view = View(problem.start, inner=getattr(problem, "inner_start", None))
    one, two = problem.measure(view), problem.measure(view)
    require(isinstance(one, Mapping), f"measure returned a {type(one).__name__}, no dict")
    for name, value in one.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number, f"the measure {name} is a {type(value).__name__}, no number")
        require(math.isfinite(value), f"the measure {name} is {value} at the start")
    require(one == two, "the same view has two measures")
    for name, tensor in problem.named(view).items():
        require(isinstance(tensor, Tensor), f"named gives a {type(tensor).__name__} for {name}, no tensor")


CHECKS: tuple[Check, ...] = (
    Check(
        "settings have types",
        settings_have_types,
        "Write def mine(context: Context, *, clients: Count = 6), each setting with a type and a default.",
    ),
    Check(
        "it is a problem",
        it_is_a_problem,
        "Return what coterie.problems.weighting(…) or coterie.Nested(…).on(…) makes.",
    ),
    Check(
        "numbers have the type of the run",
        numbers_have_the_type_of_the_run,
        "Pass dtype=context.dtype and device=context.device on.",
    ),
    Check(
        "the seed makes it",
        the_seed_makes_it,
        "Draw from torch.Generator().manual_seed(context.seed), and make modules below torch.random.fork_rng() and "
        "torch.manual_seed(context.seed).",
    ),
    Check(
        "derivatives are those of the losses",
        derivatives_are_those_of_the_losses,
        "Let losses be differentiable functions of their arguments, without randomness, .detach() or .item().",
    ),
    Check(
        "clients run at once",
        clients_run_at_once,
        "Compute means with batch.weight, which is 0 for padded rows (see batch_mean of coterie.problems.nested).",
    ),
    Check("measures are numbers", measures_are_numbers, "Return finite floats by name from measure, computed alone."),
)
