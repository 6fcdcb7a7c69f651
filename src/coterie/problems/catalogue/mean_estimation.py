"""`mean-estimation`: whose samples help to estimate the mean of N(0, I)? The first experiment of MeritFed (4.1).

L_k(x) = E ‖x − ξ‖²/d over a client's samples: `friends` clients hold draws from the target's N(0, I), `near` ones from
N(μ1, I) with μ = `shift`, `far` ones from N(e, I) with e drawn once from the sphere of radius `distance`. As in the
authors' code the loss is the mean over coordinates and x starts at 1/√d · 1. The target is client 0 in disguise: its
training rows are client 0's, its validation rows are drawn anew.

`geometry = "authors"` has the means of their code instead of those of the text: μ is the length of the near clients'
mean, (μ/√d)1, which is √d times closer, and e is the alternating vector ±1/√d times the distance, so that (for even d)
it is orthogonal to the start and to the near clients' mean.

What is known: the optimum 0, the excess L_0(x) − min L_0 = ‖x‖²/d, and the weights w* that minimise the expected
error of the pooled mean, E‖Σ_k w_k ξ̄_k‖² = Σ_k w_k² d/n + ‖Σ_k w_k m_k‖² with m_k the mean of client k's samples: equal
within a group.
"""

from dataclasses import dataclass
from itertools import chain, combinations
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from coterie.federation import Batch, Rows, Shard, pack
from coterie.numerics import Draw
from coterie.problems.base import Context, Task, View
from coterie.problems.catalogue.byzantine import Attackers, AttackOption, with_attackers
from coterie.problems.models import FlatModel
from coterie.problems.weighting import Weighting
from coterie.settings import Count, NonNegative, Positive

FOLD = 4  # rows that are summed side by side


class Location(nn.Module):
    """What is learned: a point. Its output is how far the inputs are from it."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.mean = nn.Parameter(start)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs − mean."""
        return inputs - self.mean


@dataclass(frozen=True)
class MeanTask(Task):
    """The oracles of L(x) = E ‖x − ξ‖²/d, in closed form: ∇L(x) = 2(x − ξ̄)/d, ∇²L = 2I/d."""

    model: FlatModel
    quadratic: bool = True

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """L(x) on a batch."""
        return _mean((theta - batch.inputs).square().mean(1), batch)

    def gradient(self, theta: Tensor, batch: Batch) -> Tensor:
        """∇L(x) on a batch."""
        return 2.0 / len(theta) * (theta - _mean(batch.inputs, batch))

    def hvp(self, theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²L v, the same everywhere."""
        return 2.0 / len(theta) * v

    def footprint(self, rows: Rows, capacity: int) -> int:
        """Bytes of all rows, twice."""
        return 2 * capacity * self.model.size * self.model.start.element_size()


def _mean(values: Tensor, batch: Batch) -> Tensor:
    """The mean over the rows of a batch; padding counts for nothing."""
    if batch.weight is not None:
        return batch.weight @ values / batch.weight.sum()
    n = len(values)
    if values.dim() == 1 or n % FOLD:
        return values.mean(0)
    # rows side by side: sums over wide rows use whole vectors of the processor
    return values.reshape(n // FOLD, -1).sum(0).reshape(FOLD, -1).sum(0) / n


@dataclass(frozen=True)
class TrueMean:
    """What is known exactly, in float64: the groups' sizes [3] and means [3, d], and the samples a client holds."""

    sizes: Tensor
    means: Tensor
    samples: int

    def error(self, w: Tensor) -> Tensor:
        """E‖Σ_k w_k ξ̄_k‖²: how far the pooled mean of all samples is from 0 in expectation."""
        w = w.double().cpu()
        return w.square().sum() * self.means.shape[1] / self.samples + (self._shares(w) @ self.means).square().sum()

    def best_weights(self) -> Tensor:
        """w*, the minimiser of the error on the simplex: a quadratic in the groups' shares."""
        spread = self.means.shape[1] / (self.samples * self.sizes)
        return (_least(torch.diag(spread) + self.means @ self.means.T) / self.sizes).repeat_interleave(self.sizes)

    def measure(self, view: View) -> dict[str, float]:
        """‖x − 0‖, the excess L_0(x) − min L_0, and the shares of the near and the far group."""
        x = view.model.double().cpu()
        measures = {"distance_to_optimum": float(x.norm()), "objective": float(x.square().mean())}
        if view.weights is not None and view.weights.dim() == 1:
            _, near, far = self._shares(view.weights.double().cpu()).tolist()
            measures |= {"near_weight": near, "far_weight": far}
        return measures

    def _shares(self, w: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in torch.split(w, self.sizes.tolist())])


