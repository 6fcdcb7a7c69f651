"""Nested problems over clients that keep their data. You write losses on a batch; the oracles are derived.

    bilevel        min_x 1/m Σ f_i(x, y*(x))   s.t.   y*(x) = argmin_y 1/m Σ g_i(x, y)       Nested(inner=g, outer=f)
    minimax        min_x max_y 1/m Σ f_i(x, y),   that is g_i = −f_i                         Minimax(f)
    compositional  min_x 1/m Σ f_i(1/m Σ r_j(x)),   that is g_i = ½‖y − r_i(x)‖²             Compositional(r, f)
    single-level   min_x 1/m Σ f_i(x)                                                        SingleLevel(f)

A loss is called as `g(x, y, batch)` and returns one number, the mean over the batch. x and y come as they were given
to `on`: a tensor, a module to call on inputs, or a dict of these; underneath they are flat vectors. g sees the
clients' train rows, f their validation rows (the train rows again where there are no others).

x or y may be `PerClient`: client i then has its own x_i (or y_i), which never leaves it. Both may be kept within a set.
f may have its rows at the server instead of at the clients. Methods declare which of these they support (`offer`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from numpy import ndarray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie import machine
from coterie.errors import UsageError
from coterie.federation import Batch, Rows, Shard, Stack, pack
from coterie.federation.tree import tensors
from coterie.measures import Measure, RowsOf, computed, own_measures
from coterie.numerics import Draw
from coterie.numerics.derivatives import grad, mixed_vector, vector_jacobian
from coterie.problems.base import Oracles, Problem, View
from coterie.problems.models import FlatModel
from coterie.problems.models.probing import probe
from coterie.problems.tasks.checks import examine, understands_padding, why_not_at_once
from coterie.problems.tasks.seen import Seen, seen_rows
from coterie.problems.tasks.sets import Within
from coterie.problems.tasks.variables import Flat, PerClient, Variable

Kind = Literal["bilevel", "minimax", "compositional", "single-level"]
Loss = Callable[[Any, Any, Batch], Tensor]
T = TypeVar("T")
Measures = Callable[[View], Mapping[str, float]]

OWN_X, OWN_Y, SETS, AT_SERVER = "x per client", "y per client", "sets", "validation at the server"


def offer(kind: str, features: Iterable[str] = ()) -> str:
    """What a problem of a kind offers, and a method declares; a method without support for a feature does not fit.

    Args:
        kind: "nested" or "minimax".
        features: those beside losses, variables and rows at the clients.

    Example:
        >>> offer("nested"), offer("nested", ["sets", "x per client"])
        ('nested', 'nested with sets and x per client')
    """
    named = " and ".join(sorted(features))
    return f"{kind} with {named}" if named else kind


@dataclass(frozen=True)
class NestedTask(Oracles):
    """The oracles of a nested problem on a batch, at flat x and y. ∇²_xy g is d_x × d_y."""

    kind: Kind
    x: Flat
    y: Flat
    inner: Any
    outer: Any
    mixes_rows: bool = False
    vmaps: bool = True
    reason: str = ""
    own: Literal["x", "y"] | None = None
    at_server: bool = False

    @property
    def models(self) -> list[FlatModel]:
        """The modules among the variables."""
        return [*self.x.models, *self.y.models]

    @property
    def offers(self) -> frozenset[str]:
        """What methods may rely on."""
        more = {"minimax": {"minimax"}, "single-level": {"gradient"}}.get(self.kind, set())
        return frozenset(offer(kind, self.features) for kind in ("nested", *more))

    @property
    def features(self) -> list[str]:
        """What a method must support beside the losses."""
        present = {
            OWN_X: self.own == "x",
            OWN_Y: self.own == "y",
            SETS: self.x.bounded or self.y.bounded,
            AT_SERVER: self.at_server,
        }
        return [feature for feature, there in present.items() if there]

    def g(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """g(x, y) on a batch."""
        return self.inner(self.x(x, batch.keys), self.y(y, batch.keys), batch)

    def f(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """f(x, y) on a batch."""
        return self.outer(self.x(x, batch.keys), self.y(y, batch.keys), batch)

    def inner_gradient(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """∇_y g."""
        return self._y_gradient(self.inner, x, y, batch)

    def inner_hvp(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²_yy g v, reverse over reverse: here 1.4 to 3 times as fast as forward over reverse."""
        if self._knows(self.inner):
            return self.inner.y_product(self.x.fixed(x, batch.inputs, batch.keys), self.y(y), v, batch)
        return vector_jacobian(lambda y_: self.inner_gradient(x, y_, batch), y, v)

    def cross(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²_xy g v."""
        return mixed_vector(lambda x_, y_: self.g(x_, y_, batch), x, y, v)

    def direct_gradient(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """∇_x f."""
        return grad(self.f, argnums=0)(x, y, batch)

    def inner_direct_gradient(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """∇_x g."""
        return grad(self.g, argnums=0)(x, y, batch)

    def at_fixed_x(self, x: Tensor, rows: Rows, taken: int) -> "tuple[NestedTask, Rows]":
        """The task and rows for inner steps at one x: where it pays, rows are passed through x once for all batches.

        Args:
            x: the outer variable.
            rows: the rows that batches of g are taken from.
            taken: how many rows these batches have together.
        """
        by_head = self._knows(self.inner) and getattr(self.inner, "through_x", False)
        seen = seen_rows(self.x, x, rows, taken) if by_head else None
        return (self, rows) if seen is None else (replace(self, x=Seen(self.x)), seen)

    def outer_gradient(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """∇_y f."""
        return self._y_gradient(self.outer, x, y, batch)

    def _y_gradient(self, loss: Any, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        at = self.x.fixed(x, batch.inputs, batch.keys)
        if self._knows(loss):
            return loss.y_gradient(at, self.y(y), batch)
        return grad(lambda y_: loss(at, self.y(y_, batch.keys), batch))(y)

    def _knows(self, loss: Any) -> bool:
        """Whether a loss has its derivatives by y written down (`y_gradient`, `y_product`): for one linear map."""
        return self.y.linear and hasattr(loss, "y_product")

    def gradient(self, x: Tensor, batch: Batch) -> Tensor:
        """∇f(x) of a single-level problem; elsewhere a typical piece of work, which engines time."""
        if self.kind == "single-level":
            return self.direct_gradient(x, self.y.start, batch)
        return self.inner_gradient(x, self.y.start, batch)

    def footprint(self, rows: Rows, capacity: int) -> int:
        """Bytes that one client's gradient may need: what it allocates for a row, times the rows, and a few vectors."""
        two, four = (_allocated(self, rows, n) for n in (2, 4))
        per_row = max(0, four - two) // 2 + 2 * sum(c[:1].numel() * c.element_size() for c in rows.columns)
        return capacity * per_row + 8 * (self.x.size + self.y.size) * self.x.start.element_size()


def batch_mean(values: Tensor, batch: Batch) -> Tensor:
    """The mean over a batch's rows without padding; a loss that uses it can run for clients of unequal size at once."""
    if batch.weight is None:
        return values.mean()
    return (values * batch.weight).sum() / batch.weight.sum()


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of everything that operations put out."""

    count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and to skip the compiler torch would import it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += sum(t.numel() * t.element_size() for t in tensors(out))
        return out


def _allocated(task: NestedTask, rows: Rows, n: int) -> int:
    """What a gradient on n rows allocates, freed or not."""
    batch = rows.take(torch.zeros(n, dtype=torch.int64, device=rows.offset.device))
    with _Allocations() as allocations:  # type: ignore[no-untyped-call]
        task.gradient(task.x.start, batch)
    return allocations.count


class Point(NamedTuple):
    """Where a client is, with the rows that something is measured on there."""

    x: Tensor
    y: Tensor
    batch: Batch


@dataclass(frozen=True)
class NestedProblem(Problem):
    """A nested problem with its clients' rows, its start (x in `start`, y in `inner_start`) and its measures.

    Test rows, and validation rows at the server, are a stack of one shard for all clients.
    """

    task: NestedTask
    _: KW_ONLY
    measures: Measures | None = None
    test: Stack | None = None
    server: Stack | None = None

    @property
    def inner_start(self) -> Tensor:
        """y⁰."""
        return self.task.y.start

    @property
    def offers(self) -> frozenset[str]:
        """What methods may rely on."""
        return self.task.offers

    def measure(self, view: View) -> dict[str, float]:
        """The problem's own measures, or the two mean losses where a function does not replace them."""
        measures = dict(self.measures(view)) if self.measures is not None else self.losses(view)
        measures |= {m.name: self._mean(m, view) for m in self.declares if m.of is not None}
        if self.exact is not None:
            measures |= self.exact.measure(view)
        return measures

    def with_test_rows(self, most: int, draw: Draw) -> "NestedProblem":
        """The same problem with a sample of the one test shard for all; see the base class. A function that measures
        by itself keeps the rows that it has."""
        test = self.test
        if test is None or len(test) != 1 or test.capacity <= most:
            return self
        taken = test.client(0).take(draw.subset(test.capacity, most))
        offsets, counts = torch.zeros_like(test.offsets), torch.full_like(test.counts, most)
        return replace(self, test=replace(test, columns=taken.columns, offsets=offsets, counts=counts, padding=None))

    def _mean(self, measure: Measure, view: View) -> float:
        """The mean of a measure over the clients, at the variables as the user gave them."""
        task = self.task
        stack = {"validation": self.server or self.valid, "test": self.test}.get(measure.rows)
        values = self._at_clients(
            stack, view, lambda at: computed(measure, task.x(at.x), task.y(at.y), at.batch), goal=True
        )
        return sum(values) / len(values)

    def losses(self, view: View) -> dict[str, float]:
        """1/m Σ f_i and 1/m Σ g_i at the point itself (not at y*(x)), over all rows; f on the test rows, if any."""
        task = self.task
        losses = {"outer_loss": self._at_clients(self.server or self.valid, view, lambda at: task.f(*at), goal=True)}
        if task.kind in ("bilevel", "compositional"):
            losses["inner_loss"] = self._at_clients(None, view, lambda at: task.g(*at))
        if self.test is not None:
            losses["test_loss"] = self._at_clients(self.test, view, lambda at: task.f(*at), goal=True)
        return {name: float(torch.stack(values).mean()) for name, values in losses.items()}

    def _inner(self, view: View) -> Tensor:
        return self.inner_start if view.inner is None else view.inner

    def _at_clients(self, stack: Stack | None, view: View, of: Callable[[Point], T], *, goal: bool = False) -> list[T]:
        """A function of all rows of each client, without gradients; of its train rows if it has no others.

        Args:
            stack: the rows, one shard per client, or one for all.
            view: the point.
            of: the function, at a client's point.
            goal: whether one shard for all is looked at once, where all clients are at the same point.
        """
        x, y, rows = view.model, self._inner(view), stack or self.train
        once = goal and stack is not None and len(stack) == 1 and x.dim() == y.dim() == 1
        with torch.no_grad():
            return [
                of(Point(_of_client(x, k), _of_client(y, k), rows.client(k if len(rows) > 1 else 0).all()))
                for k in range(1 if once else self.clients)
            ]

    def named(self, view: View) -> dict[str, Tensor]:
        """The tensors of x and y by name, as they are saved; those of clients in one tensor, one row per client."""
        y = {} if view.inner is None else _named(self.task.y, view.inner)
        return {**_named(self.task.x, view.model), **y}


def _of_client(value: Tensor, k: int) -> Tensor:
    """The flat variable of client k, which is its own row where every client has one."""
    return value[k] if value.dim() == 2 else value


def _named(variable: Flat, theta: Tensor) -> dict[str, Tensor]:
    if theta.dim() == 1:
        return variable.named(theta)
    rows = [variable.named(row) for row in theta]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class Nested:
    """Bilevel: inner(x, y, batch) and outer(x, y, batch), the mean losses of a batch.

    inner may be a dict of losses, for several inner problems: `inner["a"](x, y["a"], batch)` and so on, where y is a
    dict with the same names. y*(x) minimises each of them by itself; outer sees the whole y.
    """

    inner: Loss | Mapping[str, Loss]
    outer: Loss

    def on(
        self,
        train: Sequence[Any],
        valid: Sequence[Any] | None = None,
        *,
        x: Variable | PerClient,
        y: Variable | PerClient,
        **more: Any,
    ) -> NestedProblem:
        """The problem on these clients.

        Args:
            train: one shard per client, for g.
            valid: a list with one validation shard per client, for f, or one shard (a tuple of arrays) that is at the
                server; the train shards if they are not given.
            x: the start of the outer variable: a tensor, a module, or a dict of these; `PerClient(start)` where every
                client has its own, which never leaves it.
            y: the start of the inner variable, likewise.
            more: x_set (a set for x: `Box`, `Ball`, `Simplex`, a projection, or a dict of these by part), test (one
                shard, or a list with one per client, for `test_loss` and for measures with rows="test"), measures (a
                list of `coterie.Measure` beside the losses, or a function of the `View` instead of them), dtype,
                device, and `exact`, the solution where it is known.
        """
        inner = partial(_together, self.inner) if isinstance(self.inner, Mapping) else self.inner
        if isinstance(self.inner, Mapping):
            _check_names(self.inner, y)
        return _problem("bilevel", inner, self.outer, x, y, train, valid, **more)


@dataclass(frozen=True)
class Minimax:
    """f(x, y, batch), minimised over x and maximised over y; it should be strongly concave in y."""

    f: Loss

    def on(
        self, train: Sequence[Any], *, x: Variable | PerClient, y: Variable | PerClient, **more: Any
    ) -> NestedProblem:
        """The problem on these clients, a shard each; x_set and y_set may be sets, as in `Nested.on`."""
        return _problem("minimax", partial(_negated, self.f), self.f, x, y, train, None, **more)


@dataclass(frozen=True)
class Compositional:
    """f(y, batch) at the mean of r(x, batch) over the clients; y is a tensor of r's shape."""

    r: Callable[[Any, Batch], Tensor]
    f: Callable[[Tensor, Batch], Tensor]

    def on(
        self,
        train: Sequence[Any],
        valid: Sequence[Any] | None = None,
        *,
        x: Variable | PerClient,
        y: Tensor | None = None,
        **more: Any,
    ) -> NestedProblem:
        """The problem on these clients: a train shard each for r and, if given, a validation shard each for f.

        y starts at zero unless it is given.
        """
        if isinstance(y, PerClient):
            raise UsageError("y of a compositional problem is the mean of r over the clients; it cannot be PerClient.")
        value = _value_of(self.r, x, train, more)
        if y is not None and y.shape != value.shape:
            raise UsageError(
                f"r gives a tensor of shape {tuple(value.shape)}, y has {tuple(y.shape)}; make them equal."
            )
        start = torch.zeros_like(value) if y is None else y
        inner, outer = partial(_residual, self.r), partial(_of_y, self.f)
        return _problem("compositional", inner, outer, x, start, train, valid, **more)


@dataclass(frozen=True)
class SingleLevel:
    """f(x, batch): ordinary federated minimisation, for the sake of comparison."""

    f: Callable[[Any, Batch], Tensor]

    def on(self, train: Sequence[Any], *, x: Variable, **more: Any) -> NestedProblem:
        """The problem on these clients, a shard each."""
        loss = partial(_of_x, self.f)
        return _problem("single-level", loss, loss, x, torch.zeros(0), train, None, **more)


def _together(losses: Mapping[str, Loss], x: Any, y: Any, batch: Batch) -> Tensor:
    """The sum of several inner losses, each of its own part of y: their minimisers are independent of each other."""
    return torch.stack([loss(x, y[name], batch) for name, loss in losses.items()]).sum()


def _check_names(losses: Mapping[str, Loss], y: Any) -> None:
    value = y.start if isinstance(y, PerClient) else y
    parts = list(value) if isinstance(value, Mapping) else None
    if parts is None or set(parts) != set(losses):
        have = "one variable" if parts is None else f"the parts {', '.join(map(str, parts))}"
        raise UsageError(
            f"there are the inner losses {', '.join(losses)}, and y has {have}; give y as a dict with one variable "
            "for each inner loss."
        )


def _negated(f: Loss, x: Any, y: Any, batch: Batch) -> Tensor:
    return -f(x, y, batch)


def _residual(r: Callable[[Any, Batch], Tensor], x: Any, y: Tensor, batch: Batch) -> Tensor:
    """½‖y − r(x)‖²."""
    return 0.5 * (y - r(x, batch)).square().sum()


def _of_y(f: Callable[[Tensor, Batch], Tensor], x: Any, y: Tensor, batch: Batch) -> Tensor:
    return f(y, batch)


def _of_x(f: Callable[[Any, Batch], Tensor], x: Any, y: Tensor, batch: Batch) -> Tensor:
    return f(x, batch)


def _problem(
    kind: Kind,
    inner: Loss,
    outer: Loss,
    x: Variable | PerClient,
    y: Variable | PerClient,
    train: Sequence[Any],
    valid: Any,
    *,
    measures: Measures | Sequence[Measure] | None = None,
    exact: Any = None,
    dtype: machine.DtypeLike = "float32",
    device: machine.DeviceLike = "cpu",
    x_set: Within = None,
    y_set: Within = None,
    test: Any = None,
) -> NestedProblem:
    """Lay out variables and rows, and refuse losses that cannot be right."""
    options = _tensor_options(dtype, device)
    rows = pack(train).to(**options)
    at_server = valid is not None and _one_shard(valid)
    goal = None if valid is None else pack([valid] if at_server else valid, who="validation shard").to(**options)
    if goal is not None and not at_server:
        _check_count(goal, rows, "validation")
    tested = None if test is None else pack([test] if _one_shard(test) else test, who="test shard").to(**options)
    if tested is not None and not _one_shard(test):
        _check_count(tested, rows, "test")
    own = _own(kind, x, y, y_set)
    outer_variable, inner_variable = (
        Flat(_start(x), "x", x_set).to(**options),
        Flat(_start(y), "y", y_set).to(**options),
    )
    task = NestedTask(kind, outer_variable, inner_variable, inner, outer, own=own, at_server=at_server)
    if any(model.unknown for model in task.models):
        _probe(task, rows, goal)
    examine(task, rows, goal)
    if at_server:
        _check_at_server(task, goal)
    reason = why_not_at_once(task, rows, goal)
    task = replace(task, vmaps=not reason, reason=reason)
    mixes = any(model.mixes_rows for model in task.models) or not understands_padding(task, rows, goal)
    task = replace(task, mixes_rows=mixes)
    function = measures if callable(measures) else None
    held: list[RowsOf] = ["train"] if goal is None else ["validation", "train"]
    held = held if tested is None else ["test", *held]
    wanted = "validation shards or test=" if tested is None else "validation shards"
    declares = () if measures is None or callable(measures) else own_measures(measures, held, wanted)
    return NestedProblem(
        task,
        rows,
        Shard(task, None, goal.client(0)) if at_server and goal is not None else None,
        task.x.start,
        valid=None if at_server else goal,
        measures=function,
        exact=exact,
        declares=declares,
        test=tested,
        server=goal if at_server else None,
    )


def _tensor_options(dtype: machine.DtypeLike, device: machine.DeviceLike) -> dict[str, Any]:
    """Numbers and their device, checked, as tensors take them."""
    return {
        "dtype": getattr(torch, machine.checked_dtype(dtype)),
        "device": machine.checked_device(device, dtype),
    }


def _one_shard(rows: Any) -> bool:
    """Whether rows are those of one holder: an array, or a tuple of them. Those of clients are a list."""
    return isinstance(rows, Tensor) or (isinstance(rows, tuple) and all(isinstance(c, Tensor | ndarray) for c in rows))


def _check_count(rows: Stack, train: Stack, what: str) -> None:
    if len(rows) != len(train):
        one = " A tuple of arrays instead of a list is one shard for all." if len(rows) == 1 else ""
        raise UsageError(
            f"there are {len(train)} train shards but {len(rows)} {what} shards; give one of each to every client.{one}"
        )


def _start(variable: Variable | PerClient) -> Variable:
    return variable.start if isinstance(variable, PerClient) else variable


def _own(kind: Kind, x: Any, y: Any, y_set: Within) -> Literal["x", "y"] | None:
    """Which variable stays at its client; what has no meaning is refused."""
    own_x, own_y = isinstance(x, PerClient), isinstance(y, PerClient)
    if own_x and (own_y or kind == "single-level"):
        raise UsageError(
            "every variable is PerClient, so that the clients have nothing in common; share x or y, or train each "
            "client by itself."
        )
    if y_set is not None and kind != "minimax":
        raise UsageError(
            f"y_set is for minimax problems. In a {kind} problem ∇_y g(x, y*(x)) = 0 gives the hypergradient, and that "
            "fails at the boundary of a set; add a penalty to the inner loss, or write y as a function of a free "
            "variable (softmax, sigmoid)."
        )
    return "x" if own_x else "y" if own_y else None


def _check_at_server(task: NestedTask, goal: Stack | None) -> None:
    """Where f is at the server, it cannot see what stays at a client."""
    if task.kind not in ("bilevel", "compositional"):
        raise UsageError(f"a {task.kind} problem has no validation rows; leave out valid.")
    assert goal is not None
    x = task.x.start.clone().requires_grad_()
    value = task.f(x, task.y.start.clone().requires_grad_(), goal.client(0).all())
    uses_x = torch.autograd.grad(value, x, allow_unused=True)[0] is not None
    if task.own == "y" or (task.own == "x" and uses_x):
        raise UsageError(
            f"the validation rows are at the server, and the outer loss needs {task.own}, which stays at each client; "
            "give a list with one validation shard per client."
        )


def _probe(task: NestedTask, train: Stack, valid: Stack | None) -> None:
    """Find dropout and attention among the modules, and refuse modules that keep state."""

    def few(rows: Stack) -> Batch:
        return rows.client(0).take(torch.zeros(2, dtype=torch.int64, device=rows.counts.device))

    def run() -> None:
        task.f(task.x.start, task.y.start, few(train if valid is None else valid))
        if task.kind != "single-level":
            task.g(task.x.start, task.y.start, few(train))

    try:
        probe(task.models, run)
    except UsageError:
        raise
    except Exception:
        return  # `examine` explains losses that fail


def _value_of(
    r: Callable[[Any, Batch], Tensor], x: Variable | PerClient, train: Sequence[Any], more: dict[str, Any]
) -> Tensor:
    """r at the start, on the first client: it tells the shape of y."""
    options = _tensor_options(more.get("dtype", "float32"), more.get("device", "cpu"))
    flat = Flat(_start(x), "x").to(**options)
    value = r(flat(flat.start), pack(train[:1]).to(**options).client(0).all())
    if not isinstance(value, Tensor):
        raise UsageError(f"r returned a {type(value).__name__} on client 0; return the tensor that y should equal.")
    return value.detach()
