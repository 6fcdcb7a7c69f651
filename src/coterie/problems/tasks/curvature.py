"""Constants of smooth, strongly convex losses, for the problems that know theirs."""

from typing import NamedTuple


class Curvature(NamedTuple):
    """μ, L₁ and L₂: every L_k is μ-strongly convex, its gradient L₁-Lipschitz and its Hessian L₂-Lipschitz."""

    convex: float
    smooth: float
    hessian_lipschitz: float