def _least(M: Tensor) -> Tensor:
    """argmin of sᵀMs on the simplex, by trying every support: M is positive definite, and 3 × 3 here.

    An entry of infinity says that there is nobody in that group.
    """
    present = [i for i in range(len(M)) if bool(torch.isfinite(M[i, i]))]
    best, least = torch.zeros(len(M), dtype=M.dtype), torch.inf
    for support in chain.from_iterable(combinations(present, size) for size in range(1, len(M) + 1)):
        some = torch.tensor(support)
        z = torch.linalg.solve(M[some][:, some], torch.ones(len(some), dtype=M.dtype))
        if bool((z >= 0.0).all()) and float(1.0 / z.sum()) < least:
            best, least = torch.zeros_like(best).index_copy(0, some, z / z.sum()), float(1.0 / z.sum())
    return best


def mean_estimation(
    context: Context,
    *,
    shift: NonNegative = 0.01,
    friends: Count = 5,
    near: Annotated[int, Field(ge=0)] = 95,
    far: Annotated[int, Field(ge=0)] = 50,
    distance: NonNegative = 1.0,
    geometry: Literal["paper", "authors"] = "paper",
    dimension: Count = 10,
    samples: Count = 1000,
    validation: Count = 1000,
    attack: AttackOption = "none",
    attackers: Attackers = 0.4,
    strength: Positive | None = None,
    attack_from: Count = 1,
) -> Weighting:
    """The mean of N(0, I) from samples of friends, near and far clients; optimum and best weights are known.

    Clients 0 … friends − 1 are the friends; the near and the far clients follow.

    Args:
        shift: μ, every coordinate of the near clients' mean, or its length with geometry="authors".
        near: number of clients with a mean near 0.
        far: number of clients with mean e.
        distance: ‖e‖, distance of the far clients' mean.
        geometry: where the means are: as in the text (μ1, and e at random) or as in the authors' code (length μ, and e
            alternating).
        samples: samples per client.
        validation: fresh samples of the target that judge the weights.
        attack_from: first round in which the attackers attack.

    Example:
        >>> from coterie.problems import Context
        >>> problem = mean_estimation(Context(0), friends=2, near=2, far=1, samples=50)
        >>> problem.clients, round(float(problem.best_weights.sum()), 6)
        (5, 1.0)
    """
    draw, wide = Draw.of(context.seed).phase("mean-estimation"), torch.float64
    sizes = torch.tensor([friends, near, far])
    if geometry == "authors":
        unit = torch.full((dimension,), dimension**-0.5, dtype=wide)
        e, mu = distance * unit * (-1.0) ** torch.arange(dimension), shift * unit
    else:
        e = distance * draw.phase("far").sphere(dimension, dtype=wide)
        mu = torch.full_like(e, shift)
    means = torch.stack([torch.zeros_like(e), mu, e])
    noise = draw.phase("samples").client(torch.arange(int(sizes.sum()))).normal(samples, dimension, dtype=wide)
    rows = noise + means.repeat_interleave(sizes, dim=0)[:, None]
    held_out = draw.phase("validation").normal(validation, dimension, dtype=wide)

    options = context.tensor_options
    model = FlatModel(Location(torch.full((dimension,), dimension**-0.5))).to(**options)
    task = MeanTask(model)
    train, goal = pack([*rows]).to(**options), pack([held_out], who="target").to(**options)
    exact = TrueMean(sizes, means, samples)
    problem = Weighting(
        task,
        train,
        Shard(task, train.client(0), goal.client(0)),
        model.start,
        friends=friends,
        exact=exact,
        best_weights=exact.best_weights(),
    )
    return with_attackers(problem, attack, attackers, strength, attack_from)
