"""FedSep (Li and Huang 2023) for little traffic: x ∈ R^p, p ≪ d, decoded through a sketch S that is never sent.

    decode   θ_x = argmin_θ ½‖Sθ − x‖² + β‖θ‖₁, from θ₀
    encode   Enc{v} = −(∂θ_x/∂x)ᵀv = −(S_Uᵀ)⁺v, U the support of θ_x

All clients share S (as in the paper's experiments), which is a function of the seed, as the model's start θ₀ is. So p
numbers are sent each way, and clients keep nothing. x starts at Sθ₀.

β = 0: for p < d the printed inverse of SᵀS does not exist and the minimiser is not unique. Gradient descent from θ₀
ends at the nearest one, θ_x = θ₀ + S⁺(x − Sθ₀): x is the sketch of a *difference*, and training moves in the p
dimensions of θ₀ + range Sᵀ. Error feedback would be void there: the residual v − S⁺Sv is orthogonal to all that S can
carry (`fedsep-redraw` draws S anew each round, and has it). β > 0: the LASSO, by FISTA. Eq. 5 is printed without the
minus sign that Enc = −∂θ/∂x needs; here it is present.

The server step: Enc carries the share p/d of a gradient, so η_g = 1 hardly moves for p ≪ d. For a random projection P
on p dimensions ‖P∇²fP‖ is about (p λ₁ + tr ∇²f)/d, so the largest stable step is d/(p + r) times the uncompressed one,
r = tr ∇²f/λ₁. The default takes r = 200 and is never below 1. The same holds for β > 0 while the support U has more
than p entries: S_U is then wide, and Enc carries the share p/|U|. Only where |U| ≤ p does the derivative,
(S_UᵀS_U)⁻¹S_Uᵀ ≈ (d/p) S_Uᵀ, have the factor in it already, and the default is 1. |U| is that of the server's own
decode in each round.
"""

from typing import Annotated, Any, NamedTuple

from pydantic import Field
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.federation.work import name_of
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.compressed.two_layer import client_round
from coterie.numerics.lasso import LassoPoint, lasso, lasso_support, least_norm, pull_back, safe_step
from coterie.numerics.sketches import Kind, Sketch, sketch
from coterie.settings import BatchSize, Count, NonNegative, Positive

Seed = Annotated[int, Field(ge=0, lt=2**31)]
CURVED = 200  # r: about how many directions a network's loss curves in
SHARE = 20  # parameters per sent number, by default


class FedSepState(NamedTuple):
    """The communication parameter [p] and the start θ₀ [d], which all clients know."""

    x: Tensor
    start: Tensor


def sketch_of(static: Any, dimension: int) -> Sketch:
    """S, by its settings."""
    return sketch(static.sketch, static.size or max(1, dimension // SHARE), dimension, static.sketch_seed)


def decoded(x: Tensor, start: Tensor, static: Any) -> Tensor | LassoPoint:
    """θ_x, from θ₀ = start; with its support and gap where there is a penalty."""
    S = sketch_of(static, len(start))
    if static.penalty == 0.0:
        return least_norm(S, x, steps=static.decode_steps, start=start)
    return lasso(S, x, static.penalty, steps=static.decode_steps, step=static.decode_step, start=start)


@work("fedsep/sketch-decode", update=None)
def sketch_decode(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """θ_x at a client."""
    found = decoded(shared, shard.task.model.start, static)
    return found if isinstance(found, Tensor) else found.y


@work("fedsep/sketch-encode", update=RESULT)
def sketch_encode(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """−(S_Uᵀ)⁺v."""
    x, theta, v = shared
    S, support = sketch_of(static, shard.task.model.size), None
    if static.penalty > 0.0:
        support = lasso_support(S, x, theta, static.penalty, step=static.decode_step)
    return -pull_back(S, v, steps=static.encode_steps, support=support)


def server_gain(size: int, dimension: int) -> float:
    """The default η_g for β = 0, and for β > 0 while |U| > p: max(1, d/(p + r))."""
    return max(1.0, dimension / (size + CURVED))


@validated
def fedsep(
    *,
    size: Count | None = None,
    sketch: Kind = "hadamard",
    sketch_seed: Seed = 0,
    penalty: NonNegative = 0.0,
    decode_steps: Count = 10,
    decode_step: Positive | None = None,
    encode_steps: Count = 20,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 32,
    server_step: Positive | None = None,
) -> Method:
    """Communicate p numbers through a shared random sketch, and train in the full space at the clients.

    Symbols: p = size, β = penalty, I_dec = decode_steps, γ = decode_step, η = step, I = local_steps, η_g = server_step.

    Cost: 1 round per call of round; p numbers each way per client.

    Args:
        size: p, numbers that are sent; one twentieth of the parameters if not set
        penalty: β, weight of the ℓ₁ norm in the decoder; 0 takes the model nearest to the start
        decode_steps: I_dec, steps of the decoder
        decode_step: γ, step size of the decoder with a penalty; 1/‖S‖² if not set
        encode_steps: steps of the encoder's solver
        step: η, step size of the local steps
        server_step: η_g, step size of the server; max(1, d/(p + 200)) if not set, 1 while a penalty keeps |U| ≤ p

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.fedsep(size=2), rounds=2, mode="vmap")
        >>> fit.history[-1]["communication"]["floats_up"]  # 2 rounds, 2 clients, 2 numbers instead of 5
        8
    """
    knobs: dict[str, Any] = {"size": size, "sketch": sketch, "sketch_seed": sketch_seed, "penalty": penalty}
    knobs |= {"decode_steps": decode_steps, "decode_step": decode_step, "encode_steps": encode_steps}
    knobs |= {"step": step, "steps": local_steps, "batch": batch}
    knobs |= {"decode": name_of(sketch_decode), "encode": name_of(sketch_encode)}
    static = Static(**knobs)

    def init(problem: Problem, n: int) -> FedSepState:
        S = sketch_of(static, len(problem.start))
        safe_step(S, decode_step)  # one that diverges is refused before the first round
        return FedSepState(S.apply(problem.start), problem.start)

    def round(fed: Federation, s: FedSepState, draw: Draw) -> FedSepState:
        gain = server_step or gain_of(s)
        encoded = fed.mean(client_round, s.x, draw=draw.phase("client"), **knobs)
        return FedSepState(s.x - gain * encoded, s.start)

    def gain_of(s: FedSepState) -> float:
        found = s.start if penalty == 0.0 else decoded(s.x, s.start, static)
        wide = isinstance(found, Tensor) or int(found.support.sum()) > len(s.x)
        return server_gain(len(s.x), len(s.start)) if wide else 1.0

    def view(s: FedSepState) -> View:
        found = decoded(s.x, s.start, static)
        if isinstance(found, Tensor):
            return View(found)
        return View(found.y, more={"decode_gap": float(found.gap), "support": int(found.support.sum())})

    return Method("fedsep", init, round, view)
