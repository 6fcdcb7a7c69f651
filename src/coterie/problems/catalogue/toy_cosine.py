"""`toy-cosine`: f_i(θ) = ½‖A_iθ − B_i‖² + cos(a_iᵀθ − b_i), the toy example of the paper on primal–dual weighting.

Components are Gaussian with variances 1/√d (A, a), 1/√m (B) and 1 (b); every f_i, the target's included, is redrawn
until it is 0.1-strongly convex, that is until A_iᵀA_i − a_ia_iᵀ ⪰ 0.1 I. F(w), ∇F(w) and θ*(w) are known: θ*(w) comes
from Newton's method to 1e-12, not from the paper's 200 gradient steps.

Noise of level σ on every estimate is made where estimates are made, by the sampling that methods do anyway. A row of a
shard is one *look* at f_i: it says whose function it is and which realisation of white noise is seen with it (ν added
to the loss, ε to the gradient, a symmetric E to the Hessian, each with standard deviation σ an entry). A batch averages
looks, so `batch = 1` has the paper's noise and two batches have independent noise; looks come in pairs ±, so the mean
over all rows, "all", is exact. Methods need not know.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.federation import Batch, Rows, Shard, pack
from coterie.numerics import Draw, project_simplex
from coterie.problems.base import Context, Curvature, Task, View
from coterie.problems.models import FlatModel
from coterie.problems.weighting import Weighting
from coterie.settings import Count, NonNegative

CONVEXITY = 0.1
PAIRS = 512
"""Realisations of the noise; each is seen with both signs."""
TRIES = 64
NEWTON_STEPS = 12
HALVINGS = 12


class Cosines(NamedTuple):
    """The functions f_0 … f_{n−1}, with Q = AᵀA, c = AᵀB and e = ½‖B‖²."""

    Q: Tensor  # [n, d, d]
    c: Tensor  # [n, d]
    e: Tensor  # [n]
    a: Tensor  # [n, d]
    b: Tensor  # [n]

    def pick(self, i: Any) -> "Cosines":
        """Some of the functions, or one."""
        return Cosines(*(tensor[i] for tensor in self))

    def value(self, theta: Tensor) -> Tensor:
        """f_i(θ) for each function."""
        return 0.5 * (self.Q @ theta) @ theta - self.c @ theta + self.e + torch.cos(self.a @ theta - self.b)

    def gradient(self, theta: Tensor) -> Tensor:
        """∇f_i(θ) for each function."""
        return self.Q @ theta - self.c - torch.sin(self.a @ theta - self.b)[..., None] * self.a

    def hvp(self, theta: Tensor, v: Tensor) -> Tensor:
        """∇²f_i(θ) v for each function."""
        return self.Q @ v - (torch.cos(self.a @ theta - self.b) * (self.a @ v))[..., None] * self.a

    def hessian(self, theta: Tensor) -> Tensor:
        """∇²f_i(θ) for each function."""
        cosine = torch.cos(self.a @ theta - self.b)[..., None, None]
        return self.Q - cosine * self.a[..., :, None] * self.a[..., None, :]


@dataclass(frozen=True)
class CosineTask(Task):
    """The oracles. A row is (whose function, which look); see the module's text for the noise."""

    functions: Cosines
    model: FlatModel
    nu: Tensor  # [PAIRS], noise of losses
    epsilon: Tensor  # [PAIRS, d], of gradients
    E: Tensor  # [PAIRS, d, d], of Hessians

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """f_i(θ) + ν."""
        return self._function(batch).value(theta) + _seen(self.nu, batch)

    def gradient(self, theta: Tensor, batch: Batch) -> Tensor:
        """∇f_i(θ) + ε."""
        return self._function(batch).gradient(theta) + _seen(self.epsilon, batch)

    def hvp(self, theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """(∇²f_i(θ) + E) v."""
        return self._function(batch).hvp(theta, v) + _seen(self.E, batch) @ v

    def full_loss(self, theta: Tensor, rows: Rows) -> Tensor:
        """f_i(θ)."""
        return self._function(_first_row(rows)).value(theta)

    def full_gradient(self, theta: Tensor, rows: Rows) -> Tensor:
        """∇f_i(θ)."""
        return self._function(_first_row(rows)).gradient(theta)

    def full_hvp(self, theta: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """∇²f_i(θ) v."""
        return self._function(_first_row(rows)).hvp(theta, v)

    def footprint(self, rows: Rows, capacity: int) -> int:
        """Bytes of a few d × d matrices."""
        return 8 * self.E[0].numel() * self.E.element_size()

    def _function(self, batch: Batch) -> Cosines:
        return self.functions.pick(batch.columns[0][0])


def _first_row(rows: Rows) -> Batch:
    return rows.take(torch.zeros(1, dtype=torch.int64, device=rows.offset.device))


def _seen(noise: Tensor, batch: Batch) -> Tensor:
    """The mean noise of a batch of looks."""
    look = batch.columns[1]
    sign = (1 - 2 * (look % 2)).to(noise.dtype)
    return torch.tensordot(sign, noise[look // 2], dims=1) / len(look)


@dataclass(frozen=True)
class ExactCosine:
    """θ*(w), F(w) and ∇F(w) in float64. The last function is the target's."""

    functions: Cosines

    @property
    def curvature(self) -> Curvature:
        """μ, L₁ and L₂ that hold for all functions everywhere."""
        f = self.functions
        outer = f.a[..., :, None] * f.a[..., None, :]
        low = torch.linalg.eigvalsh(f.Q - outer)[..., 0].min()
        high = torch.linalg.eigvalsh(f.Q + outer)[..., -1].max()
        return Curvature(float(low), float(high), float(f.a.norm(dim=-1).max() ** 3))

    def theta(self, w: Tensor) -> Tensor:
        """θ*(w): Newton's method, with the step among 1, ½, ¼ … that leaves the smallest gradient.

        Without branches, so that it can be vmapped over weights and problems.
        """
        f = self.functions.pick(slice(None, -1))
        shares = 0.5 ** torch.arange(HALVINGS, dtype=w.dtype, device=w.device)
        theta = torch.linalg.solve(torch.tensordot(w, f.Q, 1), w @ f.c)
        for _ in range(NEWTON_STEPS):
            direction = torch.linalg.solve(torch.tensordot(w, f.hessian(theta), 1), w @ f.gradient(theta))
            candidates = theta - shares[:, None] * direction
            best = vmap(lambda t: (w @ f.gradient(t)).norm())(candidates).argmin()
            theta = candidates.index_select(0, best[None])[0]
        return theta

    def objective(self, w: Tensor) -> Tensor:
        """F(w) = f_0(θ*(w))."""
        return self.functions.pick(-1).value(self.theta(w))

    def hypergradient(self, w: Tensor) -> Tensor:
        """∇F(w), by the implicit function theorem."""
        f, theta = self.functions.pick(slice(None, -1)), self.theta(w)
        adjoint = torch.linalg.solve(torch.tensordot(w, f.hessian(theta), 1), self.functions.pick(-1).gradient(theta))
        return -f.gradient(theta) @ adjoint

    def stationarity(self, w: Tensor) -> Tensor:
        """‖w − Π_Δ(w − 0.001 ∇F(w))‖, as the paper plots it."""
        return (w - project_simplex(w - 0.001 * self.hypergradient(w))).norm()

    def measure(self, view: View) -> dict[str, float]:
        """F(w) and stationarity, where weights are learned."""
        if view.weights is None or view.weights.dim() != 1:
            return {}
        w = view.weights.double().cpu()
        return {"objective": float(self.objective(w)), "stationarity": float(self.stationarity(w))}


def toy_cosine(
    context: Context,
    *,
    clients: Count = 15,
    dimension: Count = 20,
    rows: Count = 30,
    noise: NonNegative = 0.0,
) -> Weighting:
    """Quadratics with a cosine, the toy example of the primal–dual paper; F(w), ∇F(w) and θ*(w) are known.

    Use method.batch=1 to see the noise; batch="all" is exact.

    Args:
        rows: rows of each A_i.
        noise: σ, standard deviation of the noise per entry of losses, gradients and Hessians.

    Example:
        >>> from coterie.problems import Context
        >>> problem = toy_cosine(Context(0), clients=3, dimension=5)
        >>> problem.clients
        3
    """
    draw = Draw.of(context.seed).phase("toy-cosine")
    functions = strongly_convex(clients + 1, dimension, rows, draw)
    options = context.tensor_options
    net = nn.Linear(dimension, 1, bias=False)
    nn.init.zeros_(net.weight)
    model = FlatModel(net).to(**options)
    E = draw.phase("E").normal(PAIRS, dimension, dimension, dtype=torch.float64)
    task = CosineTask(
        Cosines(*(tensor.to(**options) for tensor in functions)),
        model,
        nu=(noise * draw.phase("nu").normal(PAIRS, dtype=torch.float64)).to(**options),
        epsilon=(noise * draw.phase("epsilon").normal(PAIRS, dimension, dtype=torch.float64)).to(**options),
        E=(noise * (E + E.mT) / 2**0.5).to(**options),
    )
    looks = torch.arange(2 * PAIRS)
    shards = [(torch.full_like(looks, i), looks) for i in range(clients + 1)]
    train, goal = pack(shards[:-1]).to(**options), pack(shards[-1:], who="target").to(**options)
    exact = ExactCosine(functions)
    target = Shard(task, None, goal.client(0))
    return Weighting(task, train, target, model.start, exact=exact, curvature=exact.curvature)


def strongly_convex(n: int, d: int, m: int, draw: Draw) -> Cosines:
    """n functions, each the first of its candidates that is 0.1-strongly convex."""
    found: list[Cosines | None] = [None] * n
    attempt = 0
    while any(f is None for f in found):
        for i in (i for i, f in enumerate(found) if f is None):
            tried = _candidates(d, m, draw.client(i).step(attempt))
            fine = torch.linalg.eigvalsh(tried.Q - tried.a[:, :, None] * tried.a[:, None, :])[:, 0] >= CONVEXITY
            if bool(fine.any()):
                found[i] = tried.pick(int(fine.nonzero()[0]))
        attempt += 1
    return Cosines(*(torch.stack(column) for column in zip(*filter(None, found), strict=True)))


def _candidates(d: int, m: int, draw: Draw) -> Cosines:
    """Some random functions. Variances 1/√d mean standard deviations d^(−1/4)."""
    wide = torch.float64
    A = draw.phase("A").normal(TRIES, m, d, dtype=wide) * d**-0.25
    B = draw.phase("B").normal(TRIES, m, dtype=wide) * m**-0.25
    a = draw.phase("a").normal(TRIES, d, dtype=wide) * d**-0.25
    b = draw.phase("b").normal(TRIES, dtype=wide)
    return Cosines(A.mT @ A, (A.mT @ B[..., None])[..., 0], 0.5 * B.square().sum(1), a, b)
