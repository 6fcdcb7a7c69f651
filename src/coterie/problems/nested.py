"""Nested problems over clients that keep their data. You write losses on a batch; the oracles are derived.

    bilevel        min_x 1/m Σ f_i(x, y*(x))   s.t.   y*(x) = argmin_y 1/m Σ g_i(x, y)       Nested(inner=g, outer=f)
    minimax        min_x max_y 1/m Σ f_i(x, y),   that is g_i = −f_i                         Minimax(f)
    compositional  min_x 1/m Σ f_i(1/m Σ r_j(x)),   that is g_i = ½‖y − r_i(x)‖²             Compositional(r, f)
    single-level   min_x 1/m Σ f_i(x)                                                        SingleLevel(f)

A loss is called as `g(x, y, batch)` and returns one number, the mean over the batch. x and y come as they were given
to `on`: a tensor, a module to call on inputs, or a dict of these; underneath they are flat vectors. g sees the
clients' train rows, f their validation rows (the train rows again where there are no others).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.errors import UsageError
from coterie.federation import Batch, Rows, Stack, pack
from coterie.federation.tree import tensors
from coterie.measures import Measure, RowsOf, computed, own_measures
from coterie.numerics.derivatives import mixed_vector
from coterie.problems.base import Oracles, Problem, View
from coterie.problems.models import FlatModel
from coterie.problems.models.probing import probe
from coterie.problems.tasks.checks import examine, understands_padding, why_not_at_once
from coterie.problems.tasks.variables import Flat, Variable

Kind = Literal["bilevel", "minimax", "compositional", "single-level"]
Loss = Callable[[Any, Any, Batch], Tensor]
T = TypeVar("T")
Measures = Callable[[View], Mapping[str, float]]


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

    @property
    def models(self) -> list[FlatModel]:
        """The modules among the variables."""
        return [*self.x.models, *self.y.models]

    @property
    def offers(self) -> frozenset[str]:
        """What methods may rely on."""
        more = {"minimax": {"minimax"}, "single-level": {"gradient"}}.get(self.kind, set())
        return frozenset({"nested", *more})

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
        return vjp(lambda y_: self.inner_gradient(x, y_, batch), y)[1](v)[0]

    def cross(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²_xy g v."""
        return mixed_vector(lambda x_, y_: self.g(x_, y_, batch), x, y, v)

    def direct_gradient(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """∇_x f."""
        return grad(self.f, argnums=0)(x, y, batch)

    def inner_direct_gradient(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """∇_x g."""
        return grad(self.g, argnums=0)(x, y, batch)

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


@dataclass(frozen=True)
class NestedProblem(Problem):
    """A nested problem with its clients' rows, its start (x in `start`, y in `inner_start`) and its measures."""

    task: NestedTask
    _: KW_ONLY
    measures: Measures | None = None

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

    def _mean(self, measure: Measure, view: View) -> float:
        """The mean of a measure over the clients, at the variables as the user gave them."""
        x, y = self.task.x(view.model), self.task.y(self._inner(view))
        stack = self.valid if measure.rows == "validation" else None
        values = self._at_clients(stack, lambda batch: computed(measure, x, y, batch))
        return sum(values) / len(values)

    def losses(self, view: View) -> dict[str, float]:
        """1/m Σ f_i and 1/m Σ g_i at the point itself (not at y*(x)), over all rows."""
        x, y, task = view.model, self._inner(view), self.task
        losses = {"outer_loss": self._at_clients(self.valid, lambda batch: task.f(x, y, batch))}
        if task.kind in ("bilevel", "compositional"):
            losses["inner_loss"] = self._at_clients(None, lambda batch: task.g(x, y, batch))
        return {name: float(torch.stack(values).mean()) for name, values in losses.items()}

    def _inner(self, view: View) -> Tensor:
        return self.inner_start if view.inner is None else view.inner

    def _at_clients(self, stack: Stack | None, of: Callable[[Batch], T]) -> list[T]:
        """A function of all rows of each client, without gradients; of its train rows if it has no others."""
        with torch.no_grad():
            return [of((stack or self.train).client(k).all()) for k in range(self.clients)]

    def named(self, view: View) -> dict[str, Tensor]:
        """The tensors of x and y by name, as they are saved."""
        y = {} if view.inner is None else self.task.y.named(view.inner)
        return {**self.task.x.named(view.model), **y}


@dataclass(frozen=True)
class Nested:
    """Bilevel: inner(x, y, batch) and outer(x, y, batch), the mean losses of a batch."""

    inner: Loss
    outer: Loss

    def on(
        self, train: Sequence[Any], valid: Sequence[Any] | None = None, *, x: Variable, y: Variable, **more: Any
    ) -> NestedProblem:
        """The problem on these clients.

        Args:
            train: one shard per client, for g.
            valid: one validation shard per client, for f; the train shards if they are not given.
            x: the start of the outer variable: a tensor, a module, or a dict of these.
            y: the start of the inner variable.
            more: measures (a list of `coterie.Measure` beside the two losses, or a function of the `View` instead of
                them), dtype, device, and `exact`, the solution where it is known.
        """
        return _problem("bilevel", self.inner, self.outer, x, y, train, valid, **more)


@dataclass(frozen=True)
class Minimax:
    """f(x, y, batch), minimised over x and maximised over y; it should be strongly concave in y."""

    f: Loss

    def on(self, train: Sequence[Any], *, x: Variable, y: Variable, **more: Any) -> NestedProblem:
        """The problem on these clients, a shard each."""
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
        x: Variable,
        y: Tensor | None = None,
        **more: Any,
    ) -> NestedProblem:
        """The problem on these clients: a train shard each for r and, if given, a validation shard each for f.

        y starts at zero unless it is given.
        """
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
    x: Variable,
    y: Variable,
    train: Sequence[Any],
    valid: Sequence[Any] | None,
    *,
    measures: Measures | Sequence[Measure] | None = None,
    exact: Any = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> NestedProblem:
    """Lay out variables and rows, and refuse losses that cannot be right."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    rows = pack(train).to(**options)
    goal = None if valid is None else pack(valid, who="validation shard").to(**options)
    if goal is not None and len(goal) != len(rows):
        raise UsageError(
            f"there are {len(rows)} train shards but {len(goal)} validation shards; give one of each to every client."
        )
    task = NestedTask(kind, Flat(x, "x").to(**options), Flat(y, "y").to(**options), inner, outer)
    if any(model.unknown for model in task.models):
        _probe(task, rows, goal)
    examine(task, rows, goal)
    reason = why_not_at_once(task, rows, goal)
    task = replace(task, vmaps=not reason, reason=reason)
    mixes = any(model.mixes_rows for model in task.models) or not understands_padding(task, rows, goal)
    task = replace(task, mixes_rows=mixes)
    function = measures if callable(measures) else None
    held: list[RowsOf] = ["train"] if goal is None else ["validation", "train"]
    own = () if measures is None or callable(measures) else own_measures(measures, held, "validation shards")
    return NestedProblem(task, rows, None, task.x.start, valid=goal, measures=function, exact=exact, declares=own)


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


def _value_of(r: Callable[[Any, Batch], Tensor], x: Variable, train: Sequence[Any], more: dict[str, Any]) -> Tensor:
    """r at the start, on the first client: it tells the shape of y."""
    options = {"dtype": more.get("dtype", torch.float32), "device": more.get("device", "cpu")}
    flat = Flat(x, "x").to(**options)
    value = r(flat(flat.start), pack(train[:1]).to(**options).client(0).all())
    if not isinstance(value, Tensor):
        raise UsageError(f"r returned a {type(value).__name__} on client 0; return the tensor that y should equal.")
    return value.detach()
