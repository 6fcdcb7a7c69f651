"""Plain numerics: simplex geometry, linear solvers, draws. Nothing here knows of clients or servers."""

from coterie import machine
from coterie.numerics.clusters import clusters
from coterie.numerics.draws import Draw
from coterie.numerics.linear import CGResult, conjugate_gradients, neumann
from coterie.numerics.proximal import project_ball, soft_threshold
from coterie.numerics.simplex import entropic_step, project_capped_simplex, project_simplex, uniform

machine.hold()

__all__ = [
    "CGResult",
    "Draw",
    "clusters",
    "conjugate_gradients",
    "entropic_step",
    "neumann",
    "project_ball",
    "project_capped_simplex",
    "project_simplex",
    "soft_threshold",
    "uniform",
]
