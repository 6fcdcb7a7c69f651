"""Limits: the same arithmetic with nothing around it, written by hand for one network each.

No federation, no autograd where derivatives are easily written down, buffers used over again, row numbers drawn
beforehand. Nobody would want to maintain a library of such code; it shows what is left to gain.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed.loops import Period
from benchmarks.speed.scene import Shards


def stacked(shards: Shards) -> tuple[Tensor, Tensor]:
    """[K, n, …] inputs and [K, n] labels."""
    return torch.stack([x for x, _ in shards]), torch.stack([y for _, y in shards])


def softmax_error(logits: Tensor, labels: Tensor) -> Tensor:
    """The derivative of the mean cross-entropy by the logits, [K, n, c], in place."""
    p = torch.softmax(logits, dim=-1, out=logits)
    p.scatter_add_(2, labels[..., None], p.new_full((), -1.0).expand(*labels.shape, 1))
    return p.div_(labels.shape[1])


def logistic_fedavg(start: Tensor, x: Tensor, y: Tensor, ids: Tensor, index: Tensor, step: float) -> Tensor:
    """FedAvg of logistic regression: x [K, n, p], y [K, n], rows [clients, steps, batch]; equal sizes."""
    k, p = len(ids), x.shape[2]
    c = len(start) // (p + 1)
    W, b = (t.repeat(k, *[1] * t.dim()) for t in (start[: c * p].view(c, p), start[c * p :]))
    for t in range(index.shape[1]):
        rows, at = index[:, t], ids[:, None]
        inputs = x[at, rows]
        error = softmax_error(torch.baddbmm(b[:, None], inputs, W.mT), y[at, rows])
        W.baddbmm_(error.mT, inputs, alpha=-step)
        b.sub_(error.sum(1), alpha=step)
    return torch.cat([W.mean(0).reshape(-1), b.mean(0)])


class Buffers:
    """A module whose parameters and gradients are views of two flat vectors."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.parameters = net, list(net.parameters())
        self.theta = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.slope = torch.zeros_like(self.theta)
        at = 0
        for p in self.parameters:
            here = slice(at, at + p.numel())
            p.data, p.grad = self.theta[here].view_as(p), self.slope[here].view_as(p)
            at += p.numel()

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """∇L at the parameters, valid until the next call."""
        self.slope.zero_()
        F.cross_entropy(self.net(x), y).backward()
        return self.slope


def fedavg(buffers: Buffers, start: Tensor, shards: Shards, index: dict[int, Tensor], step: float) -> Tensor:
    """FedAvg of any network by the native kernels: nothing but the passes and one operation a step."""
    total = torch.zeros_like(start)
    for k, steps in index.items():
        x, y = shards[k]
        buffers.theta.copy_(start)
        for rows in steps:
            buffers.theta.sub_(buffers.gradient(x[rows], y[rows]), alpha=step)
        total.add_(buffers.theta)
    return total.div_(len(index))


def gradient_and_product(
    buffers: Buffers, theta: Tensor, v: Tensor, shards: Shards, rows: Tensor, others: Tensor
) -> tuple[Tensor, Tensor]:
    """∇L_k(θ) and ∇²L_k(θ) v by the native kernels."""
    buffers.theta.copy_(theta)
    sizes = [p.numel() for p in buffers.parameters]
    parts = [part.view_as(p) for part, p in zip(v.split(sizes), buffers.parameters, strict=True)]
    first, second = torch.empty(len(shards), len(theta)), torch.empty(len(shards), len(theta))
    for k, (x, y) in enumerate(shards):
        first[k] = buffers.gradient(x[rows[k]], y[rows[k]])
        loss = F.cross_entropy(buffers.net(x[others[k]]), y[others[k]])
        inner = torch.autograd.grad(loss, buffers.parameters, create_graph=True)
        product = torch.autograd.grad(inner, buffers.parameters, parts)
        torch.cat([t.reshape(-1) for t in product], out=second[k])
    return first, second


