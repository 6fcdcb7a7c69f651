"""What research code does: one client after the other, a module and autograd, written with some care.

Random row numbers are drawn beforehand and cost these sides nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed.scene import Shards

Gradients = Sequence[Tensor]


def load(parameters: list[nn.Parameter], theta: Tensor) -> None:
    """Copy a flat vector into a module."""
    with torch.no_grad():
        nn.utils.vector_to_parameters(theta, parameters)
        for p in parameters:
            p.data = p.data.clone()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors]).detach()


def gradients(net: nn.Module, parameters: list[nn.Parameter], x: Tensor, y: Tensor) -> Gradients:
    return torch.autograd.grad(F.cross_entropy(net(x), y), parameters)


@torch.no_grad()
def descend(parameters: list[nn.Parameter], gradient: Gradients, step: float) -> None:
    for p, g in zip(parameters, gradient, strict=True):
        p -= step * g


def fedavg(net: nn.Module, start: Tensor, shards: Shards, index: dict[int, Tensor], step: float) -> Tensor:
    """One FedAvg round over the clients in `index`, whose rows by step, [steps, batch], it holds; equal sizes."""
    parameters, total = list(net.parameters()), torch.zeros_like(start)
    for k, steps in index.items():
        x, y = shards[k]
        load(parameters, start)
        for rows in steps:
            descend(parameters, gradients(net, parameters, x[rows], y[rows]), step)
        total += flat(parameters) / len(index)
    return total


class Period(NamedTuple):
    """The steps between two averages: rows [K, τ, batch] and whether the anchor moves [K, τ]."""

    rows: Tensor
    coins: Tensor


def local_svrg(
    net: nn.Module, snapshot: nn.Module, start: Tensor, shards: Shards, plan: list[Period], step: float
) -> Tensor:
    """Local-SVRG with equal weights: two modules, one at the iterate and one at the anchor."""
    parameters, kept = list(net.parameters()), list(snapshot.parameters())
    load(parameters, start)
    anchors = [start] * len(shards)
    whole = [gradients(net, parameters, x, y) for x, y in shards]
    for period in plan:
        total = torch.zeros_like(start)
        for k, (x, y) in enumerate(shards):
            load(parameters, start)
            load(kept, anchors[k])
            for rows, coin in zip(period.rows[k], period.coins[k].tolist(), strict=True):
                some = x[rows], y[rows]
                here, there = gradients(net, parameters, *some), gradients(snapshot, kept, *some)
                fresh = gradients(net, parameters, x, y) if coin else None
                if fresh is not None:
                    anchors[k] = flat(parameters)
                    load(kept, anchors[k])
                descend(parameters, [a - b + c for a, b, c in zip(here, there, whole[k], strict=True)], step)
                whole[k] = whole[k] if fresh is None else fresh
            total += flat(parameters) / len(shards)
        start = total
    return start


def gradient_and_product(
    net: nn.Module, theta: Tensor, v: Tensor, shards: Shards, rows: Tensor, others: Tensor
) -> tuple[Tensor, Tensor]:
    """∇L_k(θ) on some rows and ∇²L_k(θ) v on others, by double backward, for every client."""
    parameters = list(net.parameters())
    load(parameters, theta)
    first, second = [], []
    parts = [part.view_as(p) for part, p in zip(v.split([p.numel() for p in parameters]), parameters, strict=True)]
    for (x, y), i, j in zip(shards, rows, others, strict=True):
        first.append(flat(gradients(net, parameters, x[i], y[i])))
        loss = F.cross_entropy(net(x[j]), y[j])
        inner = torch.autograd.grad(loss, parameters, create_graph=True)
        along = sum((g * u).sum() for g, u in zip(inner, parts, strict=True))
        second.append(flat(torch.autograd.grad(along, parameters)))
    return torch.stack(first), torch.stack(second)


def meritfed(
    start: Tensor, shards: list[Tensor], valid: Tensor, step: float, mirror_step: float, mirror_steps: int
) -> Tensor:
    """MeritFed on mean estimation by autograd, weights as a list of numbers; the model and the weights after it."""

    def slope(x: Tensor, rows: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x - rows).square().mean(1).mean(), x)[0]

    G = [slope(start, rows) for rows in shards]
    w = [torch.tensor(1.0 / len(G))] * len(G)

    def moved() -> Tensor:
        x = start.clone()
        for w_k, g in zip(w, G, strict=True):
            x -= step * w_k * g
        return x

    for _ in range(mirror_steps):
        g0 = slope(moved(), valid)
        w = [w_k * torch.exp(mirror_step * step * torch.dot(g0, g)) for w_k, g in zip(w, G, strict=True)]
        total = sum(w)
        w = [w_k / total for w_k in w]
    return torch.cat([moved(), torch.stack(w)])


class Knobs(NamedTuple):
    """FedNest: β, α, τ, N, ℓ and the ridge."""

    step: float
    outer_step: float
    steps: int
    terms: int
    lipschitz: float
    ridge: float


def fednest(
    backbone: nn.Module, head: nn.Module, start: Tensor, train: Shards, valid: Shards, index: Tensor, knobs: Knobs
) -> Tensor:
    """An epoch of FedNest over some clients by autograd: x is the backbone, y the head; index [K, τ − 1, batch]."""
    xs, ys = list(backbone.parameters()), list(head.parameters())
    sizes = [sum(p.numel() for p in part) for part in (xs, ys)]
    x0, y0 = start.split(sizes)
    load(xs, x0)
    K = len(train)

    def inner(x: Tensor, labels: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in ys)
        return F.cross_entropy(head(backbone(x)), labels) + 0.5 * knobs.ridge * penalty

    def slope(x: Tensor, labels: Tensor) -> Tensor:
        return flat(torch.autograd.grad(inner(x, labels), ys))

    load(ys, y0)
    q = sum(slope(x, labels) for x, labels in train) / K
    y1, beta = torch.zeros_like(y0), knobs.step / knobs.steps
    for (x, labels), steps in zip(train, index, strict=True):
        y = y0 - beta * q
        for rows in steps:
            load(ys, y)
            here = slope(x[rows], labels[rows])
            load(ys, y0)
            y = y - beta * (here - slope(x[rows], labels[rows]) + q)
        y1 += y / K
    load(ys, y1)

    def along(x: Tensor, labels: Tensor, v: Tensor, of: list[nn.Parameter]) -> Tensor:
        first = torch.autograd.grad(inner(x, labels), ys, create_graph=True)
        dot = sum((g * u.view_as(g)).sum() for g, u in zip(first, v.split([p.numel() for p in ys]), strict=True))
        return flat(torch.autograd.grad(dot, of))

    def goal(x: Tensor, labels: Tensor, of: list[nn.Parameter]) -> Tensor:
        return flat(torch.autograd.grad(F.cross_entropy(head(backbone(x)), labels), of))

    term = sum(goal(x, labels, ys) for x, labels in valid) / K / knobs.lipschitz
    p = torch.zeros_like(term)
    for _ in range(knobs.terms):
        p = p + term
        term = term - sum(along(x, labels, term, ys) for x, labels in train) / K / knobs.lipschitz
    h = sum(goal(*one, xs) - along(*other, p, xs) for one, other in zip(valid, train, strict=True)) / K
    return torch.cat([x0 - knobs.outer_step * h, y1])
