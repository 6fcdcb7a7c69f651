"""`meta-learning`: an initialisation x that is good after one common gradient step, as in model-agnostic meta-learning.

    r_i(x) = x − η ∇L_i(x) on client i's train rows,   y*(x) = 1/m Σ r_i(x),   f_i(y) = L_i(y) on its validation rows

A small compositional problem: ∇f(x) = (I − η∇²L(x)) ∇L_valid(y*(x)), and no client knows L. Digits, shards by class.

With shots = S > 0 it is few-shot learning instead, as in implicit model-agnostic meta-learning (Rajeswaran et al.
2019): every client is a task of its own, with its own y_k, which it keeps.

    g_k(x, y_k) = L_k(y_k) on S rows per class + ½/η ‖y_k − x‖²,       f_k(y_k) = L_k(y_k) on `queries` rows per class

A task has `classes` classes in random order, drawn from six of the ten. Test tasks have classes from the other four: x
is adapted to each as above, by gradient steps on S rows per class, and judged on its queries.
"""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie.errors import UsageError
from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.numerics.derivatives import grad
from coterie.problems.base import Context, View
from coterie.problems.data.dealt import Data, Partition, Split, deal, dense, draws, measured, source
from coterie.problems.data.examples import Examples
from coterie.problems.models import FlatModel
from coterie.problems.nested import Compositional, Nested, NestedProblem, batch_mean
from coterie.problems.tasks.variables import PerClient
from coterie.settings import Count, Positive

SEEN_CLASSES = 6  # of ten; the other four are for test tasks
ADAPTING_STEPS = 20
ADAPTATION = 0.5  # η, size of the common gradient step; with shots, 1/η is the pull towards the common start


