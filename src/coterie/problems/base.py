"""The seam between problems, methods and the experiment.

`Problem` is what a run needs of a problem and what methods may ask of it, with optional abilities as declared fields.
`Task` is what works may ask of a loss where the rows are. `View` is what is seen of a method's state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.federation import Attack, Batch, Federation, Ledger, Memory, Rows, Shard, Stack
from coterie.federation.work import rows_for_records
from coterie.measures import Measure, number
from coterie.numerics import Draw
from coterie.numerics.proximal import Pull, proximal_point
from coterie.settings import StatisticsPrivacy

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What a run decides for a problem: seed, numbers, device; and whether statistics of the clients are private."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    statistics: StatisticsPrivacy | None = None

    @property
    def tensor_options(self) -> dict[str, Any]:
        """The numbers and their device, as `weighting`, `Nested(…).on` and models take them."""
        return {"dtype": self.dtype, "device": self.device}


class Oracles(ABC):
    """What engines and the experiment need of every task: a typical piece of work, and its cost."""

    @property
    def offers(self) -> frozenset[str]:
        """The derivatives that works may ask for."""
        return frozenset({"gradient", "hvp"})

    @property
    @abstractmethod
    def models(self) -> Sequence[Any]:
        """The models that the losses call, which know the rest."""

    @property
    def mixes_rows(self) -> bool:
        """Whether the output for a row depends on the other rows of its batch."""
        return any(model.mixes_rows for model in self.models)

    @property
    def vmaps(self) -> bool:
        """Whether its derivatives can be taken for many clients, or at many points, at once."""
        return all(model.vmaps for model in self.models)

    @property
    def reason(self) -> str:
        """Why not, where it cannot."""
        return next((model.reason for model in self.models if not model.vmaps), "")

    @property
    def dropout(self) -> bool:
        """Whether units are dropped in training, so that batches need keys."""
        return any(model.dropout for model in self.models)

    @property
    def concurrent(self) -> bool:
        """Whether threads of this process may compute several clients at a time."""
        return True

    @abstractmethod
    def gradient(self, theta: Tensor, batch: Batch) -> Tensor:
        """∇L(θ) on a batch."""

    @abstractmethod
    def footprint(self, rows: Rows, capacity: int) -> int:
        """Bytes that the gradient of one client may need."""

    def proximal_point(self, center: Tensor, batch: Batch, pull: Pull) -> Tensor:
        """argmin L(θ) + λ/2 ‖θ − centre‖² on a batch, by gradient descent from the centre.

        Args:
            center: where θ starts and is pulled to.
            batch: the rows, the same for all steps.
            pull: λ, and how to descend.
        """
        return proximal_point(lambda theta: self.gradient(theta, batch), center, pull)

    def full(self, oracle: Callable[[Batch], Any], rows: Rows) -> Any:
        """The mean of a batch oracle over all of a holder's rows."""
        return oracle(rows.all())

    def full_gradient(self, theta: Tensor, rows: Rows) -> Tensor:
        """∇L(θ) over all rows."""
        return self.full(lambda batch: self.gradient(theta, batch), rows)


