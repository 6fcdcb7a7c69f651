"""All methods, in one tuple. Command line, configuration, conformance tests and docs follow from it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from coterie.errors import unknown
from coterie.methods.afl import afl
from coterie.methods.base import Method
from coterie.methods.bilevel import bilevel
from coterie.methods.bilevel_accelerated import bilevel_accelerated
from coterie.methods.ditto import ditto
from coterie.methods.exact_gd import exact_gd
from coterie.methods.fedavg import fedavg
from coterie.methods.fedavg_s import fedavg_s
from coterie.methods.fednest import fednest, fednest_sgd
from coterie.methods.fixed_weights import fixed_weights
from coterie.methods.lfednest import lfednest, lfednest_nonalt, lfednest_svrg
from coterie.methods.local_svrg import local_svrg
from coterie.methods.local_train import local_train
from coterie.methods.meritfed import meritfed
from coterie.methods.pfedme import pfedme
from coterie.methods.primal_dual import primal_dual
from coterie.methods.rfho import rfho
from coterie.methods.sustain import sustain

FEDNEST = "FedNest (Tarzanagh et al. 2022)"
WEIGHTED_NODES = "Adaptively weighted nodes (2023)"


BILEVEL_GRID = {
    "method.step": (0.05, 0.02, 0.01),
    "method.system_step": (5e-4, 2e-4, 1e-4),
    "method.local_steps": (10, 20),
    "method.outer_step": (0.025, 0.02, 0.015),
}


class MethodEntry(NamedTuple):
    """A method: its name, factory, paper, what it is, whether it learns weights, and its paper's grid for `tune`."""

    name: str
    make: Callable[..., Method]
    paper: str
    summary: str
    learns_weights: bool = False
    grid: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


METHODS: tuple[MethodEntry, ...] = (
    MethodEntry("bilevel", bilevel, WEIGHTED_NODES, "weights by hypergradients (Alg. 3)", True, BILEVEL_GRID),
    MethodEntry(
        "bilevel-accelerated",
        bilevel_accelerated,
        WEIGHTED_NODES,
        "accelerated, for convex F (Alg. 2)",
        True,
        BILEVEL_GRID,
    ),
    MethodEntry(
        "ditto",
        ditto,
        "Li et al. 2021",
        "global model, proximal personal steps at the target",
        grid={"method.penalty": (0.05, 0.1, 0.2)},
    ),
    MethodEntry("local-svrg", local_svrg, WEIGHTED_NODES, "variance-reduced averaging with fixed weights (Alg. 1)"),
    MethodEntry(
        "pfedme",
        pfedme,
        "T Dinh et al. 2020",
        "Moreau envelopes, personalised at the target",
        grid={"method.penalty": (5.0, 10.0, 15.0)},
    ),
    MethodEntry("fedavg", fedavg, "McMahan et al. 2017", "plain averaging of local walks"),
    MethodEntry("local-train", local_train, "baseline", "the target alone, on its own rows"),
    MethodEntry("meritfed", meritfed, "MeritFed (Tupitsa et al. 2024)", "mirror descent on the target's loss", True),
    MethodEntry("primal-dual", primal_dual, "Primal–dual weighting", "saddle point of an augmented Lagrangian", True),
    MethodEntry("sustain", sustain, "Khanduri et al. 2021", "one loop, recursive momentum on both levels", True),
    MethodEntry("rfho", rfho, "Franceschi et al. 2017", "forward-mode derivative of the training itself", True),
    MethodEntry("afl", afl, "Mohri et al. 2019", "minimax over mixtures of the clients", True),
    MethodEntry("exact-gd", exact_gd, "baseline", "exact hypergradient by a dense Hessian; small models", True),
    MethodEntry("fixed-weights", fixed_weights, "baseline", "gradient descent with weights that are given"),
    MethodEntry("fednest", fednest, FEDNEST, "nested problems by global hypergradients and corrected walks", True),
    MethodEntry("fednest-sgd", fednest_sgd, FEDNEST, "FedNest with plain local walks in the inner problem"),
    MethodEntry("lfednest", lfednest, FEDNEST, "light: local hypergradients, plain local walks"),
    MethodEntry("lfednest-svrg", lfednest_svrg, FEDNEST, "light, with corrected walks in the inner problem"),
    MethodEntry("lfednest-nonalt", lfednest_nonalt, FEDNEST, "each client solves its own nested problem"),
    MethodEntry("fedavg-s", fedavg_s, "Hou et al. 2021", "simultaneous federated gradient descent–ascent"),
)


def method_entry(name: str) -> MethodEntry:
    """The entry of that name; an unknown one is an error that lists the nearest."""
    for entry in METHODS:
        if entry.name == name:
            return entry
    raise unknown("method", name, (entry.name for entry in METHODS))