class Adapted:
    """r: one gradient step of size η from x."""

    def __init__(self, model: FlatModel, eta: float) -> None:
        self.model, self.eta = model, eta

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """L(θ), the mean cross-entropy of a batch."""
        losses = F.cross_entropy(self.model(theta, batch.inputs), batch.labels, reduction="none")
        return batch_mean(losses, batch)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x − η ∇L(x) on a batch."""
        return x - self.eta * grad(self.loss)(x, batch)


def meta_learning(
    context: Context,
    *,
    data: Data = "digits",
    clients: Count = 10,
    partition: Partition = "shards",
    classes: Count = 2,
    alpha: Positive = 0.5,
    hidden: Count = 32,
    test: Count = 400,
    shots: Annotated[int, Field(ge=0)] = 0,
    queries: Count = 10,
    test_tasks: Count = 50,
) -> NestedProblem:
    """An initialisation that is good after one common gradient step; the adapted model is tested.

    Args:
        classes: classes per client; with shots, the classes of a task (its "ways"), at most 4.
        test: digits set aside for the test; without use with shots.
        shots: rows per class that a task adapts to; 0 for the one common step, without tasks.
        queries: rows per class that judge an adapted task.
        test_tasks: tasks with classes that no client has, for the test.

    Example:
        >>> from coterie.problems import Context
        >>> problem = meta_learning(Context(0), clients=4, hidden=8)
        >>> len(problem.start) == len(problem.inner_start)
        True
    """
    draw = draws(context, "meta-learning")
    if shots:
        return _few_shot(context, data, TaskSize(classes, shots, queries), (clients, test_tasks), hidden)
    images, held_out = source(data, test, draw.phase("test"))
    dealt = deal(images, held_out, clients, Split(partition, classes, alpha), 0.5, draw)
    model = FlatModel(dense([hidden, 10], tuple(images.x.shape[1:]), context.seed)).to(**context.tensor_options)
    adapted = Adapted(model, ADAPTATION)
    x_test, y_test = dealt.test.x.to(context.device, context.dtype), dealt.test.y.to(context.device)

    def measures(view: View) -> dict[str, float]:
        with torch.no_grad():
            outputs = model(view.model if view.inner is None else view.inner, x_test)
            return measured(outputs, y_test)

    return Compositional(adapted, adapted.loss).on(
        dealt.train,
        dealt.valid,
        x=model.start,
        y=model.start,
        measures=measures,
        **context.tensor_options,
    )


class TaskSize(NamedTuple):
    """Classes of a task, rows per class to adapt to, and rows per class to judge by."""

    ways: int
    shots: int
    queries: int


class Tasks(NamedTuple):
    """Few-shot tasks: rows to adapt to and rows to judge by, each [tasks, rows, …]."""

    support: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]

    def shards(self, rows: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """One shard per task."""
        return list(zip(*rows, strict=True))


class Adapting:
    """L, and g with its pull towards x."""

    def __init__(self, model: FlatModel, eta: float) -> None:
        self.model, self.eta = model, eta

    def outer(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """f_k = L_k(y)."""
        losses = F.cross_entropy(self.model(y, batch.inputs), batch.labels, reduction="none")
        return batch_mean(losses, batch)

    def inner(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """g_k = L_k(y) + ½/η ‖y − x‖²."""
        return self.outer(x, y, batch) + 0.5 / self.eta * (y - x).square().sum()

    def accuracy(self, x: Tensor, tasks: Tasks) -> float:
        """The mean over tasks after adapting to each."""

        def of_task(inputs: Tensor, labels: Tensor, asked: Tensor, answers: Tensor) -> Tensor:
            y, batch = x, Batch((inputs, labels))
            for _ in range(ADAPTING_STEPS):
                y = y - 0.5 * self.eta * grad(self.inner, argnums=1)(x, y, batch)
            return (self.model(y, asked).argmax(1) == answers).to(x.dtype).mean()

        return float(vmap(of_task)(*tasks.support, *tasks.query).mean())


def _few_shot(context: Context, data: str, size: TaskSize, counts: tuple[int, int], hidden: int) -> NestedProblem:
    """The few-shot problem; see the module."""
    draw = draws(context, "few-shot")
    images, _ = source(data, 1, draw.phase("test"))
    order = draw.phase("classes").permutation(10)
    seen, unseen = order[:SEEN_CLASSES], order[SEEN_CLASSES:]
    if size.ways > len(unseen):
        raise UsageError(f"problem.classes = {size.ways}, but test tasks have {len(unseen)} classes; lower it.")
    whole = Examples((images.x - images.x.mean()) / images.x.std(), images.y)
    train, test = (
        _tasks(whole, classes, n, size, draw.phase(name))
        for classes, n, name in ((seen, counts[0], "train tasks"), (unseen, counts[1], "test tasks"))
    )
    options = context.tensor_options
    model = FlatModel(dense([hidden, size.ways], tuple(images.x.shape[1:]), context.seed)).to(**options)
    adapting = Adapting(model, ADAPTATION)
    tested = Tasks(*((x.to(**options), y.to(context.device)) for x, y in test))

    def measures(view: View) -> dict[str, float]:
        return {**problem.losses(view), "test_accuracy": adapting.accuracy(view.model, tested)}

    problem = Nested(adapting.inner, adapting.outer).on(
        train.shards(train.support),
        train.shards(train.query),
        x=model.start,
        y=PerClient(model.start),
        measures=measures,
        **options,
    )
    return problem


def _tasks(images: Examples, classes: Tensor, count: int, size: TaskSize, draw: Draw) -> Tasks:
    """Tasks of some of these classes each, numbered in random order; no row is twice in a task."""
    rows = {int(c): (images.y == c).nonzero()[:, 0] for c in classes}
    needed = size.shots + size.queries
    if (fewest := min(len(of_class) for of_class in rows.values())) < needed:
        raise UsageError(
            f"problem.shots = {size.shots} and problem.queries = {size.queries} need {needed} rows of a class, and one "
            f"class has {fewest}; lower them."
        )
    inputs, labels = [], []
    for t in range(count):
        at = draw.client(t)
        chosen = classes[at.phase("classes").permutation(len(classes))[: size.ways]]
        drawn = [rows[int(c)][at.phase("rows").step(int(c)).permutation(len(rows[int(c)]))[:needed]] for c in chosen]
        inputs.append(images.x[torch.stack(drawn)])  # ways × needed × …
        labels.append(torch.arange(size.ways)[:, None].expand(size.ways, needed))
    x, y = torch.stack(inputs), torch.stack(labels)
    support, query = ((x[:, :, part].flatten(1, 2), y[:, :, part].flatten(1, 2)) for part in _parts(size))
    return Tasks(support, query)


def _parts(size: TaskSize) -> tuple[slice, slice]:
    return slice(0, size.shots), slice(size.shots, size.shots + size.queries)
