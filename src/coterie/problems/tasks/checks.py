"""What can be known of a nested problem's losses before the first round; each complaint names a remedy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import UsageError, gist
from coterie.federation import Batch, Stack
from coterie.numerics import Draw

NUDGE = 1e-2
DETACHED = "Keep it in torch without .detach(), .item(), .data, .numpy() or torch.no_grad()."


def examine(task: Any, train: Stack, valid: Stack | None) -> None:
    """Refuse losses that are not one finite number, or not connected to what they are minimised over."""
    goal = train if valid is None else valid
    x, y = task.x.start, task.y.start
    outer = "f" if task.kind in ("minimax", "single-level") else "the outer loss"
    f = _dependence(task.f, x, y, goal, outer)
    if task.kind == "single-level":
        _needs(f["x"], f"{outer} does not depend on x, so there is nothing to minimise; use x in it.")
        return
    if task.kind == "minimax":
        _needs(f["x"], f"{outer} does not depend on x; if only y matters, minimise −f over it with SingleLevel.")
        _needs(f["y"], f"{outer} does not depend on y; use SingleLevel(f) where there is no inner variable.")
        _curvature(task, train, outer)
        return
    inner = "the inner loss" if task.kind == "bilevel" else "r"
    g = _dependence(task.g, x, y, train, inner)
    if task.kind == "compositional":
        _needs(g["x"], "r does not depend on x, so neither does f; use x in it.")
        _needs(f["y"], f"{outer} does not depend on y = mean r(x); use y in it.")
        _curvature(task, train, inner)
        return
    _needs(
        g["y"],
        f"{inner} does not depend on y, so y*(x) is not determined; use y in it, or SingleLevel(f) if there is no y.",
    )
    _needs(f["x"] or f["y"], f"{outer} depends on neither x nor y, so there is nothing to minimise.")
    _needs(
        f["x"] or (g["x"] and f["y"]),
        f"x has no influence: {outer} does not use it, and does not feel it through y*(x) either; use x in {inner}.",
    )
    _curvature(task, train, inner)


def understands_padding(task: Any, train: Stack, valid: Stack | None) -> bool:
    """Whether the losses honour `batch.weight`, where clients differ in size; if not, they go one by one."""
    losses = [(task.g, train)] if task.kind != "single-level" else []
    losses.append((task.f, train if valid is None else valid))
    return all(not rows.ragged or _honours_weights(task, loss, rows) for loss, rows in losses)


def _honours_weights(task: Any, loss: Callable[..., Tensor], rows: Stack) -> bool:
    batch = rows.client(int(rows.counts.argmin())).all()
    n, device = len(batch.inputs), batch.inputs.device
    place = torch.arange(n + 3, device=device).clamp(max=n - 1)
    weight = (torch.arange(n + 3, device=device) < n).to(task.x.start.dtype)
    padded = Batch(tuple(c[place] for c in batch.columns), weight)
    with torch.no_grad():
        plain, with_padding = (loss(task.x.start, task.y.start, b) for b in (batch, padded))
    return bool(torch.isclose(plain, with_padding, rtol=1e-5))


def _needs(found: bool, complaint: str) -> None:
    if not found:
        raise UsageError(complaint)


def _dependence(loss: Callable[..., Tensor], x: Tensor, y: Tensor, rows: Stack, name: str) -> dict[str, bool]:
    """On which of x and y the loss depends; a loss that does but hides it from autograd is refused."""
    batch = rows.client(0).all()
    value = _scalar(loss, x, y, batch, name, 0)
    for k in range(1, len(rows)):
        with torch.no_grad():
            _scalar(loss, x, y, rows.client(k).all(), name, k)
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    out = loss(*leaves, batch)
    found = torch.autograd.grad(out, leaves, allow_unused=True) if out.requires_grad else (None, None)
    nudged = [v + NUDGE * (1 + v.abs()) * Draw.of(0, device=v.device).normal(len(v), dtype=v.dtype) for v in (x, y)]
    for letter, gradient, point in (("x", found[0], (nudged[0], y)), ("y", found[1], (x, nudged[1]))):
        with torch.no_grad():
            moves = bool(loss(*point, batch) != value)
        if gradient is None and moves:
            raise UsageError(
                f"{name} changes with {letter}, but its graph is cut: autograd sees no {letter} in it. {DETACHED}"
            )
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise UsageError(
                f"the gradient of {name} in {letter} is not finite at the start; guard roots, logarithms and norms "
                "at 0, or start elsewhere."
            )
    return {letter: gradient is not None for letter, gradient in zip("xy", found, strict=True)}


def _scalar(loss: Callable[..., Tensor], x: Tensor, y: Tensor, batch: Batch, name: str, client: int) -> Tensor:
    try:
        value = loss(x, y, batch)
    except Exception as error:
        raise UsageError(f"{name} fails on client {client}: {gist(error)}") from error
    if not isinstance(value, Tensor):
        raise UsageError(f"{name} returned a {type(value).__name__} on client {client}, not a tensor. {DETACHED}")
    if value.dim() != 0:
        raise UsageError(
            f"{name} returned a tensor of shape {tuple(value.shape)} on client {client} where one number is needed; "
            "return the mean over the batch, .mean()."
        )
    if not bool(torch.isfinite(value)):
        raise UsageError(
            f"{name} is {float(value)} at the start on client {client}; look for 0/0, log 0 or overflow in it, "
            "or start elsewhere."
        )
    return value


def _curvature(task: Any, train: Stack, name: str) -> None:
    """Second derivatives must work, on one batch."""
    batch = train.client(0).take(torch.zeros(2, dtype=torch.int64, device=train.counts.device))
    x, y = task.x.start, task.y.start
    try:
        task.inner_hvp(x, y, y, batch)
        task.cross(x, y, y, batch)
    except Exception as error:
        raise UsageError(
            f"second derivatives of {name} fail ({str(error).splitlines()[0]}); build it from torch operations that "
            "are twice differentiable."
        ) from error


def why_not_at_once(task: Any, train: Stack, valid: Stack | None) -> str:
    """Why vmap cannot run the losses for many clients at once; empty where it can."""
    x, y = (torch.stack([start, start]) for start in (task.x.start, task.y.start))
    oracles = [(task.direct_gradient, train if valid is None else valid)]
    if task.kind != "single-level":
        oracles.append((task.inner_gradient, train))
    try:
        for oracle, rows in oracles:
            few = rows.client(0).take(torch.zeros(2, dtype=torch.int64, device=rows.counts.device)).columns
            twice = tuple(torch.stack([column, column]) for column in few)
            vmap(lambda x_, y_, columns, oracle=oracle: oracle(x_, y_, Batch(columns)))(x, y, twice)
    except Exception as error:
        return f"{gist(error)}; use torch.where instead of if on values, and no .item()"
    return ""
