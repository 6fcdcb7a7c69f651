"""Rounds in JAX, as pure functions to be compiled: vmap over clients, lax.scan over steps, derivatives by autodiff.

Each round was written in several ways, and the fastest on one core was kept. Import it by `jax_peer`, which sets the
threads first.
"""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.speed.loops import Knobs

CLASSES = 10


def cross_entropy(logits: Array, labels: Array) -> Array:
    return -(jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits)).sum(-1).mean()


def descended(parameters: tuple[Array, ...], gradient: tuple[Array, ...], step: float) -> tuple[Array, ...]:
    return jax.tree.map(lambda p, g: p - step * g, parameters, gradient)


def mean_of(rows: tuple[Array, ...]) -> tuple[Array, ...]:
    return jax.tree.map(lambda row: row.mean(0), rows)


def flat(parts: tuple[Array, ...]) -> Array:
    return jnp.concatenate([part.reshape(-1) for part in parts])


def logistic_fedavg(start: Array, x: Array, y: Array, ids: Array, index: Array, *, step: float) -> Array:
    """FedAvg of logistic regression: x [K, n, p], y [K, n], rows [clients, steps, batch]; equal sizes."""
    p = x.shape[2]
    model = start[: CLASSES * p].reshape(CLASSES, p), start[CLASSES * p :]

    def loss(parameters: tuple[Array, Array], inputs: Array, labels: Array) -> Array:
        W, b = parameters
        return cross_entropy(inputs @ W.T + b, labels)

    def local_steps(k: Array, rows_of_steps: Array) -> tuple[Array, Array]:
        def one(parameters: tuple[Array, Array], rows: Array) -> tuple[tuple[Array, Array], None]:
            return descended(parameters, jax.grad(loss)(parameters, x[k, rows], y[k, rows]), step), None

        return lax.scan(one, model, rows_of_steps)[0]

    return flat(mean_of(jax.vmap(local_steps)(ids, index)))


def logistic_task(start: Array, x: Array, y: Array, ids: Array, index: Array, *, step: float) -> Array:
    """FedAvg rounds of logistic regression: ids [rounds, clients], rows [rounds, clients, steps, batch]."""

    def one(model: Array, plan: tuple[Array, Array]) -> tuple[Array, None]:
        return logistic_fedavg(model, x, y, *plan, step=step), None

    return lax.scan(one, start, (ids, index))[0]


