"""FedSep (Li and Huang 2023), Algorithm 1: clients communicate x ∈ R^p and learn y ∈ R^d.

    decode   y = y_x = argmin_y g(x, y)           at the client, from the x that it received
    learn    y ← y − η∇f(y), I times              Δy, on the client's own rows
    encode   Enc{Δy} = −(∂y_x/∂x)ᵀΔy = ∇²_xy g [∇²_yy g]⁻¹Δy
    server   x ← x − η_g mean Enc{Δy}             a descent step on h(x) = f(y_x), because Δy ≈ −ηI∇f

`two_layer` takes decode and encode as a pair of works, `by_objective` makes the pair from an objective g by automatic
differentiation. They are works because they run at the client and may use its rows (the paper's g has an index m), and
are passed by name: module-level functions marked @work. A node runs them only if it admits them. They are called with

    objective   shared = (x, y)      returns g, a number
    decode      shared = x           returns y
    encode      shared = (x, y, v)   returns Enc{v}

The learning layer y is the problem's model.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from coterie.errors import UsageError, gist
from coterie.federation import RESULT, Shard, Static, Tree, Work, work
from coterie.federation.work import name_of
from coterie.methods.base import Draw, Federation, Method, Problem, View
from coterie.methods.shared.works import LocalSteps, local_sgd
from coterie.numerics import neumann
from coterie.numerics.derivatives import grad, hessian_vector, mixed_vector
from coterie.numerics.lasso import fixed_conjugate_gradients

Learning = LocalSteps  # how a client learns: step η, I steps, batch
LEARNING = Learning(0.1, 5, 32)


class TwoLayerState(NamedTuple):
    """The communication parameter x [p], and the model's start [d], which all clients know."""

    x: Tensor
    start: Tensor


class _Model(NamedTuple):
    """What a decoder at the server may know of the model."""

    start: Tensor

    @property
    def size(self) -> int:
        return len(self.start)


class _AtServer(NamedTuple):
    model: _Model


