"""What is seen of a method's state: by problems, which measure it, and by records."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import Memory
from coterie.federation.work import seen


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