def tiny_cnn(theta: Array, patches: Array, labels: Array) -> Array:
    """The loss of the small network of paper 1 on patches [n, 49, 16] of grey images of 28 × 28; see `limits.TinyCNN`.

    Patches do not overlap, so that convolutions are products; lax.conv takes four times as long.
    """
    shapes = ((16,), (), (), (), (2, 4), (2,), (2,), (2,), (CLASSES, 32), (CLASSES,))
    ends = [sum(prod(shape) for shape in shapes[: i + 1]) for i in range(len(shapes) - 1)]
    parts = zip(jnp.split(theta, ends), shapes, strict=True)
    W1, b1, s1, t1, W2, b2, s2, t2, W3, b3 = (part.reshape(shape) for part, shape in parts)
    n = len(labels)
    first = jax.nn.relu(_normed(patches @ W1 + b1, (0, 1)) * s1 + t1)
    padded = jnp.pad(first.reshape(n, 7, 7), ((0, 0), (1, 0), (1, 0)))
    tiles = padded.reshape(n, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(n, 16, 4)
    second = jnp.einsum("npq,cq->ncp", tiles, W2) + b2[:, None]
    features = jax.nn.relu(_normed(second, (0, 2)) * s2[:, None] + t2[:, None])
    return cross_entropy(features.reshape(n, 32) @ W3.T + b3, labels)


def _normed(z: Array, axes: tuple[int, ...]) -> Array:
    return (z - z.mean(axes, keepdims=True)) * lax.rsqrt(z.var(axes, keepdims=True) + 1e-5)


def local_svrg(start: Array, patches: Array, y: Array, rows: Array, coins: Array, *, step: float) -> Array:
    """Local-SVRG of the tiny network, averaged at the end of every period; both points of a step in one pass.

    Shapes: patches [K, N, 49, 16], y [K, N], rows [periods, τ, K, batch], coins [periods, τ, K]. Passes over all rows
    go client after client, and only where a coin came up: under vmap they take twice as long, for every client.
    """
    K = len(y)
    everyone, slope = jnp.arange(K), jax.grad(tiny_cnn)
    State = tuple[Array, Array, Array]  # iterates, anchors, gradients at the anchors; [K, d] each

    def whole(theta: Array, k: Array) -> Array:
        return slope(theta, patches[k], y[k])

    def local_step(k: Array, x: Array, anchor: Array, gradient: Array, rows: Array) -> Array:
        inputs, labels = patches[k, rows], y[k, rows]
        here, there = jax.vmap(slope, (0, None, None))(jnp.stack([x, anchor]), inputs, labels)
        return x - step * (here - there + gradient)

    def one(state: State, plan: tuple[Array, Array]) -> tuple[State, None]:
        x, *anchored = state
        rows, coins = plan

        def refreshed(k: Array, kept: tuple[Array, Array]) -> tuple[Array, Array]:
            return kept[0].at[k].set(x[k]), kept[1].at[k].set(whole(x[k], k))

        def refreshed_by_coin(k: Array, kept: tuple[Array, Array]) -> tuple[Array, Array]:
            return lax.cond(coins[k], refreshed, lambda _, same: same, k, kept)

        moved = jax.vmap(local_step)(everyone, x, *anchored, rows)
        return (moved, *lax.fori_loop(0, K, refreshed_by_coin, tuple(anchored))), None

    def period(state: State, plan: tuple[Array, Array]) -> tuple[State, None]:
        x, *anchored = lax.scan(one, state, plan)[0]
        return (jnp.tile(x.mean(0), (K, 1)), *anchored), None

    begin = jnp.tile(start, (K, 1))
    state = begin, begin, lax.map(lambda k: whole(start, k), everyone)
    return lax.scan(period, state, (rows, coins))[0][0][0]


def meritfed(x: Array, rows: Array, valid: Array, *, step: float, mirror_step: float, mirror_steps: int) -> Array:
    """MeritFed on mean estimation, mirror steps on a Gram matrix as at coterie's server; rows [K, n, d].

    The gradients are written down: by autodiff they take four times as long.
    """
    K, _, d = rows.shape
    G = (x - rows.mean(1)) * (2.0 / d)
    gram = (2.0 / d * step * step * mirror_step) * (G @ G.T)
    slope = (-step * mirror_step) * (G @ (2.0 / d * (x - valid.mean(0))))

    def mirror(logs: Array, _: None) -> tuple[Array, None]:
        return logs - slope - gram @ jax.nn.softmax(logs), None

    w = jax.nn.softmax(lax.scan(mirror, jnp.zeros(K), None, length=mirror_steps)[0])
    return jnp.concatenate([x - step * (w @ G), w])


def fednest(
    backbone: tuple[Array, Array],
    head: tuple[Array, Array],
    train: tuple[Array, Array],
    valid: tuple[Array, Array],
    index: Array,
    *,
    knobs: Knobs,
) -> Array:
    """An epoch of FedNest on a perceptron: the backbone is its first layer; rows [K, n, p], index [K, τ − 1, batch].

    The backbone makes features of all rows once, and local steps look theirs up; its derivative goes back through the
    same pass.
    """
    Pair = tuple[Array, Array]
    beta = knobs.step / knobs.steps

    def features(backbone: Pair) -> Pair:
        W, b = backbone
        return jax.nn.relu(train[0] @ W.T + b), jax.nn.relu(valid[0] @ W.T + b)

    def goal(head: Pair, inputs: Array, labels: Array) -> Array:
        V, c = head
        return cross_entropy(inputs @ V.T + c, labels)

    def inner(head: Pair, inputs: Array, labels: Array) -> Array:
        return goal(head, inputs, labels) + 0.5 * knobs.ridge * jnp.square(flat(head)).sum()

    def clients_mean(loss: Callable[[Pair, Array, Array], Array], head: Pair, inputs: Array, labels: Array) -> Array:
        return jax.vmap(loss, (None, 0, 0))(head, inputs, labels).mean()

    (H, G), back = jax.vjp(features, backbone)
    slope = jax.grad(inner)
    q = jax.grad(clients_mean, 1)(inner, head, H, train[1])

    def local_steps(inputs: Array, labels: Array, rows_of_steps: Array) -> Pair:
        def one(y: Pair, rows: Array) -> tuple[Pair, None]:
            here, there = (slope(at, inputs[rows], labels[rows]) for at in (y, head))
            return descended(y, jax.tree.map(lambda a, b, c: a - b + c, here, there, q), beta), None

        return lax.scan(one, descended(head, q, beta), rows_of_steps)[0]

    y = mean_of(jax.vmap(local_steps)(H, train[1], index))
    _, product = jax.linearize(lambda at: jax.grad(clients_mean, 1)(inner, at, H, train[1]), y)

    def term(carry: tuple[Pair, Pair], _: None) -> tuple[tuple[Pair, Pair], None]:
        p, v = carry
        return (jax.tree.map(jnp.add, p, v), descended(v, product(v), 1.0 / knobs.lipschitz)), None

    v = jax.tree.map(lambda g: g / knobs.lipschitz, jax.grad(clients_mean, 1)(goal, y, G, valid[1]))
    (p, _), _ = lax.scan(term, (jax.tree.map(jnp.zeros_like, v), v), None, length=knobs.terms)

    def along(H: Array) -> Array:
        return jnp.vdot(flat(jax.grad(clients_mean, 1)(inner, y, H, train[1])), flat(p))

    cotangents = -jax.grad(along)(H), jax.grad(clients_mean, 2)(goal, y, G, valid[1])
    return flat((*descended(backbone, back(cotangents)[0], knobs.outer_step), *y))
