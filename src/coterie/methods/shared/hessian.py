"""Σ_k w_k ∇²L_k(θ) applied to many vectors, streamed, for forward-mode unrolling and dense Hessians."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from coterie.federation import RESULT, Each, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation
from coterie.methods.shared.works import own_product

Ask = Literal["all", "weighted"]


@work("hessian/weighted-products", update=RESULT)
def weighted_products(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """w_k ∇²L_k(θ) v for every row v of V, static.columns of them at a time, all on one batch."""
    theta, V, w = shared
    if len(V) == 1:  # outside of vmap, where networks are differentiated by hand
        return w * own_product(shard, theta, V[0], static.batch, draw)[None]
    return w * vmap(lambda v: own_product(shard, theta, v, static.batch, draw), chunk_size=static.columns)(V)


def hessian_rows(fed: Federation, theta: Tensor, V: Tensor, w: Tensor, *, draw: Draw, **static: Any) -> Tensor:
    """Σ_A w_k ∇²L_k(θ) v for every row v of V. One round, [rows, d] numbers up per client; none if A is empty."""
    if not len(fed.ids):
        return torch.zeros_like(V)
    mean = fed.mean(weighted_products, (theta, V, Each(w)), draw=draw, **static)
    return len(fed.ids) * mean


def asked(fed: Federation, w: Tensor, ask: Ask) -> Federation:
    """The active clients, or only those with w_k > 0: the others would add nothing to a weighted sum."""
    return fed if ask == "all" else replace(fed, ids=fed.ids[w[fed.ids] > 0.0])
