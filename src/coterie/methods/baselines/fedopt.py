"""FedAvg with a rule at the server: FedAvgM (Hsu et al. 2019), FedAdam and FedYogi (Reddi et al. 2021, Algorithm 2).

    Δ = x − Σ_k p_k x_k,   x_k: local steps of client k from x

    fedavgm   m ← βm + Δ,   x ← x − ηm
    fedadam   m ← βm + (1−β)Δ,   v ← β₂v + (1−β₂)Δ²,   x ← x − ηm/(√v + τ)
    fedyogi   the same with   v ← v − (1−β₂) sign(v − Δ²) Δ²

v starts at τ², the least that the paper allows. Each is `fedavg` with one value of `server`, which other averaging
methods take too (methods/shared/optimisers.py).
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.methods.base import Method, validated
from coterie.methods.baselines.fedavg import fedavg
from coterie.settings import BatchSize, Count, Positive

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Weights = Literal["sizes", "uniform"]


def _with_rule(name: str, rule: str, numbers: tuple[float, ...], local: dict[str, Any]) -> Method:
    """`fedavg` under another name, whose server has this rule."""
    return replace(fedavg(**local, server=f"{rule}({', '.join(map(repr, numbers))})"), name=name)


@validated
def fedavgm(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weights: Weights = "sizes",
    server_step: Positive = 1.0,
    momentum: Share = 0.9,
) -> Method:
    """Average local steps with momentum at the server.

    Symbols: γ = step, η = server_step, β = momentum.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        server_step: η, step size of the server; with β = 0 and η = 1 this is FedAvg
        momentum: β, decay of the server's momentum

    Example:
        >>> from coterie.methods import fedavgm
        >>> fedavgm(momentum=0.5).settings["momentum"]
        0.5
    """
    local = {"step": step, "local_steps": local_steps, "batch": batch, "weights": weights}
    return _with_rule("fedavgm", "momentum", (server_step, momentum), local)


@validated
def fedadam(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weights: Weights = "sizes",
    server_step: Positive = 0.01,
    momentum: Share = 0.9,
    second_momentum: Share = 0.99,
    adaptivity: Positive = 1e-3,
) -> Method:
    """Average local steps with Adam at the server.

    Symbols: γ = step, η = server_step, β = momentum, β₂ = second_momentum, τ = adaptivity.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        server_step: η, step size of the server; about the largest change of a parameter per round
        momentum: β, decay of the mean update
        second_momentum: β₂, decay of the squared mean update
        adaptivity: τ, added to the root of the squares; the larger, the nearer to momentum alone

    Example:
        >>> from coterie.methods import fedadam
        >>> fedadam(server_step=0.03).name
        'fedadam'
    """
    local = {"step": step, "local_steps": local_steps, "batch": batch, "weights": weights}
    return _with_rule("fedadam", "adam", (server_step, momentum, second_momentum, adaptivity), local)


@validated
def fedyogi(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weights: Weights = "sizes",
    server_step: Positive = 0.01,
    momentum: Share = 0.9,
    second_momentum: Share = 0.99,
    adaptivity: Positive = 1e-3,
) -> Method:
    """Average local steps with Yogi at the server.

    Symbols: γ = step, η = server_step, β = momentum, β₂ = second_momentum, τ = adaptivity.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        server_step: η, step size of the server; about the largest change of a parameter per round
        momentum: β, decay of the mean update
        second_momentum: β₂, how fast the squares follow: 1 − β₂ of a squared update per round
        adaptivity: τ, added to the root of the squares; the larger, the nearer to momentum alone

    Example:
        >>> from coterie.methods import fedyogi
        >>> fedyogi(server_step=0.03).name
        'fedyogi'
    """
    local = {"step": step, "local_steps": local_steps, "batch": batch, "weights": weights}
    return _with_rule("fedyogi", "yogi", (server_step, momentum, second_momentum, adaptivity), local)
