"""Derivatives of softmax regression written down: a fraction of the operations that differentiating its loss takes.

    L(W, b) = mean of logsumexp(z) − z_y,   z = Wx + b,   p = softmax(z)
    ∇L = (e ⊗ [x, 1]),   e = (p − onehot(y))/n
    ∇²L v = (e' ⊗ [x, 1]),   e' = p ∘ (z' − pᵀz')/n,   z' = V x + v_b

θ is (W, b), flat. They compose with vmap and can be differentiated again.
"""

import torch
from torch import Tensor

from coterie.federation import Batch

LEAST = -40.0  # of log p: below it p is no number that matters, and soon one that processors are slow with


def softmax_gradient(theta: Tensor, batch: Batch) -> Tensor:
    """∇L on a batch."""
    x = batch.inputs.flatten(1)
    p = torch.softmax(_scores(theta, x), 0)
    labels = batch.labels.long()[None]
    return _outer(p.scatter_add(0, labels, p.new_full((), -1.0).expand(1, len(x))), x, batch)


def softmax_value_and_gradient(theta: Tensor, batch: Batch) -> Tensor:
    """(L, ∇L) on a batch, [1 + d], by one pass."""
    x = batch.inputs.flatten(1)
    log_p = torch.log_softmax(_scores(theta, x), 0)
    labels = batch.labels.long()[None]
    right = log_p.gather(0, labels)[0]
    value = right.mean() if batch.weight is None else (right * batch.weight).sum() / batch.weight.sum()
    p = log_p.clamp(min=LEAST).exp()
    e = p.scatter_add(0, labels, log_p.new_full((), -1.0).expand(1, len(x)))
    return torch.cat([-value[None], _outer(e, x, batch)])


def softmax_product(theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """∇²L v on a batch."""
    x = batch.inputs.flatten(1)
    p, along = torch.softmax(_scores(theta, x), 0), _scores(v, x)
    return _outer(p * (along - (p * along).sum(0)), x, batch)


def _scores(theta: Tensor, x: Tensor) -> Tensor:
    """Wx + b, a class a row, [c, n]: so all that follows is quickest under vmap."""
    features = x.shape[1]
    c = len(theta) // (features + 1)
    W, b = torch.split(theta, [c * features, c])
    return W.view(c, features) @ x.T + b[:, None]


def _outer(e: Tensor, x: Tensor, batch: Batch) -> Tensor:
    """The mean over rows of e ⊗ [x, 1], flat; padding counts for nothing."""
    e = e / len(x) if batch.weight is None else e * (batch.weight / batch.weight.sum())
    return torch.cat([(e @ x).reshape(-1), e.sum(1)])


__all__ = ["softmax_gradient", "softmax_product", "softmax_value_and_gradient"]
