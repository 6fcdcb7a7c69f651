"""What is seen of a method's state: by problems, which measure it, and by records."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor


class View(NamedTuple):
    """The model [d] (the outer variable x of a nested problem), client weights [K] where there are some, and the
    inner variable y of a nested problem; `more` are numbers that the method itself adds to the record."""

    model: Tensor
    weights: Tensor | None = None
    inner: Tensor | None = None
    more: Mapping[str, Any] = MappingProxyType({})
