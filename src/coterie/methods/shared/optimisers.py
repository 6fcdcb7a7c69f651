"""Update rules for a direction p, at the server or at clients: plain steps, heavy ball, Adam or Yogi.

sgd       x ← x − ηp
momentum  m ← βm + p,   x ← x − ηm
adam      m ← βm + (1−β)p,   v ← β₂v + (1−β₂)p²   (Kingma and Ba 2015)
yogi      m ← βm + (1−β)p,   v ← v − (1−β₂) sign(v − p²) p²   (Zaheer et al. 2018)

Adam and Yogi move x ← x − η m̂/(√v̂ + ε), where m̂ and v̂ undo the start from 0. With an adaptivity τ they are those of
Reddi et al. 2021, Algorithm 2: v starts at τ², nothing is undone, and x ← x − η m/(√v + τ).

A server that averages takes p = x − mean of the clients' models; its rule is one value, such as "sgd" or "adam(0.01)".
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import AfterValidator
from torch import Tensor

from coterie.numerics.roots import square_root

Rule = Literal["sgd", "momentum", "adam", "yogi"]
B = TypeVar("B")
Moments = tuple[Tensor, ...]
EPSILON = 1e-8
NUMBERS: dict[str, tuple[str, ...]] = {
    "sgd": ("step",),
    "momentum": ("step", "momentum"),
    "adam": ("step", "momentum", "second_momentum", "adaptivity"),
    "yogi": ("step", "momentum", "second_momentum", "adaptivity"),
}
"""What the numbers of a rule that is written as text mean, in order."""
WRITTEN = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")


class UpdateRule(NamedTuple):
    """How a model moves along a direction: rule, step size η, momentum β, second momentum β₂ and adaptivity τ.

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
    adaptivity: float | None = None

    @staticmethod
    def of(text: str, **usual: Any) -> "UpdateRule":
        """The rule that is written as a name, with some of its numbers in parentheses; a ValueError says what is wrong.

        Args:
            text: sgd(η), momentum(η, β), adam(η, β, β₂, τ) or yogi(η, β, β₂, τ).
            usual: the fields that the text leaves out.

        Example:
            >>> UpdateRule.of("momentum(0.5)", step=1.0, momentum=0.8)[:3]
            ('momentum', 0.5, 0.8)
        """
        found = WRITTEN.fullmatch(text.replace(" ", ""))
        names = NUMBERS.get(found[1]) if found else None
        forms = ", ".join(f"{rule}({', '.join(of)})" for rule, of in NUMBERS.items())
        if found is None or names is None:
            raise ValueError(f"a rule is one of {forms}, with as many of the numbers as are wanted")
        given = found[2].split(",") if found[2] else []
        if len(given) > len(names):
            raise ValueError(f"{found[1]} takes {len(names)} numbers at most: {', '.join(names)}")
        values = {name: _number(name, number) for name, number in zip(names, given, strict=False)}
        return UpdateRule(found[1], **{**usual, **values})  # type: ignore[arg-type]

    def start(self, x: Tensor) -> Moments:
        """The moments before the first direction: zeros, and τ² for the squares where τ is set."""
        if self.rule in ("sgd", "momentum"):
            return () if self.rule == "sgd" else (torch.zeros_like(x),)
        return torch.zeros_like(x), torch.full_like(x, (self.adaptivity or 0.0) ** 2)

    def move(self, x: Tensor, p: Tensor, moments: Moments, t: int) -> tuple[Tensor, Moments]:
        """The model and the moments after the t-th direction, counted from 1."""
        if self.rule == "sgd":
            return x - self.step * p, ()
        b, c = self.momentum, self.second_momentum
        if self.rule == "momentum":
            m = b * moments[0] + p
            return x - self.step * m, (m,)
        m, squares, v = b * moments[0] + (1 - b) * p, p.square(), moments[1]
        v = c * v + (1 - c) * squares if self.rule == "adam" else v - (1 - c) * torch.sign(v - squares) * squares
        if self.adaptivity is not None:
            return x - self.step * m / (square_root(v) + self.adaptivity), (m, v)
        scale = square_root(v / (1 - c**t)) + EPSILON
        return x - self.step * m / (1 - b**t) / scale, (m, v)

    def along(self, x: Tensor, batches: Iterable[B], slope: Callable[[Tensor, B], Tensor]) -> Tensor:
        """The model after one move per batch, against slope(x, batch)."""
        moments = self.start(x)
        for t, batch in enumerate(batches, 1):
            x, moments = self.move(x, slope(x, batch), moments, t)
        return x


def _number(name: str, text: str) -> float:
    """A number of a rule, within its bounds."""
    value = float(text)
    below = math.inf if name in ("step", "adaptivity") else 1.0
    if not 0.0 <= value < below or (value == 0.0 and below == math.inf):
        bounds = "positive" if below == math.inf else "at least 0 and below 1"
        raise ValueError(f"{name} is {value:g}; it must be {bounds}")
    return value


def _checked(text: str) -> str:
    UpdateRule.of(text, step=1.0)
    return text


ServerRule = Annotated[str, AfterValidator(_checked)]
"""The type of the setting `server`: a rule as text."""


class AveragedState(NamedTuple):
    """The state of a method that averages: the common model x, and the moments of the server's rule."""

    x: Tensor
    moments: Moments


class Averaging(NamedTuple):
    """A server that moves along the difference between its model and the mean of the clients' models.

    Args:
        rule: how; with "sgd" and step size 1 the new model is the mean.
    """

    rule: UpdateRule

    @staticmethod
    def by(server: str) -> "Averaging":
        """The server with this rule; numbers that it leaves out are 1 (η), .9 (β), .99 (β₂) and .001 (τ), as in Reddi
        et al. 2021."""
        return Averaging(UpdateRule.of(server, step=1.0, momentum=0.9, second_momentum=0.99, adaptivity=1e-3))

    def start(self, x: Tensor) -> AveragedState:
        """Before the first round."""
        return AveragedState(x, self.rule.start(x))

    def move(self, s: AveragedState, mean: Tensor) -> AveragedState:
        """After a round whose clients' models have this mean."""
        if self.rule.rule == "sgd" and self.rule.step == 1.0:
            return AveragedState(mean, ())
        return AveragedState(*self.rule.move(s.x, s.x - mean, s.moments, 1))  # with τ it does not depend on t
