"""What is seen of a method's state: by problems, which measure it, and by records."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.federation import Batch, Memory, Rows
from coterie.federation.work import seen
from coterie.settings import StatisticsPrivacy


@dataclass(frozen=True)
class Context:
    """What a run decides for a problem: seed, numbers, device; and whether statistics of the clients are private."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    statistics: StatisticsPrivacy | None = None


class Task(Protocol):
    """The oracles of a weighting problem: what works may ask of a loss L_k, on a batch or on all of a holder's rows."""

    @property
    def model(self) -> Any:
        """What θ stands for."""

    @property
    def offers(self) -> frozenset[str]:
        """The derivatives there are."""

    @property
    def mixes_rows(self) -> bool:
        """Whether the output for a row depends on the other rows of its batch."""

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """L(θ) on a batch."""

    def gradient(self, theta: Tensor, batch: Batch) -> Tensor:
        """∇L(θ) on a batch."""

    def hvp(self, theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²L(θ) v on a batch."""

    def full_loss(self, theta: Tensor, rows: Rows) -> Tensor:
        """L(θ) over all rows."""

    def full_gradient(self, theta: Tensor, rows: Rows) -> Tensor:
        """∇L(θ) over all rows."""

    def full_hvp(self, theta: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """∇²L(θ) v over all rows."""

    def footprint(self, rows: Rows, capacity: int) -> int:
        """Bytes that one client's gradient may need."""

    def measure(self, theta: Tensor, rows: Rows, prefix: str) -> dict[str, float]:
        """What the record says of θ on these rows, by names that begin with the prefix."""


class View(NamedTuple):
    """The model [d] (the outer variable x of a nested problem), client weights [K] where there are some, and the
    inner variable y of a nested problem; `more` are numbers that the method itself adds to the record.

    Where every client is a target: a model a client, [K, d], and the collaboration matrix [K, K], row i of target i.
    """

    model: Tensor
    weights: Tensor | None = None
    inner: Tensor | None = None
    more: Mapping[str, Any] = MappingProxyType({})


def personal_models(memory: Memory) -> Tensor:
    """The models that clients keep, [K, d], for the record alone: nothing of them is billed."""
    models: Tensor = seen(memory)
    return models