class Task(Oracles):
    """The oracles of a weighting problem: what works may ask of a loss L_k, on a batch or on all of a holder's rows.

    `model` is what θ stands for, and `classes` how many classes labels have, where they are classes.
    """

    model: Any
    classes: int | None = None

    @property
    def quadratic(self) -> bool:
        """Whether every loss is quadratic in θ, so that its curvature is the same everywhere."""
        return False

    @property
    def models(self) -> Sequence[Any]:
        """The one model."""
        return (self.model,)

    def fuse(self, name: Hashable, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function of tensors around derivatives, as one program where derivatives are compiled; else as it is.

        Args:
            name: of the function, with everything that it closes over.
            function: takes all tensors that it uses.
        """
        return function

    @abstractmethod
    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """L(θ) on a batch."""

    @abstractmethod
    def hvp(self, theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²L(θ) v on a batch."""

    def full_loss(self, theta: Tensor, rows: Rows) -> Tensor:
        """L(θ) over all rows."""
        return self.full(lambda batch: self.loss(theta, batch), rows)

    def full_loss_and_gradient(self, theta: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """L(θ) and ∇L(θ) over all rows; a task that has both by one pass overrides it."""
        return self.full_loss(theta, rows), self.full_gradient(theta, rows)

    def full_hvp(self, theta: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """∇²L(θ) v over all rows."""
        return self.full(lambda batch: self.hvp(theta, v, batch), rows)

    def measure(self, theta: Tensor, rows: Rows, prefix: str) -> dict[str, float]:
        """What the record says of θ on these rows, by names that begin with the prefix."""
        return {f"{prefix}_loss": float(self.full_loss(theta, rows))}


class Curvature(NamedTuple):
    """μ, L₁ and L₂: every L_k is μ-strongly convex, its gradient L₁-Lipschitz and its Hessian L₂-Lipschitz."""

    convex: float
    smooth: float
    hessian_lipschitz: float


class View(NamedTuple):
    """The model [d] (the outer variable x of a nested problem), client weights [K] where there are some, and the
    inner variable y of a nested problem; `more` are numbers that the method itself adds to the record. After the last
    round, `buffers` are running statistics of batch norm for the model, by name.

    Where every client is a target: one model per client, [K, d], and the collaboration matrix [K, K], row i for
    target i.
    """

    model: Tensor
    weights: Tensor | None = None
    inner: Tensor | None = None
    more: Mapping[str, Any] = MappingProxyType({})
    buffers: Mapping[str, Tensor] = MappingProxyType({})


def personal_models(models: Memory | Tensor) -> Tensor:
    """The models that clients keep, [K, d], for the record alone, not billed; a tensor stays as it is."""
    return rows_for_records(models) if isinstance(models, Memory) else models


class Exact(Protocol):
    """What is known of a solution in closed form."""

    def measure(self, view: View) -> dict[str, float]:
        """How far a view is from the solution."""


@dataclass(frozen=True)
class Problem(ABC):
    """What is minimised, with the rows of all clients. Known friends of the target come first among the clients.

    Args:
        task: the oracles that works call where the rows are.
        train: training rows of every client.
        target: the rows that define the goal, or None where there is no target.
        start: the first model, or the first outer variable, [d].
        valid: validation rows of every client, where every client is a target or a nested problem needs them.
        friends: how many of the first clients are friends of the target, where that is known.
        exact: the solution, where it is known in closed form.
        curvature: constants of the losses, where they are known.
        best_weights: the optimal client weights [K], where they are known.
        groups: the number of each client's group [K], where groups are known.
        attack: what attacking clients do, where a simulation has some.
        names: the clients' names, where they have names.
        notes: what a user should know of the data before training.
        artifacts: JSON files to be saved beside the model, by file name.
        spent: what preparing the data has already communicated.
        released: the noise multiplier of the clients' statistics, where these are private.
        declares: the measures that only this problem has, the most important first; those of `measures.STANDARD` need
            no declaration.
    """

    task: Any
    train: Stack
    target: Shard | None
    start: Tensor
    _: KW_ONLY
    valid: Stack | None = None
    friends: int | None = None
    exact: Exact | None = None
    curvature: Curvature | None = None
    best_weights: Tensor | None = None
    groups: Tensor | None = None
    attack: Attack | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    artifacts: Mapping[str, Any] = field(default_factory=dict)
    spent: Ledger | None = None
    released: float | None = None
    declares: tuple[Measure, ...] = ()

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train)

    @property
    @abstractmethod
    def offers(self) -> frozenset[str]:
        """What methods may rely on."""

    @abstractmethod
    def measure(self, view: View) -> dict[str, float]:
        """What the record says of a view."""

    def by_client(self, view: View) -> dict[str, list[float]]:
        """Measures of every client's model on rows of its own, by client; empty where clients have no such rows."""
        return {}

    def finished(self, fed: Federation, view: View) -> View:
        """The view after the last round, with what the model needs for use after training; it may ask the clients."""
        return view

    def with_test_rows(self, most: int, draw: Draw) -> "Problem":
        """The same problem with a sample of its test rows, for records of rounds that are not the last; the problem
        itself where its test rows are no more than these, or where each client has its own.

        Args:
            most: how many rows to keep.
            draw: which.
        """
        return self

    def validate(self, view: View) -> dict[str, float]:
        """The part of the measures that validation rows at the server tell of one model for all; empty without them."""
        return {}

    @abstractmethod
    def named(self, view: View) -> dict[str, Tensor]:
        """The trained tensors by name, as they are saved."""


def measured(problem: Problem, view: View) -> dict[str, float]:
    """The measures of a view as plain numbers; a measure that is no number is refused with its name."""
    return {name: number(name, value) for name, value in problem.measure(view).items()}


def known(ability: T | None, name: str) -> T:
    """An optional ability that a method declared among its needs, so that the problem has it."""
    if ability is None:
        raise TypeError(f"this problem has no {name}; the method should declare it among its needs")
    return ability
