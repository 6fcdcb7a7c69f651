"""L-BFGS for many functions at once, each with its own line search and its own end.

One call of `evaluate` gives values and gradients of all functions that are not done yet, so that a federated sum costs
one exchange per step however many models are trained (Liu and Nocedal 1989; backtracking by Armijo's rule).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MEMORY = 10  # pairs of steps and changes of the gradient
SUFFICIENT = 1e-4  # of the decrease that the slope promises
SHRINK = 0.3
SHORTEST = 1e-8


class Minimum(NamedTuple):
    """Where each search ended [B, d], the value there [B], whether it converged [B], and how often was evaluated."""

    x: Tensor
    value: Tensor
    converged: Tensor
    evaluations: int


def minimise(
    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    evaluations: int = 200,
    tolerance: float = 1e-4,
    progress: float = 0.0,
) -> Minimum:
    """Minimise B functions of d variables.

    Args:
        evaluate: given points [b, d] and the numbers [b] of their functions, values [b] and gradients [b, d].
        start: the points to start from, [B, d].
        evaluations: at most so many calls of evaluate.
        tolerance: a search ends where no entry of the gradient exceeds it, or where rounding hides all progress;
        progress: or where a full step lowers the value by no more than this share of it.

    Example:
        >>> import torch
        >>> centres = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> found = minimise(lambda x, i: (((x - centres[i]) ** 2).sum(1), 2 * (x - centres[i])), torch.zeros(2, 2))
        >>> torch.allclose(found.x, centres, atol=1e-4), bool(found.converged.all())
        (True, True)
    """
    everyone = torch.arange(len(start), device=start.device)
    value, gradient = evaluate(start, everyone)
    search = _Searches(start.clone(), value, gradient, tolerance, progress)
    calls = 1
    while calls < evaluations and len(active := search.active):
        trial = search.x[active] + search.step[active, None] * search.direction[active]
        search.judge(active, trial, *evaluate(trial, active))
        calls += 1
    return Minimum(search.x, search.value, search.converged, calls)


class _Searches:
    """The state of all searches."""

    def __init__(self, x: Tensor, value: Tensor, gradient: Tensor, tolerance: float, progress: float) -> None:
        B, d = x.shape
        self.x, self.value, self.gradient, self.tolerance = x, value.clone(), gradient.clone(), tolerance
        self.moves, self.changes = x.new_zeros(B, MEMORY, d), x.new_zeros(B, MEMORY, d)
        self.inverse = x.new_zeros(B, MEMORY)  # 1/⟨move, change⟩, and 0 where there is none
        self.scale = 1.0 / gradient.norm(dim=1).clamp(min=1.0)
        self.direction = -self.scale[:, None] * gradient
        self.step = x.new_ones(B)
        self.converged = self._flat(gradient)
        self.stuck = ~torch.isfinite(value) | ~torch.isfinite(gradient).all(1)
        self.slack = 10.0 * torch.finfo(x.dtype).eps
        self.progress = max(progress, 0.1 * self.slack)

    @property
    def active(self) -> Tensor:
        """The numbers of the searches that go on."""
        return (~(self.converged | self.stuck)).nonzero()[:, 0]

    def judge(self, at: Tensor, trial: Tensor, value: Tensor, gradient: Tensor) -> None:
        """Take the trial points that are low enough, and try the others nearer."""
        slope = (self.gradient[at] * self.direction[at]).sum(1)
        slack = self.slack * self.value[at].abs().clamp(min=1.0)
        good = value <= self.value[at] + SUFFICIENT * self.step[at] * slope + slack
        good &= torch.isfinite(gradient).all(1)
        back = at[~good]
        self.step[back] *= SHRINK
        hidden = -slope[~good] <= 10.0 * slack[~good]  # by rounding, all that could be gained
        self.converged[back] = hidden
        self._begin_again(back[(self.step[back] < SHORTEST) & ~hidden])
        at, value, gradient = at[good], value[good], gradient[good]
        if not len(at):
            return
        self._remember(at, trial[good] - self.x[at], gradient - self.gradient[at])
        little = self.value[at] - value <= self.progress * self.value[at].abs().clamp(min=1e-3)
        self.x[at], self.value[at], self.gradient[at] = trial[good], value, gradient
        self.converged[at] = self._flat(gradient) | (little & (self.step[at] == 1.0))
        self.step[at] = 1.0
        self.direction[at] = self._direction(at)

    def _begin_again(self, at: Tensor) -> None:
        """Forget what led nowhere and go down the gradient; a search that did that already is stuck."""
        self.stuck[at] = ~self.inverse[at].any(1)
        self.inverse[at] = 0.0
        self.direction[at] = -self.scale[at, None] * self.gradient[at]
        self.step[at] = 1.0

    def _remember(self, at: Tensor, move: Tensor, change: Tensor) -> None:
        """Keep the newest pair where the curvature along the move is positive."""
        along = (move * change).sum(1)
        curved = along > 1e-10 * change.square().sum(1)
        at, move, change, along = at[curved], move[curved], change[curved], along[curved]
        for memory, newest in ((self.moves, move), (self.changes, change), (self.inverse, 1.0 / along)):
            memory[at] = memory[at].roll(-1, 1)
            memory[at, -1] = newest
        self.scale[at] = along / change.square().sum(1)

    def _direction(self, at: Tensor) -> Tensor:
        """−H∇f by the two loops; the negative gradient where that does not descend."""
        gradient = self.gradient[at]
        moves, changes, inverse = self.moves[at], self.changes[at], self.inverse[at]
        q, shares = gradient.clone(), []
        for i in reversed(range(MEMORY)):
            share = inverse[:, i] * (moves[:, i] * q).sum(1)
            q -= share[:, None] * changes[:, i]
            shares.append(share)
        q *= self.scale[at, None]
        for i, share in zip(range(MEMORY), reversed(shares), strict=True):
            q += (share - inverse[:, i] * (changes[:, i] * q).sum(1))[:, None] * moves[:, i]
        descends = (q * gradient).sum(1) > 0.0
        return -torch.where(descends[:, None], q, self.scale[at, None] * gradient)

    def _flat(self, gradient: Tensor) -> Tensor:
        return gradient.abs().amax(1) <= self.tolerance


__all__ = ["Minimum", "minimise"]
