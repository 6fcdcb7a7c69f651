"""The curvature of the clients' losses, for default steps where losses are quadratic.

A quadratic loss (`task.quadratic`: least squares on a linear model) has one curvature everywhere, so that an estimate
before the first round holds for the whole run. Methods whose steps are not set at all follow it where all clients
participate. Else the papers' steps are the defaults: the curvature of a network at its start says little about later
rounds, and a sample of clients is noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.federation import Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation
from coterie.methods.shared.works import goal_rows, own_rows
from coterie.numerics.linear import Matvec

PRODUCTS = 20  # per eigenvalue; a client's own work, no exchange
MARGIN = 1.1  # power iteration falls short of the largest eigenvalue
CONDITION = 30.0  # the largest condition number that rules assume; few rows fix no θ at all


class Curvatures(NamedTuple):
    """Largest and least curvature of the clients' losses, and largest of the target's. 0 before they are estimated."""

    largest: float = 0.0
    least: float = 0.0
    target: float = 0.0

    @property
    def condition(self) -> float:
        """κ, at least 1 and at most `CONDITION`."""
        return max(1.0, self.largest / max(self.least, self.largest / CONDITION))


def constant(fed: Federation) -> bool:
    """Whether the curvature is the same in all rounds, and may be asked for: quadratic losses, all clients participate,
    and a secure run admits two numbers of each."""
    everyone = fed.participation.probability == 1.0 and fed.participation.count is None
    admitted = fed.secure is None or fed.secure.reveal >= 2
    return fed.task.quadratic and everyone and len(fed.ids) == fed.n and admitted


@work("curvature/extremes", update=None)
def extremes(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The largest and the least eigenvalue of ∇²L_k(θ) over all rows, by power iteration: two numbers."""
    rows = goal_rows(shard) if static.goal else own_rows(shard)

    def product(v: Tensor) -> Tensor:
        return shard.task.full_hvp(shared, v, rows)

    start = draw.normal(len(shared), dtype=shared.dtype)
    largest = MARGIN * _dominant(product, start)
    return torch.stack([largest, largest - _dominant(lambda v: largest * v - product(v), start)])


def _dominant(product: Matvec, v: Tensor) -> Tensor:
    """‖Hv‖ for a unit v after `PRODUCTS` steps of power iteration, 0 where H is 0."""
    size = v.norm()
    for _ in range(PRODUCTS):
        v = product(v / size.clamp(min=torch.finfo(v.dtype).tiny))
        size = v.norm()
    return size


def curvatures(fed: Federation, theta: Tensor) -> Curvatures:
    """The estimates, rounded to two digits. One round, two numbers up per client, and one exchange with the target.

    Args:
        fed: the clients of the round.
        theta: the model.
    """
    fixed = Draw.of(0, device=theta.device).phase("curvature")  # not the run's own: every seed gets the same steps
    found, _ = fed.gather(extremes, theta, draw=fixed, goal=False)
    target = fed.ask_target(extremes, theta, draw=fixed, goal=True)[0]
    values = (float(found[:, 0].max()), max(0.0, float(found[:, 1].min())), float(target))
    largest, least, goal = (float(f"{value:.2g}") for value in values)
    return Curvatures(largest or 1.0, least, goal or 1.0)