class TinyCNN:
    """Gradients of the small network of paper 1 for grey images of 28 × 28, many models at once, by hand.

    Patches of 4 × 4 become 7 × 7 numbers, batch norm, ReLU; with a border of 1 (the last row and column fall off)
    patches of 2 × 2 become 4 × 4 of two channels, batch norm, ReLU; then a linear map of 32 numbers.
    """

    layout = ((1, 16), (1,), (1,), (1,), (2, 4), (2,), (2,), (2,), (10, 32), (10,))
    eps = 1e-5

    def parts(self, theta: Tensor) -> list[Tensor]:
        """Weight and bias of: first convolution, its norm, second, its norm, linear; each [M, …]."""
        sizes = [torch.Size(shape).numel() for shape in self.layout]
        return [t.view(len(theta), *shape) for t, shape in zip(theta.split(sizes, 1), self.layout, strict=True)]

    def gradient(self, theta: Tensor, patches: Tensor, labels: Tensor) -> Tensor:
        """[M, 363] from θ [M, 363], patches [M, n, 49, 16] and labels [M, n]."""
        W1, b1, s1, t1, W2, b2, s2, t2, W3, b3 = self.parts(theta)
        M, n = labels.shape
        inputs = patches.reshape(M, n * 49, 16)
        first = torch.baddbmm(b1[:, None], inputs, W1.mT).view(M, 1, n * 49)
        hat1, scale1 = self.normed(first, s1)
        out1 = torch.addcmul(t1[..., None], hat1, s1[..., None]).relu_()
        padded = F.pad(out1.view(M, n, 7, 7), (1, 0, 1, 0))
        tiles = padded.view(M, n, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4).reshape(M, 4, n * 16)
        second = torch.baddbmm(b2[..., None], W2, tiles)
        hat2, scale2 = self.normed(second, s2)
        out2 = torch.addcmul(t2[..., None], hat2, s2[..., None]).relu_()
        features = out2.view(M, 2, n, 16).transpose(1, 2).reshape(M, n, 32)
        error = softmax_error(torch.baddbmm(b3[:, None], features, W3.mT), labels)
        gW3, gb3 = error.mT @ features, error.sum(1)
        back = (error @ W3).view(M, n, 2, 16).transpose(1, 2).reshape(M, 2, n * 16)
        back = back * (out2 > 0)
        d2, gs2, gt2 = self.back(back, hat2, scale2)
        gW2, gb2 = d2 @ tiles.mT, d2.sum(2)
        spread = (W2.mT @ d2).view(M, 2, 2, n, 4, 4).permute(0, 3, 4, 1, 5, 2).reshape(M, n, 8, 8)
        back = spread[:, :, 1:, 1:].reshape(M, 1, n * 49) * (out1 > 0)
        d1, gs1, gt1 = self.back(back, hat1, scale1)
        gW1, gb1 = d1 @ inputs, d1.sum(2)
        return torch.cat([g.reshape(M, -1) for g in (gW1, gb1, gs1, gt1, gW2, gb2, gs2, gt2, gW3, gb3)], 1)

    def normed(self, z: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers at mean 0 and variance 1 by channel, [M, c, m], and scale / standard deviation."""
        variance, mean = torch.var_mean(z, 2, correction=0, keepdim=True)
        inverse = (variance + self.eps).rsqrt_()
        return (z - mean).mul_(inverse), inverse * scale[..., None]

    def back(self, d: Tensor, hat: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Through a batch norm: the derivative by its input, and by its scale and shift."""
        gs, gt = (d * hat).sum(2), d.sum(2)
        m = d.shape[2]
        return (d - gt[..., None] / m - hat * (gs[..., None] / m)) * scale, gs, gt


def local_svrg(start: Tensor, patches: Tensor, y: Tensor, plan: Sequence[Period], step: float) -> Tensor:
    """Local-SVRG of the tiny network: patches [K, N, 49, 16], labels [K, N]; both points of a step in one pass."""
    net, K = TinyCNN(), len(y)
    x = start.repeat(K, 1)
    anchor, whole = x.clone(), torch.cat([net.gradient(start[None], patches[k, None], y[k, None]) for k in range(K)])
    everyone = torch.arange(K)[:, None]
    for period in plan:
        for t in range(period.rows.shape[1]):
            rows = period.rows[:, t]
            some, labels = patches[everyone, rows], y[everyone, rows]
            both = net.gradient(torch.cat([x, anchor]), some.repeat(2, 1, 1, 1), labels.repeat(2, 1))
            old = x
            x = x - step * (both[:K] - both[K:] + whole)
            for k in period.coins[:, t].nonzero().flatten().tolist():
                anchor[k], whole[k] = old[k], net.gradient(old[k, None], patches[k, None], y[k, None])[0]
        x = x.mean(0).repeat(K, 1)
    return x[0]


def meritfed(x: Tensor, rows: Tensor, valid: Tensor, step: float, mirror_step: float, mirror_steps: int) -> Tensor:
    """MeritFed on mean estimation: the slope is affine in w, so it is a Gram matrix and a vector; weights after it."""
    K, _, d = rows.shape
    G = (x - rows.mean(1)) * (2.0 / d)
    # −γ G ∇L_0(x − γ Gᵀw) = γ G((2/d) γ Gᵀw − ∇L_0(x))
    gram = (2.0 / d * step * step * mirror_step) * (G @ G.T)
    slope = (-step * mirror_step) * (G @ (2.0 / d * (x - valid.mean(0))))
    logs = torch.zeros(K)
    w = torch.full((K,), 1.0 / K)
    for _ in range(mirror_steps):
        logs.sub_(torch.addmv(slope, gram, w))
        w = torch.softmax(logs, 0, out=w)
    return torch.cat([x - step * (w @ G), w])


def fednest(start: list[Tensor], train: Any, valid: Any, index: Tensor, knobs: Any) -> Tensor:
    """An epoch of FedNest on a perceptron whose first layer is the outer variable; features are computed once."""
    (W, b), (V, c), K = start[:2], start[2:], len(train[1])
    x, y = train
    step, outer_step, steps, terms, lipschitz, ridge = knobs

    def features(inputs: Tensor) -> Tensor:
        return torch.addmm(b, inputs.flatten(0, 1), W.T).relu_().view(*inputs.shape[:2], -1)

    def slope(H: Tensor, labels: Tensor, V: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        error = softmax_error(torch.baddbmm(c[:, None], H, V.mT), labels)
        return error.mT @ H, error.sum(1), error

    many = V.expand(K, *V.shape), c.expand(K, *c.shape)
    inside, goal = features(x), features(valid[0])
    qV, qc, e_in = slope(inside, y, *many)
    qV, qc = qV.mean(0) + ridge * V, qc.mean(0) + ridge * c
    beta, at = step / steps, torch.arange(K)[:, None]
    Vi, ci = V - beta * qV.expand(K, *V.shape), c - beta * qc.expand(K, *c.shape)
    for t in range(steps - 1):
        H, labels = features(x[at, index[:, t]]), y[at, index[:, t]]
        gV, gc, _ = slope(H, labels, Vi, ci)
        oV, oc, _ = slope(H, labels, *many)
        Vi = Vi - beta * (gV - oV + ridge * (Vi - V) + qV)
        ci = ci - beta * (gc - oc + ridge * (ci - c) + qc)
    V, c = Vi.mean(0), ci.mean(0)
    many = V.expand(K, *V.shape), c.expand(K, *c.shape)
    P = torch.softmax(torch.baddbmm(many[1][:, None], inside, many[0].mT), -1)
    e_in = softmax_error(torch.baddbmm(many[1][:, None], inside, many[0].mT), y)
    fV, fc, e_out = slope(goal, valid[1], *many)
    n = y.shape[1]

    def bend(tV: Tensor, tc: Tensor) -> Tensor:  # how the error moves with the head
        z = torch.baddbmm(tc.expand(K, 1, -1), inside, tV.T.expand(K, -1, -1))
        return P * (z - (P * z).sum(-1, keepdim=True)) / n

    tV, tc = fV.mean(0) / lipschitz, fc.mean(0) / lipschitz
    pV, pc = torch.zeros_like(tV), torch.zeros_like(tc)
    for _ in range(terms):
        pV, pc = pV + tV, pc + tc
        moved = bend(tV, tc)
        hV, hc = (moved.mT @ inside).mean(0) + ridge * tV, moved.sum(1).mean(0) + ridge * tc
        tV, tc = tV - hV / lipschitz, tc - hc / lipschitz
    direct = (e_out @ V) * (goal > 0)
    cross = (bend(pV, pc) @ V + e_in @ pV) * (inside > 0)
    rows = [(direct, valid[0], 1.0), (cross, x, -1.0)]
    gW = sum(sign * d.flatten(0, 1).T @ i.flatten(0, 1) for d, i, sign in rows) / K
    gb = sum(sign * d.sum((0, 1)) for d, _, sign in rows) / K
    return torch.cat([(W - outer_step * gW).reshape(-1), b - outer_step * gb, V.reshape(-1), c])