@work("two-layer/client-round", update=RESULT)
def client_round(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Decode, learn, encode: Enc{Δy}."""
    y = static.work("decode")(shard, shared, None, static, draw.phase("decode"))
    moved = local_sgd(shard, y, None, static, draw.phase("learn"))
    return static.work("encode")(shard, (shared, y, moved - y), None, static, draw.phase("encode"))


@work("two-layer/descend", update=None)
def descend(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """I_dec steps y ← y − γ∇_y g(x, y) from the model's own start."""
    g, y = static.work("objective"), shard.task.model.start
    slope = grad(lambda point, at: g(shard, (shared, point), None, static, at))
    for i in range(static.decode_steps):
        y = y - static.decode_step * slope(y, draw.step(i))
    return y


@work("two-layer/implicit", update=RESULT)
def implicit(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇²_xy g [∇²_yy g]⁻¹v: the inverse by τ Σ_{q≤Q} (I − τ∇²_yy g)^q, or by conjugate gradients."""
    x, y, v = shared
    g = static.work("objective")

    def objective(at_x: Tensor, at_y: Tensor) -> Tensor:
        return g(shard, (at_x, at_y), None, static, draw)

    def product(u: Tensor) -> Tensor:
        return hessian_vector(lambda at_y: objective(x, at_y), y, u)

    if static.series == "neumann":
        u = neumann(product, v, scale=1.0 / static.decode_step, terms=static.terms)
    else:
        u = fixed_conjugate_gradients(product, v, steps=static.terms)
    return mixed_vector(objective, x, y, u)


def two_layer(
    decode: Work,
    encode: Work,
    start: Tensor,
    *,
    learning: LocalSteps = LEARNING,
    server_step: float = 1.0,
    model: Callable[[Tensor], Tensor] | None = None,
    **static: Any,
) -> Method:
    """Run Algorithm 1 with your own decoder and encoder.

    Cost: 1 round per call of round; as many numbers each way per client as x has.

    Args:
        decode: the work that makes the model y of x.
        encode: the work that turns the update of y into one of x.
        start: the first x.
        learning: how clients train between decoder and encoder.
        server_step: η_g, step size of the server.
        model: turns x into the parameters that are measured; by default x is the model, or the server decodes it,
            without rows, where it has another size.
        static: more settings, plain data, that the works receive as `static`.

    Example:
        >>> import torch
        >>> from coterie.methods import two_layer
        >>> from coterie.methods.compressed.fedsep import sketch_decode, sketch_encode
        >>> two_layer(sketch_decode, sketch_encode, torch.zeros(10), size=10).name
        'two-layer'
    """
    settings = {**static, **learning._asdict(), "decode": name_of(decode), "encode": name_of(encode)}
    at_server = Static(**settings)

    def init(problem: Problem, n: int) -> TwoLayerState:
        state = TwoLayerState(start.to(problem.start), problem.start)
        _check_model(state, decoded)
        return state

    def round(fed: Federation, s: TwoLayerState, draw: Draw) -> TwoLayerState:
        encoded = fed.mean(client_round, s.x, draw=draw.phase("client"), **settings)
        return s._replace(x=s.x - server_step * encoded)

    def decoded(s: TwoLayerState) -> Tensor:
        if model is not None:
            return model(s.x)
        if s.x.shape == s.start.shape:
            return s.x
        found: Tensor = decode(Shard(_AtServer(_Model(s.start)), None, None), s.x, None, at_server, Draw.of(0))
        return found

    return Method("two-layer", init, round, lambda s: View(decoded(s)))


def _check_model(s: TwoLayerState, decoded: Callable[[TwoLayerState], Tensor]) -> None:
    """Refuse an x from which no model of the problem can be made at the server."""
    remedy = "give model=, a function that makes the model's parameters of x."
    try:
        found = decoded(s)
    except Exception as error:
        raise UsageError(
            f"x has {len(s.x)} numbers and the model {len(s.start)}, and the server, which has no rows, cannot decode "
            f"it ({gist(error)}); {remedy}"
        ) from error
    if found.shape != s.start.shape:
        raise UsageError(f"x is decoded to shape {tuple(found.shape)}, the model has {tuple(s.start.shape)}; {remedy}")


def by_objective(
    objective: Work,
    start: Tensor,
    *,
    decode_step: float,
    decode_steps: int,
    series: Literal["neumann", "cg"] = "neumann",
    terms: int = 10,
    **more: Any,
) -> Method:
    """Run Algorithm 1 with the decoder and encoder that follow from an objective g, by automatic differentiation.

    Symbols: g = objective, γ = τ = decode_step, I_dec = decode_steps, Q + 1 = terms.

    Cost: 1 round per call of round; as many numbers each way per client as x has.

    Args:
        objective: the work that computes g(x, y); the decoder minimises it over y.
        start: the first x.
        decode_step: γ, step size of the decoder, and τ of the series.
        decode_steps: I_dec, steps of the decoder.
        series: how the inverse Hessian is applied: a Neumann series, or conjugate gradients.
        terms: Q + 1, terms of the series, or steps of conjugate gradients.
        more: settings of `two_layer`, and those that the objective receives as `static`.

    Example:
        >>> import torch
        >>> from coterie.federation import work
        >>> from coterie.methods import by_objective
        >>> @work
        ... def near(shard, shared, private, static, draw):
        ...     x, y = shared
        ...     return 0.5 * (y - x).square().sum()
        >>> by_objective(near, torch.zeros(3), decode_step=0.5, decode_steps=30).name
        'two-layer'
    """
    static: dict[str, Any] = {"objective": name_of(objective), "series": series, "terms": terms}
    static |= {"decode_step": decode_step, "decode_steps": decode_steps}
    return two_layer(descend, implicit, start, **static, **more)
