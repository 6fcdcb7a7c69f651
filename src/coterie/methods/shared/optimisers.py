"""Update rules for a direction p, at the server or at clients: plain steps, heavy ball, or Adam (Kingma and Ba 2015).

sgd       x ← x − ηp
momentum  m ← βm + p,   x ← x − ηm
adam      m ← βm + (1−β)p,   v ← β₂v + (1−β₂)p²,   x ← x − η m̂/(√v̂ + ε), where m̂ and v̂ undo the start from 0
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

Rule = Literal["sgd", "momentum", "adam"]
B = TypeVar("B")
Moments = tuple[Tensor, ...]
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}
EPSILON = 1e-8


class UpdateRule(NamedTuple):
    """How a model moves along a direction: rule, step size η, momentum β and second momentum β₂.

    Example:
        >>> import torch
        >>> rule, x = UpdateRule("momentum", 0.5), torch.ones(1)
        >>> rule.move(x, torch.ones(1), rule.start(x), 1)[0]
        tensor([0.5000])
    """

    rule: Rule
    step: float
    momentum: float = 0.9
    second_momentum: float = 0.999

    def start(self, x: Tensor) -> Moments:
        """The moments before the first direction: zeros."""
        return tuple(torch.zeros_like(x) for _ in range(MOMENTS[self.rule]))

    def move(self, x: Tensor, p: Tensor, moments: Moments, t: int) -> tuple[Tensor, Moments]:
        """The model and the moments after the t-th direction, counted from 1."""
        if self.rule == "sgd":
            return x - self.step * p, ()
        b, c = self.momentum, self.second_momentum
        if self.rule == "momentum":
            m = b * moments[0] + p
            return x - self.step * m, (m,)
        m, v = b * moments[0] + (1 - b) * p, c * moments[1] + (1 - c) * p.square()
        scale = (v / (1 - c**t)).sqrt() + EPSILON
        return x - self.step * m / (1 - b**t) / scale, (m, v)

    def along(self, x: Tensor, batches: Iterable[B], slope: Callable[[Tensor, B], Tensor]) -> Tensor:
        """The model after one move per batch, against slope(x, batch)."""
        moments = self.start(x)
        for t, batch in enumerate(batches, 1):
            x, moments = self.move(x, slope(x, batch), moments, t)
        return x
